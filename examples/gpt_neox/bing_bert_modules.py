"""Import this first: it lets a script of this folder import the modules of examples/bing_bert."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "bing_bert"))
