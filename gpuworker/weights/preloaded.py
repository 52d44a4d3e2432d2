"""Gives the tensors of a preloaded app the memory of this worker's device, from one arena for all workers."""

from __future__ import annotations

from typing import Any

import torch

from gpuworker.arbiter.preload import Preloaded
from gpuworker.standin import marks
from gpuworker.weights.packing import tensor_over
from gpuworker.weights.staging import bytes_of

#: The name of the content in the store and the log.
NAME = "the preloaded app"


def contents(preloaded: Preloaded) -> dict[str, list[torch.Tensor]]:
    """The memory of a preloaded app as an object to share: one tensor of bytes for each storage."""
    parts: dict[str, list[torch.Tensor]] = {"shared": [], "private": []}
    for storage, private in zip(preloaded.storages, preloaded.private, strict=True):
        parts["private" if private else "shared"].append(bytes_of(storage))
    return parts


def bind(preloaded: Preloaded, shared: dict[str, list[torch.Tensor]], *, stand_in: bool) -> None:
    """Put the tensors of a preloaded app over memory that :func:`contents` was loaded to.

    :param stand_in: there is no GPU, so the new memory has to be marked as the old one was.
    """
    parts = {kind: iter(tensors) for kind, tensors in shared.items()}
    moved: dict[int, torch.UntypedStorage] = {}
    for storage, private in zip(preloaded.storages, preloaded.private, strict=True):
        new = next(parts["private" if private else "shared"]).untyped_storage()
        moved[storage._cdata] = new
        if stand_in:
            marks.mark_storage(new)
    for tensor in preloaded.tensors:
        # Tensors made under inference_mode() can be changed only there.
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = _moved(tensor, moved)
    # The arbiter's copy is not needed here any more.
    preloaded.storages.clear()


def _moved(tensor: torch.Tensor, moved: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        indices, values = _moved(tensor._indices(), moved), _moved(tensor._values(), moved)
        coalesced: Any = {"is_coalesced": tensor.is_coalesced(), "check_invariants": False}
        return torch.sparse_coo_tensor(indices, values, tensor.size(), **coalesced)
    storage = tensor.untyped_storage()
    storage = moved.get(storage._cdata, storage)  # the parts of a sparse tensor may have been moved already
    offset: Any = tensor.storage_offset()
    return tensor_over(storage, tensor.dtype, offset, tensor.size(), tensor.stride(), _bits(tensor))


def _bits(tensor: torch.Tensor) -> dict[str, bool]:
    bits: dict[str, bool] = torch._utils.get_tensor_metadata(tensor)  # type: ignore[no-untyped-call]
    return bits
