"""Shares a layer read from a safetensors file, whose tensors lie in the file until something copies them."""

import hashlib
import os
import time
from pathlib import Path

import flask
import torch
import where
from safetensors.torch import load_file

import gpuworker

app = where.app
home = Path(os.environ["HOME"])
weights = home / "weights.safetensors"


@gpuworker.share(files=[weights])
def layer() -> torch.nn.Linear:
    with (home / "loads").open("a") as loads:
        loads.write(f"layer {os.getpid()}\n")
    tensors = load_file(weights)
    outputs, inputs = tensors["weight"].shape
    layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.load_state_dict(tensors, assign=True)
    return layer.eval()


def digest() -> str:
    """Of the bits of a forward pass."""
    with torch.inference_mode():
        output = layer(torch.linspace(-3, 3, layer.in_features))
    return hashlib.sha256(output.numpy().tobytes()).hexdigest()


@app.get("/digest")
def answer() -> dict[str, object]:
    time.sleep(float(flask.request.args.get("hold", 0)))
    return {"pid": os.getpid(), "digest": digest()}
