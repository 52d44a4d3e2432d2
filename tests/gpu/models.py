"""Packs models of the field, attaches them through a CUDA arena and compares with a fresh load, bit for bit."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch

from gpuworker.weights.cuda import CudaArena
from tests.models import MODELS, Model, device_of, through_an_arena


def ask_gru(model: Any) -> torch.Tensor:
    output: torch.Tensor = model(torch.linspace(0, 1, 5 * 2 * 32, device=device_of(model)).view(5, 2, 32))[0]
    return output


def many_small() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10_000)])


def ask_many_small(model: torch.nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(torch.linspace(0, 1, 2 * 8, device=device_of(model)).view(2, 8))
    return output


MORE = {
    "gru": Model(lambda: torch.nn.GRU(32, 64, num_layers=3, bidirectional=True), ask_gru),
    "many small": Model(many_small, ask_many_small),
}


def main() -> None:
    warnings.simplefilter("error", UserWarning)
    torch.backends.cudnn.deterministic = True
    for name, model in (MODELS | MORE).items():
        if name == "silero" and not importlib.util.find_spec("silero_vad"):
            continue
        print(name)
        attached = through_an_arena(model.fresh(), CudaArena())
        expected = model.ask(model.fresh().cuda())
        assert torch.equal(model.ask(attached), expected), name


if __name__ == "__main__":
    main()
