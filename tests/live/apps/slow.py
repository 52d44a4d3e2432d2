"""An app whose import takes LOAD_SECONDS, and may be told to hang, fail or exit by a file of that name."""

import os
import sys
import time
from pathlib import Path

import where

app = where.app
home = Path(os.environ["HOME"])

with (home / "loads").open("a") as loads:
    loads.write(f"{os.getpid()}\n")
time.sleep(float(os.environ.get("LOAD_SECONDS", "0")))
while (home / "hang").exists():
    time.sleep(0.1)
if (home / "fail").exists():
    raise ValueError("the weights are not there")
if (home / "exit").exists():
    sys.exit(7)
