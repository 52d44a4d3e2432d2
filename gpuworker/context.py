"""Starting CUDA in a worker: at the app's first use, at the latest before the first request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from gpuworker import driver, memory
from gpuworker.arbiter.devices import Device


class DeviceUnavailableError(RuntimeError):
    """CUDA does not start on the GPU of this worker, or starts on another one."""


class CudaContext:
    """The CUDA context of this worker.

    :param timed: measures the start, wherever it happens, as a part of the boot.
    """

    def __init__(self, device: Device, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        self._device = device
        self._timed = timed

    def start_at_first_use(self) -> None:
        """Have the first use of CUDA, wherever in the app it is, make and check the context."""
        if self._device.is_cpu:
            return
        initialise = torch._C._cuda_init

        def first_use() -> None:
            torch._C._cuda_init = initialise
            with self._timed("context"):
                try:
                    initialise()
                    torch._C._cuda_synchronize()  # initialising alone makes no context
                except RuntimeError as error:
                    raise self._unavailable(error) from error
            self._check_device()

        # Called by torch once, on its way to CUDA, and under a lock that forbids anything but its C functions.
        torch._C._cuda_init = first_use

    def start(self) -> None:
        """Start CUDA if that has not happened yet, and make sure that it is the GPU meant.

        :raises DeviceUnavailableError: if it cannot be used, or CUDA came up on another GPU.
        """
        if not self._device.is_cpu:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._check_device()

    def _unavailable(self, error: RuntimeError) -> DeviceUnavailableError:
        held = memory.describe(self._device.uuid)
        reason = str(error).splitlines()[0]
        return DeviceUnavailableError(f"CUDA does not start on {self._device}: {reason}{held and f'. It has {held}'}.")

    def _check_device(self) -> None:
        meant = self._device.uuid
        found = driver.device_uuid()
        if meant and found and meant.split("-", 1)[1] != found:
            raise DeviceUnavailableError(
                f"CUDA came up on GPU {found}, but {self._device} was meant: something changed CUDA_VISIBLE_DEVICES or "
                "started CUDA in this process before the worker could set it."
            )
