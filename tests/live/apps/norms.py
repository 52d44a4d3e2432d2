"""A batch norm in training mode, whose running mean every worker has for itself, and a head named in private=."""

import os
import time

import flask
import torch
import where

import gpuworker

app = where.app


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(1024, 1024)
        self.register_buffer("cache", torch.zeros(600_000), persistent=False)


@gpuworker.share(private=os.environ.get("PRIVATE", "head.*").split())
def net() -> Net:
    return Net().train()


@app.before_request
def hold() -> None:
    if flask.request.path != "/where":
        time.sleep(float(flask.request.args.get("hold", 0)))


@app.get("/buffers")
def buffers() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "mean": net.norm.running_mean.tolist(),
        "batches": net.norm.num_batches_tracked.item(),
        "cache": net.cache.sum().item(),
        "bias": net.head.bias[0].item(),
    }


@app.get("/train")
def train() -> dict[str, object]:
    net.norm(torch.full((4, 8), 7.0) + torch.rand(4, 8))
    net.cache.fill_(1)
    net.head.bias.fill_(123)
    return buffers()
