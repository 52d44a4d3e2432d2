"""Kills workers under load, all the time: what fails, whether answers stay the same, what leaks.

python -m tests.benchmarks.soak [--seconds 600] [--every 0.2] [--workers 8] [--clients 8]
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.benchmarks.worker import describe_run, used_mib
from tests.live.server import Server

APP = """
import os, torch, flask, gpuworker
app = flask.Flask(__name__)

@gpuworker.share
def model():
    with open(os.path.join(os.environ["HOME"], "loads"), "a") as loads:
        loads.write("x")
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).eval()

@app.get("/infer")
def infer():
    with torch.inference_mode():
        out = model(torch.ones(4, 1024, device=gpuworker.device()))
    return {"out": out.double().sum().item().hex()}
"""


class Clients:
    """Threads that ask without a pause and count what comes back."""

    def __init__(self, server: Server, count: int) -> None:
        self._server = server
        self._on = True
        self.bodies: Counter[bytes] = Counter()
        self.failures: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while self._on:
            try:
                status, body = self._server.get("/infer")
                if status == 200:
                    self.bodies[body] += 1
                else:
                    self.failures[f"status {status}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.failures[type(error).__name__] += 1

    def stop(self) -> None:
        self._on = False
        for thread in self._threads:
            thread.join()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=0.2)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    print(describe_run("soak", sys.argv[1:]), flush=True)
    directory = Path(tempfile.mkdtemp(prefix="gpuworker-benchmark-"))
    (directory / "soaked.py").write_text(APP)
    before, chance, kills = used_mib(), random.Random(0), 0
    devices = os.environ.get("GPUWORKER_DEVICES")
    env = {"OMP_NUM_THREADS": "1"}  # the same sums on every machine
    with Server(directory, "soaked:app", workers=arguments.workers, devices=devices, env=env) as server:
        server.wait_ready(arguments.workers)
        server.json("/infer")
        memory, fds = used_mib() - before, descriptors(server.pid)
        clients = Clients(server, arguments.clients)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            time.sleep(arguments.every)
            workers = sorted(server.worker_pids())
            if workers:
                os.kill(chance.choice(workers), signal.SIGKILL)
                kills += 1
        clients.stop()
        server.wait_for_log(r"ready in", arguments.workers)
        time.sleep(3)
        after, fds_after = used_mib() - before, descriptors(server.pid)
        alive = len(server.worker_pids())
    loads = len((directory / "loads").read_text())
    print(f"{kills} kills, {sum(clients.bodies.values())} good answers, {len(clients.bodies)} different")
    print(f"{sum(clients.failures.values())} failed requests: {dict(clients.failures)}")
    print(f"{loads} loads; {alive} workers at the end; GPU memory {memory:.0f} MiB before, {after:.0f} MiB after")
    print(f"descriptors of the arbiter: {fds} before, {fds_after} after")
    print(f"GPU memory at the end {used_mib() - before:.0f} MiB")


if __name__ == "__main__":
    main()
