"""Who holds the memory of a GPU, by NVML, which can be asked from any process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def describe(uuid: str | None) -> str:
    """``1.20 of 139.80 GiB free (pid 12: 1.10 GiB)``; empty if NVML cannot tell.

    :param uuid: of the GPU or MIG instance, as NVML writes it.
    """
    asked = _ask(uuid)
    if asked is None:
        return ""
    held, running = asked
    return f"{held.free / 2**30:.2f} of {held.total / 2**30:.2f} GiB free{_list(running)}"


def users(uuid: str | None) -> str:
    """`` (pid 12: 1.10 GiB)``; empty if there are none, or NVML cannot tell."""
    asked = _ask(uuid)
    return _list(asked[1]) if asked else ""


@contextmanager
def nvml_device(uuid: str | None) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of a GPU or MIG instance.

    :raises pynvml.NVMLError: if there is no such device, or no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        pynvml.nvmlShutdown()


def _ask(uuid: str | None) -> tuple[Any, list[Any]] | None:
    """Memory and running processes."""
    import pynvml

    try:
        with nvml_device(uuid) as (nvml, handle):
            return nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError, AttributeError, TypeError):
        return None


def _list(running: list[Any]) -> str:
    used = [f"pid {process.pid}: {(process.usedGpuMemory or 0) / 2**30:.2f} GiB" for process in running]
    return f" ({', '.join(used)})" if used else ""
