"""Packs models of the field, attaches them through a CUDA arena and compares with a fresh load, bit for bit."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import torch

from gpuworker.weights import staging
from gpuworker.weights.arena import lay_out, slices
from gpuworker.weights.cuda import CudaArena
from gpuworker.weights.packing import pack, unpack


def through_the_arena(loaded: object) -> object:
    packed, arena = pack(loaded), CudaArena()
    layout = lay_out([s.storage.nbytes() for s in packed.sources], [s.private for s in packed.sources])
    fd, memory = arena.create(layout.nbytes)
    places = [memory[offset : offset + size] for offset, size in layout.places]
    staging.copy(zip([s.storage for s in packed.sources], places, strict=True), lambda done, seconds: None)
    arena.finish(fd, mutable=False)
    start = time.perf_counter()
    attached = arena.attach(fd, layout.nbytes, mutable=False)
    mapped = time.perf_counter()
    result = unpack(packed.pickle, slices(layout, attached, copy_private=True))
    print(f"  {layout.nbytes / 2**20:.0f} MiB: mapped in {(mapped - start) * 1e3:.1f} ms, "
          f"unpacked {len(packed.sources)} storages in {(time.perf_counter() - mapped) * 1e3:.1f} ms")  # fmt: skip
    os.close(fd)
    return result


def bert() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import transformers

    config = transformers.BertConfig(num_hidden_layers=4)
    return transformers.BertModel(config), (torch.randint(0, 1000, (2, 128)),)


def resnet() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import timm

    return timm.create_model("resnet50"), (torch.rand(2, 3, 224, 224),)


def gru() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return torch.nn.GRU(32, 64, num_layers=3, bidirectional=True), (torch.rand(5, 2, 32),)


def many_small() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10_000)]), (torch.rand(2, 8),)


def outputs(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.inference_mode():
        out = model(*[tensor.cuda() for tensor in inputs])
    return out if isinstance(out, torch.Tensor) else out[0]


def main() -> None:
    warnings.simplefilter("error", UserWarning)
    torch.backends.cudnn.deterministic = True
    makers: list[Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = [bert, resnet, gru, many_small]
    for maker in makers:
        torch.manual_seed(0)
        model, inputs = maker()
        model.eval()
        print(maker.__name__)
        attached = through_the_arena(model)
        assert isinstance(attached, type(model))
        expected = outputs(model.cuda(), inputs)
        assert torch.equal(outputs(attached, inputs), expected), maker.__name__


if __name__ == "__main__":
    main()
