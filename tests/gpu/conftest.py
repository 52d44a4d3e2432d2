from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuworker.arbiter.devices import nvml_gpus
from tests.live.conftest import make_server, nothing_left_behind  # noqa: F401
from tests.live.server import wait_until

GPUS = nvml_gpus()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not GPUS:
        for item in items:
            if "tests/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def used_bytes(index: int = 0) -> int:
    """GPU memory in use on the whole device, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used)
    finally:
        pynvml.nvmlShutdown()


def processes_on(index: int = 0) -> set[int]:
    """Pids with a CUDA context on the device, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture(autouse=True)
def gpu_memory_returns() -> Iterator[None]:
    """Fails a test after which the GPU holds more than before."""
    before = used_bytes()
    yield
    wait_until(lambda: used_bytes() <= before + 2**20, "the GPU memory to be free again", 30)
