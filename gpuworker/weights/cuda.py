"""The CUDA arena: an allocation of the driver's virtual memory management, shared as a POSIX file descriptor.

CUDA Driver API, "Virtual Memory Management": ``cuMemCreate`` makes physical memory that belongs to no context,
``cuMemExportToShareableHandle`` a descriptor of it, and any process maps that where and with what access it likes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from gpuworker import driver, memory
from gpuworker.weights.arena import ArenaError


class CudaArena:
    """Arenas on the one GPU this process sees."""

    device_type = "cuda"
    copies_on_write = False

    def create(self, nbytes: int) -> tuple[int, torch.UntypedStorage]:
        """See :class:`~gpuworker.weights.arena.Arena`."""
        cu = _driver()
        size = _whole_granules(cu, nbytes)
        _check_free(size)
        handle = _call(cu, cu.cuMemCreate, size, _properties(cu), 0)
        try:
            storage = _Mapping(cu, handle, size, writable=True).storage(nbytes)
            fd = int(_call(cu, cu.cuMemExportToShareableHandle, handle, _posix_fd(cu), 0))
        finally:
            _call(cu, cu.cuMemRelease, handle)  # the mapping and the descriptor hold the memory
        return fd, storage

    def finish(self, fd: int, *, mutable: bool) -> None:
        """See :class:`~gpuworker.weights.arena.Arena`. Each mapping has its own access, so there is nothing to seal."""
        torch.cuda.synchronize()

    def attach(self, fd: int, nbytes: int, *, mutable: bool) -> torch.UntypedStorage:
        """See :class:`~gpuworker.weights.arena.Arena`. Read-only: a kernel that writes faults."""
        cu = _driver()
        handle = _call(cu, cu.cuMemImportFromShareableHandle, fd, _posix_fd(cu))
        try:
            return _Mapping(cu, handle, _whole_granules(cu, nbytes), writable=mutable).storage(nbytes)
        finally:
            _call(cu, cu.cuMemRelease, handle)

    def trim(self) -> None:
        """See :class:`~gpuworker.weights.arena.Arena`."""
        torch.cuda.empty_cache()


class _Mapping:
    """An allocation in the address space of this process; gone when nobody refers to it any more."""

    def __init__(self, cu: Any, handle: Any, size: int, *, writable: bool) -> None:
        with ExitStack() as undo:
            self._pointer = _call(cu, cu.cuMemAddressReserve, size, 0, 0, 0)
            undo.callback(cu.cuMemAddressFree, self._pointer, size)
            _call(cu, cu.cuMemMap, self._pointer, size, 0, handle, 0)
            undo.callback(cu.cuMemUnmap, self._pointer, size)
            _call(cu, cu.cuMemSetAccess, self._pointer, size, [_access(cu, writable)], 1)
            self._undo = undo.pop_all()

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """The memory as torch sees it. It keeps this mapping."""
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (int(self._pointer), False),
            "version": 3,
            "strides": None,
        }
        return torch.as_tensor(self, device="cuda").untyped_storage()

    def __del__(self) -> None:
        undo = getattr(self, "_undo", None)
        if undo is None or sys.is_finalizing():
            return
        with suppress(RuntimeError):  # a broken context runs no kernels
            torch.cuda.synchronize()  # those that read this memory must have ended
        undo.close()


def _driver() -> Any:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch._C._cuda_synchronize()  # the context, which the calls below need
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise ArenaError(
            "sharing weights on a GPU needs the package cuda-bindings: pip install cuda-bindings"
        ) from error
    return bindings


def _call(cu: Any, function: Callable[..., Any], *args: Any) -> Any:
    status, *results = function(*args)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise ArenaError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None


def _posix_fd(cu: Any) -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(cu: Any) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = _posix_fd(cu)
    return properties


def _access(cu: Any, writable: bool) -> Any:
    flags = cu.CUmemAccess_flags
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access


def _whole_granules(cu: Any, nbytes: int) -> int:
    option = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granularity = int(_call(cu, cu.cuMemGetAllocationGranularity, _properties(cu), option))
    return -(-nbytes // granularity) * granularity


def _check_free(needed: int) -> None:
    torch.cuda.empty_cache()  # what torch's allocator only keeps is free for this
    free, total = torch.cuda.mem_get_info()
    if free < needed:
        users = memory.users(f"GPU-{driver.device_uuid()}")
        raise ArenaError(
            f"the shared weights need {needed / 2**30:.2f} GiB on {torch.cuda.get_device_name()}, which has "
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free{users}: free some or use another device."
        )
