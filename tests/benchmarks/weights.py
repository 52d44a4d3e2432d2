"""What sharing brings: first load, time to ready of a replacement, GPU memory, beside workers that load by themselves.

python -m tests.benchmarks.weights [--gib 1 10 40] [--own-gib 1 10] [--memory-gib 4]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.worker import describe_run, used_mib
from tests.live.server import Server, wait_until

APP = """
import os, torch, where, gpuworker
from gpuworker.cpus import granted_cpus
app = where.app
def load():
    threads = torch.get_num_threads()
    torch.set_num_threads(granted_cpus())
    model = torch.nn.Module()
    for index in range(max(1, round(float(os.environ["GIB"]) * 4))):
        weight = torch.empty(2**26).fill_(index)
        model.register_parameter(f"w{index}", torch.nn.Parameter(weight, requires_grad=False))
    torch.set_num_threads(threads)
    return model.eval()
"""
FORMS = {"shared": "model = gpuworker.share(load)\n", "own": "model = load().to(gpuworker.device())\n"}
READY = r"ready in ([\d.]+) s: context ([\d.]+) s, app ([\d.]+) s, weights ([\d.]+) s"


def serve(form: str, gib: float, workers: int) -> Server:
    directory = Path(tempfile.mkdtemp(prefix="gpuworker-benchmark-"))
    (directory / "sharing.py").write_text(APP + FORMS[form])
    devices = os.environ.get("GPUWORKER_DEVICES")
    return Server(directory, "sharing:app", workers=workers, devices=devices, env={"GIB": str(gib)})


def measure(form: str, gib: float, workers: int = 2) -> None:
    before = used_mib()
    with serve(form, gib, workers) as server:
        server.wait_ready(workers)
        memory = used_mib() - before
        os.kill(max(server.worker_pids()), signal.SIGKILL)
        server.wait_ready(workers + 1)
        times = re.findall(READY, server.log)
        rate = re.findall(r"of [\d.]+ GiB, ([\d.]+) GiB/s", server.log)
    first, again = times[0], times[-1]
    copied = f"{rate[-1]} GiB/s" if rate else "-"
    print(
        f"{form:7} {gib:5.0f} GiB  first ready {first[0]:>7} s   copy {copied:>11}   replacement ready {again[0]:>7} s "
        f"(context {again[1]}, app {again[2]}, weights {again[3]})   {workers} workers hold {memory:8.0f} MiB",
        flush=True,
    )
    wait_until(lambda: used_mib() <= before + 1, "the GPU memory to be free again")


def measure_memory(gib: float) -> None:
    """What the device holds for 1, 2, 4 and 8 workers."""
    for workers in (1, 2, 4, 8):
        before, held = used_mib(), {}
        for form in FORMS:
            with serve(form, gib, workers) as server:
                server.wait_ready(workers)
                held[form] = used_mib() - before
            wait_until(lambda before=before: used_mib() <= before + 1, "the GPU memory to be free again")
        print(
            f"{gib:5.0f} GiB, {workers} workers hold",
            *(f"{form} {mib:8,.0f} MiB" for form, mib in held.items()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, nargs="*", default=[1.0, 10.0, 40.0])
    parser.add_argument("--own-gib", type=float, nargs="*", default=[1.0, 10.0])
    parser.add_argument("--memory-gib", type=float, default=4.0)
    arguments = parser.parse_args()
    print(describe_run("weights", sys.argv[1:]))
    for gib in arguments.gib:
        measure("shared", gib)
    for gib in arguments.own_gib:
        measure("own", gib)
    measure_memory(arguments.memory_gib)


if __name__ == "__main__":
    main()
