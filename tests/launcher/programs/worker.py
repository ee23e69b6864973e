"""Writes what it was started with to OUT.RANK; then it does what the last argument says: end, fail, or wait."""

import json
import os
import sys
import time

out, behaviour = sys.argv[-2:]
rank = os.environ["RANK"]
seen = {
    "argv": sys.argv,
    "pid": os.getpid(),
    **{name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_SPARSE_RUN")},
}
with open(f"{out}.{rank}", "w") as file:
    json.dump(seen, file)
if behaviour == "fail" and rank == "1":
    sys.exit(3)
if behaviour != "end":
    time.sleep(300)
