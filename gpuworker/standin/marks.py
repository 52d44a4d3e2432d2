"""Remembers which memory would be on the GPU.

The mark is on the storage, not on the tensor: so views, ``detach()``, parameters over the same data and tensors that
only TorchScript holds have it too, with nothing to intercept. torch keeps the Python object of a storage, and so the
mark, for as long as anything in C++ uses the storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

_MARK = "_on_cuda"
#: Every marked storage that still lives, by the address of its C++ object.
_living: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor: one, those of its parts if it is sparse or a wrapper, none if it has no memory here."""
    try:
        return [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):
        return [storage for part in _parts(tensor) for storage in storages_of(part)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    return []


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether `tensor` would be on the GPU."""
    storages = storages_of(tensor)
    return bool(storages) and all(map(is_storage_marked, storages))


def is_storage_marked(storage: torch.UntypedStorage) -> bool:
    """The same of a storage."""
    return _MARK in vars(storage)


def mark(tensor: torch.Tensor, origin: str = "") -> None:
    """Remember that `tensor` would be on the GPU; see :func:`mark_storage`."""
    for storage in storages_of(tensor):
        mark_storage(storage, origin)


def mark_storage(storage: torch.UntypedStorage, origin: str = "") -> None:
    """Remember that `storage` would be on the GPU.

    :param origin: the line that put it there, for an error message.
    """
    vars(storage)[_MARK] = origin
    _living[storage._cdata] = storage


def origin_of(storage: torch.UntypedStorage) -> str:
    """What :func:`mark_storage` was told."""
    return str(vars(storage).get(_MARK, ""))


def living_storages() -> list[torch.UntypedStorage]:
    """All marked storages that something still uses."""
    return list(_living.values())


#: Tells the line of the app that is being run; slow enough to be asked only where it may be needed.
Origin = Callable[[], str]
