"""Which devices the workers may use, found without starting CUDA.

The operator's list is law. It is ``CUDA_VISIBLE_DEVICES``, read as CUDA reads it (CUDA C++ Programming Guide, "CUDA
Environment Variables"), and within it ``GPUWORKER_DEVICES``. Tokens are opaque: an index, a full or shortened GPU UUID
or a MIG name goes to the worker as the operator wrote it. The hardware is asked through NVML, which, unlike CUDA,
leaves nothing behind in the process that a fork could break.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
SETTING = "GPUWORKER_DEVICES"
CPU = "cpu"
_ALLOWED = "Use auto, a comma separated list of indices, GPU-… or MIG-… names, or cpu (cpu,cpu for two CPU devices)."


class DeviceError(RuntimeError):
    """The devices asked for cannot be used. The message says what was given, what there is and what to do."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one, as NVML lists it.

    :param uuid: ``GPU-…`` or ``MIG-…``.
    :param index: its place in PCI bus order; None for a MIG instance.
    :param aliases: other names CUDA takes for it.
    :param usable: False for a GPU in MIG mode: only its instances run anything.
    :param problem: why it cannot be used at all; an error only where it is asked for.
    """

    uuid: str
    name: str
    index: int | None = None
    aliases: tuple[str, ...] = ()
    usable: bool = True
    problem: str = ""


@dataclass(frozen=True)
class Device:
    """What one worker runs on.

    :param token: what ``CUDA_VISIBLE_DEVICES`` becomes in the worker; empty for a CPU device.
    :param uuid: of the GPU meant; None where it cannot be known beforehand, and for a CPU device.
    :param index: its place in the list of devices.
    """

    token: str
    name: str
    uuid: str | None = None
    index: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether torch runs on the CPU in workers of this device."""
        return not self.token

    def __str__(self) -> str:
        return f"device {self.index} ({self.describe()})"

    def describe(self) -> str:
        """Name and UUID (or the operator's token where the UUID is not known)."""
        return self.name if self.is_cpu else f"{self.name}, {self.uuid or self.token}"


@dataclass(frozen=True)
class Devices:
    """The list of devices, and what to tell the operator about how it came about."""

    items: tuple[Device, ...]
    warning: str = field(default="", compare=False)

    def of_slot(self, slot: int) -> Device:
        """The device of every worker that ever holds `slot`."""
        return self.items[slot % len(self.items)]


def discover(setting: str, environ: Mapping[str, str], read_gpus: Callable[[], Sequence[Gpu]] | None = None) -> Devices:
    """The devices that `setting` (``GPUWORKER_DEVICES``) selects among those the environment makes visible.

    :param read_gpus: lists the GPUs of the machine in PCI bus order; by default NVML does.
    :raises DeviceError: for anything that is not there, repeated or not understood.
    """
    wanted = None if setting == "auto" else _tokens(setting)
    if wanted and CPU in wanted:
        return _cpu_devices(setting, wanted)
    listed = cut_as_cuda(environ.get(VISIBLE))
    if listed == []:
        if wanted:
            raise DeviceError(f"{SETTING}={setting!r}: {VISIBLE}={environ[VISIBLE]!r} leaves no GPU to select from.")
        return Devices((Device("", "CPU"),))
    gpus = (read_gpus or nvml_gpus)()
    if not gpus and not listed and not wanted:
        warning = f"No NVIDIA GPU on this machine: the workers run on the CPU ({SETTING}=cpu if that is meant)"
        return Devices((Device("", "CPU"),), warning)
    visible = _visible(listed, gpus, in_pci_order=environ.get(ORDER, "PCI_BUS_ID") == "PCI_BUS_ID")
    chosen = visible if wanted is None else _select(setting, wanted, visible)
    if not chosen:
        raise DeviceError(f"every GPU is in MIG mode and has no instance: make one, or set {SETTING}=cpu.")
    return Devices(tuple(Device(d.token, d.name, d.uuid, index) for index, d in enumerate(chosen)))


def means_cpu(setting: str) -> bool:
    """Whether `setting` (``GPUWORKER_DEVICES``) asks for the CPU."""
    return CPU in _tokens(setting)


def _tokens(value: str) -> list[str]:
    return [token.strip() for token in value.split(",")]


def cut_as_cuda(value: str | None) -> list[str] | None:
    """The tokens of a ``CUDA_VISIBLE_DEVICES`` up to the first that ends the list for CUDA: empty or negative.

    :returns: None if the variable is not set: every device is visible.
    """
    if value is None:
        return None
    tokens = []
    for token in _tokens(value):
        if not token or token.startswith("-"):
            break
        tokens.append(token)
    return tokens


def _cpu_devices(setting: str, wanted: list[str]) -> Devices:
    if set(wanted) != {CPU}:
        raise DeviceError(f"{SETTING}={setting!r} mixes cpu with other devices. {_ALLOWED}")
    return Devices(tuple(Device("", "CPU", index=index) for index in range(len(wanted))))


