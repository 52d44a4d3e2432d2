"""Counts in tensors common to all workers."""

import os
import signal
import time

import flask
import torch
import where

import gpuworker

app = where.app


@gpuworker.share(mutable=True)
def counts() -> dict[str, torch.Tensor]:
    return {"counter": torch.zeros(1, dtype=torch.int64), "record": torch.zeros(1, dtype=torch.int64)}


def look() -> dict[str, object]:
    with gpuworker.lock(counts):
        return {"pid": os.getpid(), "counter": counts["counter"].item(), "record": counts["record"].item()}


@app.get("/look")
def looked() -> dict[str, object]:
    return look()


@app.get("/count")
def count() -> dict[str, object]:
    """Counts `times` in steps that lose counts without a lock; tells whether something was wrong meanwhile."""
    wrong, last = [], -1
    for _ in range(int(flask.request.args["times"])):
        with gpuworker.lock(counts):
            value = counts["counter"].item()
            if value != counts["record"].item() or value < last:
                wrong.append([value, counts["record"].item(), last])
            if value % 10 == 0:
                time.sleep(0)  # let others in, if the lock lets them
            counts["counter"].fill_(value + 1)
            counts["record"].add_(1)
            last = value + 1
    return {"pid": os.getpid(), "wrong": wrong}


@app.get("/die")
def die() -> None:
    with gpuworker.lock(counts):
        os.kill(os.getpid(), signal.SIGKILL)
