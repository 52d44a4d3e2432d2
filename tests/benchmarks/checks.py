"""What the checks around a request cost.

python -m tests.benchmarks.checks
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from gpuworker.faults import CpuHealth, CudaHealth, Health, Watch
from tests.benchmarks.worker import describe_run

ROUNDS = 50_000


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [])
    return [b""]


def seconds(called: Callable[..., Any], environ: dict[str, Any]) -> float:
    start = time.perf_counter()
    for _ in range(ROUNDS):
        called(environ, lambda *args: None)
    return (time.perf_counter() - start) / ROUNDS


def main() -> None:
    print(describe_run("checks", []))
    kinds: list[type[Health]] = [CpuHealth, CudaHealth] if torch.cuda.is_available() else [CpuHealth]
    near, far = socket.socketpair()
    with near, far:
        for kind in kinds:
            watch = Watch(app, kind(), None, 0, lambda: None)
            for name, environ in (("", {}), (" and the client", {"gunicorn.socket": near})):
                added = seconds(watch, environ) - seconds(app, environ)
                print(f"{kind.__name__}{name}: {added * 1e6:.2f} µs for each request")


if __name__ == "__main__":
    main()
