"""What a reload costs the clients, and how long a shutdown in the middle of one takes, beside gunicorn's sync worker.

    python -m tests.benchmarks.reload [--load 5] [--workers 1 2 8] [--clients 4] [--signals SIGTERM …]

The app imports nothing but Flask and sleeps for the seconds of `--load`, in place of a model that loads so long.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.worker import describe_run
from tests.live.server import Load, Server, wait_until

APP = """
import os, time, flask
app = flask.Flask(__name__)
note = os.path.join(os.environ["HOME"], "{}").format

@app.get("/")
def index():
    return "done"

open(note(f"loading-{os.getpid()}"), "w").close()
time.sleep(float(os.environ.get("LOAD_SECONDS", 0)))
open(note(f"loaded-{os.getpid()}"), "w").close()
"""
CLASSES = ("sync", "gpuworker.CudaWorker")
#: Longer than any shutdown should take.
GRACEFUL_TIMEOUT = 30


class Slow:
    """A server whose app becomes slow to load."""

    def __init__(self, worker: str, workers: int) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gpuworker-benchmark-"))
        (self.home / "sleeper.py").write_text(APP)
        self._arguments = ("sleeper:app", "--graceful-timeout", str(GRACEFUL_TIMEOUT))
        self._worker = worker
        self._workers = workers

    def __enter__(self) -> Slow:
        self.server = Server(self.home, *self._arguments, worker=self._worker, workers=self._workers, devices="cpu")
        self.server.start()
        self.wait_for("loaded", self._workers)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.stop()

    def hup(self, seconds: float) -> None:
        """Reload; the new workers load for `seconds`."""
        self.server.write_config(f'raw_env = ["LOAD_SECONDS={seconds}"]\n')
        self.server.signal(signal.SIGHUP)

    def wait_for(self, what: str, count: int) -> None:
        wait_until(lambda: len(list(self.home.glob(f"{what}-*"))) == count, f"{count} workers {what}", 300)


def reload(worker: str, workers: int, seconds: float, clients: int) -> None:
    with Slow(worker, workers) as slow:
        with Load(slow.server, clients, "/") as load:
            time.sleep(2)
            load.slowest = 0.0
            old, start = slow.server.worker_pids(), time.monotonic()
            slow.hup(seconds)
            slow.wait_for("loaded", 2 * workers)
            # Not their end: to take an interpreter with torch down is a second of work, when it serves no more.
            wait_until(lambda: left(slow.server) >= old, "the old workers to leave", 300)
            total = time.monotonic() - start
            time.sleep(2)
        print(
            f"{worker:21} -w {workers}  load {seconds:3.0f} s  {load.good:6} answered  {len(load.failures):3} failed  "
            f"slowest {load.slowest:6.2f} s   all new after {total:6.2f} s",
            *sorted(set(load.failures))[:2],
            flush=True,
        )


def left(server: Server) -> set[int]:
    """The workers that have left gunicorn's loop."""
    return {int(pid) for pid in re.findall(r"Worker exiting \(pid: (\d+)\)", server.log)}


def shutdown(worker: str, number: signal.Signals, workers: int = 2, seconds: float = 60.0) -> None:
    """How long `number` takes that comes while the new workers load, and without a reload."""
    took = []
    for reloading in (True, False):
        with Slow(worker, workers) as slow:
            if reloading:
                slow.hup(seconds)
                slow.wait_for("loading", 2 * workers)
            start = time.monotonic()
            slow.server.signal(number)
            slow.server.wait()
            took.append(time.monotonic() - start)
    print(f"{worker:21} {number.name} in a reload {took[0]:5.2f} s   otherwise {took[1]:5.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=5.0)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--signals", nargs="*", default=["SIGTERM", "SIGQUIT", "SIGINT"])
    arguments = parser.parse_args()
    print(describe_run("reload", sys.argv[1:]), flush=True)
    for workers in arguments.workers:
        for worker in CLASSES:
            reload(worker, workers, arguments.load, arguments.clients)
    for name in arguments.signals:
        for worker in CLASSES:
            shutdown(worker, signal.Signals[name])


if __name__ == "__main__":
    main()