def _visible(listed: list[str] | None, gpus: Sequence[Gpu], *, in_pci_order: bool) -> list[Device]:
    if listed is None:
        for gpu in gpus:
            _refuse_broken(gpu)
        return [Device(gpu.uuid, gpu.name, gpu.uuid) for gpu in gpus if gpu.usable]
    visible: list[Device] = []
    named: list[Gpu] = []
    what = f"{VISIBLE}={','.join(listed)!r}"
    for token in listed:
        gpu = _find(token, gpus, what)
        # Under any other order than NVML's, which GPU an index means is known only to CUDA. A GPU in MIG mode stands
        # for one of its instances, and only CUDA knows which.
        known = in_pci_order or not _is_index(token)
        if token in (device.token for device in visible) or (known and gpu in named):
            raise _repeated(token, what)
        if known:
            named.append(gpu)
        name = gpu.name if known or len({gpu.name for gpu in gpus}) == 1 else "an NVIDIA GPU"
        visible.append(Device(token, name, gpu.uuid if known and gpu.usable else None))
    return visible


def _find(token: str, gpus: Sequence[Gpu], what: str) -> Gpu:
    if _is_index(token):
        found = [gpu for gpu in gpus if gpu.index == int(token)]
    else:
        exact = [gpu for gpu in gpus if token in (gpu.uuid, *gpu.aliases)]
        short = [gpu for gpu in gpus if token.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(token)]
        found = exact or short
    if len(found) == 1:
        _refuse_broken(found[0])
        return found[0]
    problem = f"{token!r} fits more than one device" if found else f"there is no device {token!r}"
    raise DeviceError(f"{what}: {problem}; this machine has {_list_gpus(gpus)}.")


def _is_index(token: str) -> bool:
    return token.isascii() and token.isdigit()


def _refuse_broken(gpu: Gpu) -> None:
    if gpu.problem:
        raise DeviceError(gpu.problem)


def _repeated(token: str, what: str) -> DeviceError:
    return DeviceError(f"{what}: {token!r} names a device that is in the list already; name each GPU once.")


def _select(setting: str, wanted: list[str], visible: list[Device]) -> list[Device]:
    what = f"{SETTING}={setting!r}"
    chosen: list[Device] = []
    for token in wanted:
        if _is_index(token):
            found = [visible[int(token)]] if int(token) < len(visible) else []
        elif token.startswith(("GPU-", "MIG-")):
            found = [device for device in visible if token == device.token or (device.uuid or "").startswith(token)]
        else:
            raise DeviceError(f"{what}: {token!r} is not a device. {_ALLOWED}")
        if len(found) != 1:
            problem = "fits more than one of" if found else "is not among"
            raise DeviceError(f"{what}: {token!r} {problem} the visible devices: {_list_devices(visible)}. {_ALLOWED}")
        if found[0] in chosen:
            raise _repeated(token, what)
        chosen.append(found[0])
    return chosen


def _list_devices(devices: Sequence[Device]) -> str:
    return "; ".join(f"{index}: {device.describe()}" for index, device in enumerate(devices)) or "none"


def _list_gpus(gpus: Sequence[Gpu]) -> str:
    return (
        "; ".join(f"{'MIG' if gpu.index is None else gpu.index}: {gpu.name}, {gpu.uuid}" for gpu in gpus)
        or "no NVIDIA GPU"
    )


def visible_gpus() -> tuple[Device, ...]:
    """The GPUs that the environment makes visible; none where they cannot be told."""
    try:
        found = discover("auto", os.environ).items
    except DeviceError:
        return ()
    return tuple(device for device in found if not device.is_cpu)


def nvml_gpus() -> list[Gpu]:
    """Every GPU and MIG instance of this machine, in PCI bus order; empty where there is no NVIDIA driver.

    :raises DeviceError: when there is a GPU that NVML cannot talk to.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        if files := glob.glob("/dev/nvidia[0-9]*"):
            raise DeviceError(
                f"{', '.join(sorted(files))} is there, but the NVIDIA driver's management library is not ({error}): "
                f"install the driver (in a container, start it with the GPU), or set {SETTING}=cpu."
            ) from error
        return []
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    try:
        return [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _nvml_gpu(pynvml, index)]
    except pynvml.NVMLError as error:
        raise _silent(error) from error
    finally:
        pynvml.nvmlShutdown()


def _silent(error: Exception) -> DeviceError:
    return DeviceError(f"the NVIDIA driver does not answer ({error}): see what nvidia-smi says, or set {SETTING}=cpu.")


def _nvml_gpu(nvml: Any, index: int) -> list[Gpu]:
    """The GPU at `index`, followed by its MIG instances."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
        instances = _mig_instances(nvml, handle, uuid)
    except nvml.NVMLError as error:
        problem = f"GPU {index} does not answer ({error}): see what nvidia-smi says, or leave it out by {VISIBLE}."
        return [Gpu("", "does not answer", index, problem=problem)]
    return [Gpu(uuid, name, index, usable=instances is None), *(instances or [])]


def _mig_instances(nvml: Any, handle: Any, parent: str) -> list[Gpu] | None:
    """The MIG instances of a GPU; None if it is not in MIG mode."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        highest = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError_NotSupported:
        return None
    instances = []
    for number in range(highest):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError_NotFound:
            continue
        # The name drivers before 470 used, which CUDA still takes.
        place = f"{nvml.nvmlDeviceGetGpuInstanceId(mig)}/{nvml.nvmlDeviceGetComputeInstanceId(mig)}"
        name, uuid = _text(nvml.nvmlDeviceGetName(mig)), _text(nvml.nvmlDeviceGetUUID(mig))
        instances.append(Gpu(uuid, name, aliases=(f"MIG-{parent}/{place}",)))
    return instances


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
