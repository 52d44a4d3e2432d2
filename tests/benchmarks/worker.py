"""What the worker class costs: time to ready, memory per worker, requests/s beside gunicorn's own sync worker.

    python -m tests.benchmarks.worker [--seconds 5] [--rounds 3] [--workers 4]

Serves the digits example. The two classes take turns, and every figure stands beside its neighbour of the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gunicorn
import torch

from gpuworker.arbiter.devices import nvml_gpus
from tests.live.server import REPOSITORY, Server, is_running, wait_until

EXAMPLE = REPOSITORY / "docs" / "examples" / "digits"
CLASSES = ("sync", "gpuworker.CudaWorker")
REQUEST = json.dumps({"pixels": [[float((x * y) % 17) for x in range(8)] for y in range(8)]}).encode()


def serve(worker: str, workers: int) -> Server:
    directory = Path(tempfile.mkdtemp(prefix="gpuworker-benchmark-"))
    devices = os.environ.get("GPUWORKER_DEVICES")
    # The same number of threads for both: plain gunicorn would start one for every core in every worker.
    env = {"OMP_NUM_THREADS": "1"}
    return Server(
        directory, "app:app", "--chdir", str(EXAMPLE), worker=worker, workers=workers, devices=devices, env=env
    )


def _client(port: int, seconds: float, counted: multiprocessing.Queue[int]) -> None:
    head = (
        f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(REQUEST)}\r\n\r\n"
    )
    message, good, end = head.encode() + REQUEST, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))  # read here, before the next
        good += answer.startswith(b"HTTP/1.1 200")
    counted.put(good)


def requests_per_second(port: int, seconds: float, clients: int) -> float:
    counted: multiprocessing.Queue[int] = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=_client, args=(port, seconds, counted)) for _ in range(clients)]
    for process in processes:
        process.start()
    total = sum(counted.get() for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def compare(workers: int, seconds: float, rounds: int) -> None:
    clients = 2 * workers
    found: dict[str, list[float]] = {worker: [] for worker in CLASSES}
    for _ in range(rounds):
        for worker in CLASSES:
            with serve(worker, workers) as server:
                wait_until(lambda server=server: answers(server), "an answer")
                requests_per_second(server.port, 2.0, clients)  # warm all workers
                found[worker].append(requests_per_second(server.port, seconds, clients))
    medians = {worker: statistics.median(values) for worker, values in found.items()}
    for worker, values in found.items():
        print(f"{worker:24} {medians[worker]:9.0f} requests/s   of {[round(value) for value in values]}")
    print(f"ratio ours / sync        {medians[CLASSES[1]] / medians[CLASSES[0]]:.3f}")


def answers(server: Server) -> bool:
    try:
        return server.get("/health")[0] == 200
    except OSError:
        return False


def readiness() -> None:
    print("workers  start to all ready   slowest worker: total, context, app   kill -9 to ready   GPU MiB per worker")
    for workers in (1, 2, 4, 8):
        before, start = used_mib(), time.monotonic()
        with serve("gpuworker.CudaWorker", workers) as server:
            server.wait_ready(workers)
            total = time.monotonic() - start
            wait_until(lambda server=server: answers(server), "an answer")
            memory = (used_mib() - before) / workers
            pattern = r"ready in ([\d.]+) s: context ([\d.]+) s, app ([\d.]+) s"
            slowest = max(re.findall(pattern, server.log), key=lambda found: float(found[0]))
            victim, start = max(server.worker_pids()), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: not is_running(victim), "the kill")
            server.wait_ready(workers + 1)
            back = time.monotonic() - start
        print(f"{workers:7}  {total:16.2f} s   {' s, '.join(slowest):>32} s   {back:14.2f} s   {memory:16.0f}")


def used_mib() -> float:
    if not nvml_gpus():
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def describe_run(benchmark: str, arguments: list[str]) -> str:
    """The machine, the versions and the command."""
    gpus = ", ".join(gpu.name for gpu in nvml_gpus()) or "no GPU"
    return (
        f"{gpus}; {os.cpu_count()} CPUs; Python {platform.python_version()}, torch {torch.__version__}, gunicorn "
        f"{gunicorn.__version__}; python -m tests.benchmarks.{benchmark} {' '.join(arguments)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    print(describe_run("worker", sys.argv[1:]))
    readiness()
    compare(arguments.workers, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
