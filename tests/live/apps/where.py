"""Tells which worker answers, and on which device."""

import os
import random
import time

import flask
import numpy
import torch

import gpuworker

app = flask.Flask(__name__)
AT_IMPORT = {
    "slot": gpuworker.slot(),
    "device": str(gpuworker.device()),
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
}
# From the states the worker was given, before any request draws from them.
DRAWS = {"random": random.random(), "torch": torch.rand(1).item(), "numpy": numpy.random.rand()}


@app.get("/where")
def where() -> dict[str, object]:
    """Pid, slot, device; `hold` seconds late."""
    time.sleep(float(flask.request.args.get("hold", 0)))
    return {
        "pid": os.getpid(),
        "slot": gpuworker.slot(),
        "device": str(gpuworker.device()),
    }


@app.get("/state")
def state() -> dict[str, object]:
    """What the worker set up for this process."""
    return {
        "pid": os.getpid(),
        "at_import": AT_IMPORT,
        "draws": DRAWS,
        "threads": torch.get_num_threads(),
        "environ": dict(os.environ),
        "uid": os.getuid(),
    }
