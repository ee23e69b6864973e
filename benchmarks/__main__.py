import sys

from benchmarks.program import main

sys.exit(main())
