"""Shares models of the field: of transformers, of timm, and silero-vad's."""

import hashlib
import os
import time
from pathlib import Path

import flask
import torch
import where

import gpuworker
from tests.models import MODELS

app = where.app


def shared(name: str) -> torch.nn.Module:
    def load() -> torch.nn.Module:
        with Path(os.environ["HOME"], "loads").open("a") as loads:
            loads.write(f"{name} {os.getpid()}\n")
        return MODELS[name].fresh()

    return gpuworker.share(load, name=name)


models = {name: shared(name) for name in ("llama", "resnet", "silero")}


def digests() -> dict[str, str]:
    """Of the bits that each model answers with."""
    answers = {name: MODELS[name].ask(model) for name, model in models.items()}
    return {name: hashlib.sha256(answer.numpy().tobytes()).hexdigest() for name, answer in answers.items()}


@app.get("/digests")
def answer() -> dict[str, object]:
    time.sleep(float(flask.request.args.get("hold", 0)))
    return {"pid": os.getpid(), **digests()}
