"""Breaks its device when told to, as a CUDA error would: the edge to the driver is replaced."""

import os
import subprocess
import sys
import time
from pathlib import Path

import flask
import torch
import where

import gpuworker
from gpuworker import faults

app = where.app
app.register_error_handler(torch.cuda.OutOfMemoryError, gpuworker.out_of_memory)
STATE = {"problem": "", "ooms": 0, "given back": 0}


class Device(faults.CpuHealth):
    """A GPU that this file can break."""

    def problem(self) -> str:
        return STATE["problem"]

    def ooms(self) -> int:
        return STATE["ooms"]

    def give_back(self) -> None:
        STATE["given back"] += 1


faults.CpuHealth = Device


def load() -> torch.nn.Module:
    with Path(os.environ["HOME"], "loads").open("a") as loads:
        loads.write(f"cpu {os.getpid()}\n")
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64).eval()


net = gpuworker.share(load)


@app.get("/answer")
def answer() -> dict[str, object]:
    with torch.inference_mode():
        out = net(torch.ones(1, 64)).double().sum().item().hex()
    time.sleep(float(flask.request.args.get("hold", 0)))
    return {"pid": os.getpid(), "slot": gpuworker.slot(), "out": out}


@app.get("/assert")
def fail() -> dict[str, object]:
    STATE["problem"] = "CUDA error: device-side assert triggered"
    return {"pid": os.getpid()}


@app.get("/oom")
def oom() -> dict[str, object]:
    STATE["ooms"] += 1
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB")


@app.get("/faults")
def counts() -> dict[str, object]:
    return {"pid": os.getpid(), **STATE}


@app.get("/hang")
def hang() -> dict[str, object]:
    """With a child, as a tokenizer or a video decoder may be."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked = os.fork()
    if not forked:
        time.sleep(600)
    Path(os.environ["HOME"], "children").write_text(f"{child.pid} {forked}")
    stuck_here()
    return {}


def stuck_here() -> None:
    while True:
        time.sleep(0.01)


@app.get("/children")
def children() -> dict[str, object]:
    forked = os.fork()
    if not forked:
        time.sleep(600)
    return {"pid": os.getpid(), "forked": forked}


@app.get("/count")
def count() -> dict[str, object]:
    with Path(os.environ["HOME"], "counted").open("a") as counted:
        counted.write("x")
    time.sleep(float(flask.request.args.get("hold", 0)))
    return {}
