"""Starting CUDA in a worker: at the app's first use, at the latest before the first request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from gpuworker import driver
from gpuworker.arbiter.devices import Device


class WrongDeviceError(RuntimeError):
    """CUDA came up on another GPU than the one meant for this worker."""


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
                initialise()
                torch._C._cuda_synchronize()  # initialising alone makes no context
            self._check_device()

        # Called by torch once, on its way to CUDA, and under a lock that forbids anything but its C functions.
        torch._C._cuda_init = first_use

    def start(self) -> None:
        """Start CUDA if that has not happened yet, and make sure that it is the GPU meant.

        :raises WrongDeviceError: if it came up on another GPU.
        :raises RuntimeError: from torch, if the GPU cannot be used.
        """
        if not self._device.is_cpu:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._check_device()

    def _check_device(self) -> None:
        meant = self._device.uuid
        found = driver.device_uuid()
        if meant and found and meant.split("-", 1)[1] != found:
            raise WrongDeviceError(
                f"CUDA came up on GPU {found}, but {self._device} was meant: something changed CUDA_VISIBLE_DEVICES or "
                "started CUDA in this process before the worker could set it."
            )
