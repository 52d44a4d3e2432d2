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
        self._started = False

    def start_at_first_use(self) -> None:
        """Have the first use of CUDA, wherever in the app it is, start and check the context."""
        if self._device.is_cpu:
            return
        lazy_init = torch.cuda._lazy_init

        def first_use() -> None:
            torch.cuda._lazy_init = lazy_init  # later uses pay nothing
            self.start()

        torch.cuda._lazy_init = first_use

    def start(self) -> None:
        """Start CUDA if that has not happened yet.

        :raises WrongDeviceError: if it came up on another GPU.
        :raises RuntimeError: from torch, if the GPU cannot be used.
        """
        if self._device.is_cpu or self._started:
            return
        with self._timed("context"):
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # init() alone makes no context
        self._check_device()
        self._started = True

    def _check_device(self) -> None:
        meant = self._device.uuid
        found = driver.device_uuid()
        if meant and found and meant.split("-", 1)[1] != found:
            raise WrongDeviceError(
                f"CUDA came up on GPU {found}, but {self._device} was meant: something changed CUDA_VISIBLE_DEVICES or "
                "started CUDA in this process before the worker could set it."
            )
