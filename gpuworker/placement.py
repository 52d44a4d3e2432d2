"""Where this process stands: its slot and its device."""

from __future__ import annotations

import os

import torch

from gpuworker.arbiter import devices
from gpuworker.settings import Settings

_slot: int | None = None
_device: devices.Device | None = None


def slot() -> int | None:
    """The slot of this worker: 0, 1, 2 …, the same for whoever replaces it; None outside a worker."""
    return _slot


def device() -> torch.device:
    """The device of this worker: ``cuda:0``, the one GPU it sees, or ``cpu``.

    Outside gunicorn: ``cuda:0`` if there is a GPU and ``GPUWORKER_DEVICES`` does not say ``cpu``, else ``cpu``.

    :raises SettingError: outside gunicorn, for a setting that cannot be used.
    """
    if _device is not None:
        on_cpu = _device.is_cpu
    else:
        on_cpu = devices.means_cpu(Settings.from_environ(os.environ).devices) or not torch.cuda.is_available()
    return torch.device("cpu") if on_cpu else torch.device("cuda", 0)


def enter(slot: int, device: devices.Device) -> None:
    """Make this process the worker of `slot` on `device`: nothing started from now on sees any other GPU."""
    global _slot, _device
    _slot, _device = slot, device
    os.environ["GPUWORKER_SLOT"] = str(slot)
    os.environ[devices.VISIBLE] = device.token
    os.environ.setdefault(devices.ORDER, "PCI_BUS_ID")
