"""How long one killed worker is away, and eight that are killed at once.

python -m tests.benchmarks.storm
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.worker import describe_run
from tests.live.server import Server

WORKERS = 8


def main() -> None:
    print(describe_run("storm", sys.argv[1:]))
    directory = Path(tempfile.mkdtemp(prefix="gpuworker-benchmark-"))
    devices, started = os.environ.get("GPUWORKER_DEVICES"), WORKERS
    env = {"OMP_NUM_THREADS": "1"}
    with Server(directory, "shares:app", workers=WORKERS, devices=devices, env=env) as server:
        server.wait_ready(started)
        for killed in (1, WORKERS, 1, WORKERS):
            time.sleep(2)  # until all is quiet
            start = time.monotonic()
            for pid in sorted(server.worker_pids())[:killed]:
                os.kill(pid, signal.SIGKILL)
            started += killed
            server.wait_ready(started)
            print(f"{killed} killed: all ready again after {time.monotonic() - start:.2f} s")


if __name__ == "__main__":
    main()
