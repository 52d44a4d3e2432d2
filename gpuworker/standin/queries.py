"""Answers what ``torch.cuda`` is asked while CUDA does not run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from gpuworker.arbiter import devices
from gpuworker.memory import nvml_device
from gpuworker.patches import Patches
from gpuworker.standin.redirect import CPU, Redirect


class _Properties:
    """Some of what ``torch.cuda.get_device_properties`` tells.

    :ivar total_memory: in bytes.
    """

    def __init__(self, name: str, total_memory: int, major: int, minor: int) -> None:
        self.name, self.total_memory, self.major, self.minor = name, total_memory, major, minor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of the device is not known before CUDA runs")


def patch(redirect: Redirect, patches: Patches) -> None:
    """Answer for ``cuda:0``, the one device of a worker: from NVML if there is a GPU, else from the CPU."""
    cuda = torch.cuda

    def answer(value: Callable[[], Any]) -> Callable[..., Any]:
        # One function for each name: torch._dynamo keeps its rules by function.
        def answered(device: Any = None) -> Any:
            redirect.wants_cuda(device)  # there may be no such device
            return value()

        return answered

    for name in ("synchronize", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated"):
        patches.put(cuda, name, answer(lambda: None))
    patches.put(cuda, "init", lambda: None)
    patches.put(cuda, "current_device", lambda: 0)
    patches.put(cuda, "_exchange_device", lambda index: 0)
    patches.put(cuda, "_maybe_exchange_device", lambda index: 0)
    patches.put(cuda, "get_device_name", answer(lambda: _properties().name))
    patches.put(cuda, "get_device_capability", answer(lambda: (_properties().major, _properties().minor)))
    patches.put(cuda, "get_device_properties", answer(_properties))
    patches.put(cuda, "mem_get_info", answer(_memory))
    patches.put(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    _patch_generators(redirect, patches)
    if redirect.refuse:
        patches.put(cuda, "device_count", lambda: int(_gpu() is not None))
        patches.put(torch.nn.DataParallel, "__init__", _no_data_parallel(redirect))


@functools.cache
def _gpu() -> devices.Device | None:
    return next(iter(devices.visible_gpus()), None)


@functools.cache
def _properties() -> _Properties:
    gpu = _gpu()
    if gpu is None:
        return _Properties("CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0, 0)
    with nvml_device(gpu.uuid) as (nvml, handle):
        name, capability = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return _Properties(name, _memory()[1], *capability)


def _memory() -> tuple[int, int]:
    """Free and total bytes."""
    gpu = _gpu()
    if gpu is None:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    with nvml_device(gpu.uuid) as (nvml, handle):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return memory.free, memory.total - memory.reserved  # CUDA does not count what the driver keeps


def _patch_generators(redirect: Redirect, patches: Patches) -> None:
    original = torch.Generator

    class _Kind(type):
        def __call__(cls, device: Any = CPU) -> torch.Generator:
            if redirect.wants_cuda(device):
                if redirect.refuse:
                    raise redirect.refuse("a torch.Generator on cuda cannot be made before the fork")
                device = CPU
            return original(device)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    patches.put(torch, "Generator", _Kind("Generator", (), {"__module__": "torch"}))


def _no_data_parallel(redirect: Redirect) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        assert redirect.refuse
        raise redirect.refuse("torch.nn.DataParallel has no use where every worker has one GPU: leave it out")

    return refuse
