from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from gpuworker.arbiter.devices import Device, DeviceError, Devices, Gpu, cut_as_cuda, discover, means_cpu, nvml_gpus

A = Gpu("GPU-aaaa1111-0000-0000-0000-000000000000", "NVIDIA A", 0)
B = Gpu("GPU-aaaa2222-0000-0000-0000-000000000000", "NVIDIA B", 1)
SPLIT = Gpu("GPU-cccc3333-0000-0000-0000-000000000000", "NVIDIA C", 2, usable=False)
LEGACY = f"MIG-{SPLIT.uuid}/1/0"
MIG_1 = Gpu("MIG-dddd4444-0000-0000-0000-000000000000", "NVIDIA C MIG 1g", aliases=(LEGACY,))
MIG_2 = Gpu("MIG-eeee5555-0000-0000-0000-000000000000", "NVIDIA C MIG 2g", aliases=(f"MIG-{SPLIT.uuid}/2/0",))
GPUS = [A, B, SPLIT, MIG_1, MIG_2]


def find(
    setting: str = "auto", visible: str | None = None, gpus: Sequence[Gpu] = GPUS, order: str | None = None
) -> Devices:
    environ = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    return discover(setting, {name: value for name, value in environ.items() if value is not None}, lambda: gpus)


def tokens_and_uuids(devices: Devices) -> list[tuple[str, str | None]]:
    return [(device.token, device.uuid) for device in devices.items]


def error_of(setting: str = "auto", visible: str | None = None, gpus: Sequence[Gpu] = GPUS) -> str:
    with pytest.raises(DeviceError) as caught:
        find(setting, visible, gpus)
    return str(caught.value)


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("-2,0", []),
        (",0", []),
        (" ", []),
        ("0", ["0"]),
        ("0,1", ["0", "1"]),
        (" 1 , 0 ", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("0,", ["0"]),
        ("GPU-1,MIG-2/3/4", ["GPU-1", "MIG-2/3/4"]),
        ("what,ever", ["what", "ever"]),
    ],
)
def test_cut_as_cuda(value: str | None, tokens: list[str] | None) -> None:
    assert cut_as_cuda(value) == tokens


def test_without_a_list_every_gpu_and_instance_is_used_by_its_uuid() -> None:
    assert tokens_and_uuids(find()) == [(gpu.uuid, gpu.uuid) for gpu in (A, B, MIG_1, MIG_2)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [("0", A.uuid)]),
        ("1,0", [("1", B.uuid), ("0", A.uuid)]),
        ("0,-1,1", [("0", A.uuid)]),
        ("1,,0", [("1", B.uuid)]),
        (" 1 , 0 ", [("1", B.uuid), ("0", A.uuid)]),
        (B.uuid, [(B.uuid, B.uuid)]),
        ("GPU-aaaa2", [("GPU-aaaa2", B.uuid)]),
        (f"1,{A.uuid}", [("1", B.uuid), (A.uuid, A.uuid)]),
        (MIG_2.uuid, [(MIG_2.uuid, MIG_2.uuid)]),
        ("MIG-dddd,MIG-eeee", [("MIG-dddd", MIG_1.uuid), ("MIG-eeee", MIG_2.uuid)]),
        (LEGACY, [(LEGACY, MIG_1.uuid)]),
    ],
)
def test_a_visible_device_keeps_the_operators_token(visible: str, expected: list[tuple[str, str]]) -> None:
    assert tokens_and_uuids(find(visible=visible)) == expected


@pytest.mark.parametrize("token", ["2", SPLIT.uuid, "GPU-cccc"])
def test_a_gpu_in_mig_mode_stands_for_an_instance_only_cuda_knows(token: str) -> None:
    assert tokens_and_uuids(find(visible=token)) == [(token, None)]


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", ",0"])
def test_an_empty_list_means_cpu_and_needs_no_warning(visible: str) -> None:
    devices = find(visible=visible)
    assert [device.is_cpu for device in devices.items] == [True]
    assert devices.warning == ""


@pytest.mark.parametrize(
    ("visible", "token"),
    [
        ("0,0", "0"),
        ("0,00", "00"),
        (f"{MIG_1.uuid},{MIG_1.uuid}", MIG_1.uuid),
        (f"0,{A.uuid}", A.uuid),
        (f"{B.uuid},0,1", "1"),
        (f"GPU-aaaa1,{A.uuid}", A.uuid),
        (f"{MIG_1.uuid},{LEGACY}", LEGACY),
        ("2,2", "2"),
        (f"2,{SPLIT.uuid}", SPLIT.uuid),
    ],
)
def test_a_visible_device_named_twice_is_an_error(visible: str, token: str) -> None:
    message = error_of(visible=visible)
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in message
    assert f"{token!r} names a device that is in the list already" in message


@pytest.mark.parametrize(("visible", "token"), [("GPU-aaaa", "GPU-aaaa"), ("0,GPU-", "GPU-"), ("MIG-", "MIG-")])
def test_an_ambiguous_visible_device_is_an_error(visible: str, token: str) -> None:
    assert f"{token!r} fits more than one device" in error_of(visible=visible)


@pytest.mark.parametrize(
    "token",
    [
        *["3", "7", "99999999999999999999", "GPU-ffff", "MIG-ffff", f"MIG-{SPLIT.uuid}/9/0", "aaaa1111"],
        *["zero", "0x1", "1.0", "+1", "NoDevFiles", "cuda:0", "gpu-aaaa1111", "²"],
    ],
)
@pytest.mark.parametrize("before", ["", "0,"])
def test_an_unknown_visible_device_is_an_error(before: str, token: str) -> None:
    message = error_of(visible=before + token)
    assert f"CUDA_VISIBLE_DEVICES={before + token!r}: there is no device {token!r}" in message


def test_an_error_lists_what_the_machine_has() -> None:
    message = error_of(visible="7")
    for gpu in GPUS:
        assert gpu.uuid in message
        assert gpu.name in message


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID"])
def test_an_index_in_pci_order_has_a_known_uuid(order: str | None) -> None:
    assert tokens_and_uuids(find(visible="1", order=order)) == [("1", B.uuid)]


def test_an_index_in_another_order_has_no_known_uuid() -> None:
    expected = [("1", None), (A.uuid, A.uuid)]
    assert tokens_and_uuids(find(visible=f"1,{A.uuid}", order="FASTEST_FIRST")) == expected


def test_an_index_in_another_order_is_not_taken_for_a_repeat() -> None:
    expected = [("0", None), (A.uuid, A.uuid)]
    assert tokens_and_uuids(find(visible=f"0,{A.uuid}", order="FASTEST_FIRST")) == expected


def test_a_repeated_index_in_another_order_is_an_error() -> None:
    with pytest.raises(DeviceError, match="'0' names a device that is in the list already"):
        find(visible="0,0", order="FASTEST_FIRST")


def test_without_a_list_the_order_does_not_matter() -> None:
    assert find(order="FASTEST_FIRST") == find()


# GPUWORKER_DEVICES


@pytest.mark.parametrize(
    ("setting", "visible", "expected"),
    [
        ("auto", "1,0", [("1", B.uuid), ("0", A.uuid)]),
        ("0", "1,0", [("1", B.uuid)]),
        ("1,0", "1,0", [("0", A.uuid), ("1", B.uuid)]),
        (" 1 , 0 ", "1,0", [("0", A.uuid), ("1", B.uuid)]),
        ("2", None, [(MIG_1.uuid, MIG_1.uuid)]),
        (B.uuid, None, [(B.uuid, B.uuid)]),
        (B.uuid, "0,1", [("1", B.uuid)]),
        ("GPU-aaaa2", "0,1", [("1", B.uuid)]),
        ("GPU-aaaa", "1", [("1", B.uuid)]),
        (MIG_2.uuid, None, [(MIG_2.uuid, MIG_2.uuid)]),
        ("MIG-eeee,0", None, [(MIG_2.uuid, MIG_2.uuid), (A.uuid, A.uuid)]),
        (LEGACY, LEGACY, [(LEGACY, MIG_1.uuid)]),
        (SPLIT.uuid, SPLIT.uuid, [(SPLIT.uuid, None)]),
    ],
)
def test_the_setting_selects_among_the_visible(
    setting: str, visible: str | None, expected: list[tuple[str, str | None]]
) -> None:
    assert tokens_and_uuids(find(setting, visible)) == expected


@pytest.mark.parametrize(
    ("setting", "visible", "token"),
    [
        ("1", "1", "1"),
        ("0,4", None, "4"),
        ("99999999999999999999", None, "99999999999999999999"),
        (A.uuid, "1", A.uuid),
        ("GPU-ffff", None, "GPU-ffff"),
        ("MIG-ffff", None, "MIG-ffff"),
        (SPLIT.uuid, None, SPLIT.uuid),
    ],
)
def test_a_device_that_is_not_visible_is_an_error(setting: str, visible: str | None, token: str) -> None:
    message = error_of(setting, visible)
    assert f"GPUWORKER_DEVICES={setting!r}: {token!r} is not among the visible devices" in message


def test_an_ambiguous_selection_is_an_error() -> None:
    message = error_of("GPU-aaaa")
    assert "GPUWORKER_DEVICES='GPU-aaaa': 'GPU-aaaa' fits more than one of the visible devices" in message


@pytest.mark.parametrize(
    ("setting", "token"),
    [
        *[("-1", "-1"), ("0,-1", "-1"), ("0,,1", ""), ("0,", ""), ("gpu0", "gpu0"), ("cuda:0", "cuda:0")],
        *[("CPU", "CPU"), ("AUTO", "AUTO"), ("auto,0", "auto"), ("1.0", "1.0"), ("0x1", "0x1"), ("0;1", "0;1")],
        ("²", "²"),
    ],
)
def test_a_selection_that_is_not_a_device_is_an_error(setting: str, token: str) -> None:
    message = error_of(setting)
    assert f"GPUWORKER_DEVICES={setting!r}: {token!r} is not a device" in message
    assert "Use auto, a comma separated list of indices" in message


@pytest.mark.parametrize(
    ("setting", "visible", "token"),
    [
        ("0,0", None, "0"),
        ("1,01", None, "01"),
        (f"0,{A.uuid}", None, A.uuid),
        (f"{A.uuid},GPU-aaaa1", "0", "GPU-aaaa1"),
        (f"{SPLIT.uuid},0", SPLIT.uuid, "0"),
    ],
)
def test_a_device_selected_twice_is_an_error(setting: str, visible: str | None, token: str) -> None:
    message = error_of(setting, visible)
    assert f"GPUWORKER_DEVICES={setting!r}: {token!r} names a device that is in the list already" in message


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_selection_from_an_empty_list_is_an_error(visible: str) -> None:
    message = error_of("0", visible)
    assert "GPUWORKER_DEVICES='0'" in message
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in message


@pytest.mark.parametrize(("setting", "count"), [("cpu", 1), (" cpu ", 1), ("cpu,cpu", 2), ("cpu, cpu ,cpu", 3)])
@pytest.mark.parametrize("visible", [None, "", "0", "nonsense"])
def test_cpu_devices_may_be_repeated(setting: str, count: int, visible: str | None) -> None:
    devices = find(setting, visible)
    assert [(device.is_cpu, device.index) for device in devices.items] == [(True, index) for index in range(count)]
    assert devices.warning == ""


@pytest.mark.parametrize("setting", ["cpu,0", "0,cpu", f"cpu,{A.uuid}", "cpu,auto", "cpu,"])
def test_cpu_and_other_devices_do_not_mix(setting: str) -> None:
    message = error_of(setting)
    assert f"GPUWORKER_DEVICES={setting!r} mixes cpu with other devices" in message


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("cpu", True),
        ("cpu,cpu", True),
        (" cpu ", True),
        ("cpu,0", True),
        ("auto", False),
        ("0", False),
        ("GPU-c", False),
    ],
)
def test_means_cpu(setting: str, answer: bool) -> None:
    assert means_cpu(setting) is answer


# Machines


def test_a_machine_without_a_gpu_runs_on_the_cpu_with_a_warning() -> None:
    devices = find(gpus=[])
    assert devices.items == (Device("", "CPU"),)
    assert "No NVIDIA GPU" in devices.warning
    assert "GPUWORKER_DEVICES=cpu" in devices.warning


def test_a_list_on_a_machine_without_a_gpu_is_an_error() -> None:
    assert error_of(visible="0", gpus=[]).startswith("CUDA_VISIBLE_DEVICES='0': there is no device '0'")


def test_a_selection_on_a_machine_without_a_gpu_is_an_error() -> None:
    assert error_of("0", gpus=[]).startswith("GPUWORKER_DEVICES='0': '0' is not among the visible devices: none")


def test_a_machine_whose_gpus_have_no_mig_instance_is_an_error() -> None:
    assert "every GPU is in MIG mode and has no instance" in error_of(gpus=[SPLIT])


def test_nobody_asks_for_gpus_when_the_operator_wants_the_cpu() -> None:
    def never() -> list[Gpu]:
        raise AssertionError("asked for the GPUs")

    assert discover("cpu", {}, never).items[0].is_cpu
    assert discover("auto", {"CUDA_VISIBLE_DEVICES": ""}, never).items[0].is_cpu


def test_gpus_give_no_warning() -> None:
    assert find().warning == ""


def test_devices_are_numbered_in_their_order() -> None:
    assert [device.index for device in find("2,0,1", "1,0," + MIG_1.uuid).items] == [0, 1, 2]


@pytest.mark.parametrize(("slot", "index"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2), (6, 0), (301, 1)])
def test_slots_take_the_devices_in_turn(slot: int, index: int) -> None:
    assert find("0,1,2").of_slot(slot).index == index


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (Device("1", "NVIDIA B", B.uuid, index=3), f"device 3 (NVIDIA B, {B.uuid})"),
        (Device("1", "NVIDIA B"), "device 0 (NVIDIA B, 1)"),
        (Device("", "CPU", index=1), "device 1 (CPU)"),
    ],
)
def test_a_device_says_what_it_is(device: Device, text: str) -> None:
    assert str(device) == text


# NVML


class NvmlError(Exception):
    pass


class LibraryNotFoundError(NvmlError):
    pass


class DriverNotLoadedError(NvmlError):
    pass


class NotSupportedError(NvmlError):
    pass


class NotFoundError(NvmlError):
    pass


@dataclass
class FakeGpu:
    """A GPU of the fake NVML. `mig` is the list of places for instances, some empty, or what MIG mode answers."""

    uuid: str | bytes
    name: str | bytes
    mig: list[FakeInstance | None] | int | Exception = 0
    error: Exception | None = None


@dataclass
class FakeInstance:
    uuid: str | bytes
    name: str | bytes
    gpu_instance: int
    compute_instance: int


class FakeNvml(types.ModuleType):
    """pynvml as far as it is used here, of a machine with `gpus`."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError = NvmlError
    NVMLError_LibraryNotFound = LibraryNotFoundError
    NVMLError_DriverNotLoaded = DriverNotLoadedError
    NVMLError_NotSupported = NotSupportedError
    NVMLError_NotFound = NotFoundError

    def __init__(self, *gpus: FakeGpu, at_init: Exception | None = None, at_count: Exception | None = None) -> None:
        super().__init__("pynvml")
        self._gpus, self._at_init, self._at_count = gpus, at_init, at_count
        self.open = 0

    def nvmlInit(self) -> None:
        if self._at_init:
            raise self._at_init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open
        if self._at_count:
            raise self._at_count
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        gpu = self._gpus[index]
        if gpu.error:
            raise gpu.error
        return gpu

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeInstance) -> str | bytes:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeInstance) -> str | bytes:
        return handle.name

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> tuple[int, int]:
        if isinstance(handle.mig, Exception):
            raise handle.mig
        return (1, 1) if isinstance(handle.mig, list) else (handle.mig, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        assert isinstance(handle.mig, list)
        return len(handle.mig)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, number: int) -> FakeInstance:
        assert isinstance(handle.mig, list)
        instance = handle.mig[number]
        if instance is None:
            raise NotFoundError("Not Found")
        return instance

    def nvmlDeviceGetGpuInstanceId(self, handle: FakeInstance) -> int:
        return handle.gpu_instance

    def nvmlDeviceGetComputeInstanceId(self, handle: FakeInstance) -> int:
        return handle.compute_instance


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Puts a fake NVML where pynvml is imported from, on a machine with these files in /dev."""

    def put(*gpus: FakeGpu, dev: Sequence[str] = (), **errors: Exception) -> FakeNvml:
        nvml = FakeNvml(*gpus, **errors)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr("glob.glob", lambda pattern: fnmatch.filter(dev, pattern))
        return nvml

    return put


@pytest.mark.parametrize("mig", [0, NotSupportedError("Not Supported")])
def test_nvml_lists_gpus_by_index(install: Callable[..., FakeNvml], mig: int | Exception) -> None:
    install(FakeGpu("GPU-1", "one", mig), FakeGpu("GPU-2", "two", mig))
    assert nvml_gpus() == [Gpu("GPU-1", "one", 0), Gpu("GPU-2", "two", 1)]


def test_nvml_may_answer_in_bytes(install: Callable[..., FakeNvml]) -> None:
    install(FakeGpu(b"GPU-1", b"one", [FakeInstance(b"MIG-1", b"part", 1, 0)]))
    assert nvml_gpus() == [
        Gpu("GPU-1", "one", 0, usable=False),
        Gpu("MIG-1", "part", aliases=("MIG-GPU-1/1/0",)),
    ]


def test_nvml_lists_instances_after_their_gpu_and_skips_empty_places(install: Callable[..., FakeNvml]) -> None:
    places = [None, FakeInstance("MIG-1", "part", 3, 0), None, FakeInstance("MIG-2", "part", 5, 1)]
    install(FakeGpu("GPU-1", "one", places), FakeGpu("GPU-2", "two"))
    assert nvml_gpus() == [
        Gpu("GPU-1", "one", 0, usable=False),
        Gpu("MIG-1", "part", aliases=("MIG-GPU-1/3/0",)),
        Gpu("MIG-2", "part", aliases=("MIG-GPU-1/5/1",)),
        Gpu("GPU-2", "two", 1),
    ]


def test_nvml_lists_a_gpu_in_mig_mode_without_instances_as_unusable(install: Callable[..., FakeNvml]) -> None:
    install(FakeGpu("GPU-1", "one", [None, None]))
    assert nvml_gpus() == [Gpu("GPU-1", "one", 0, usable=False)]


def test_nvml_is_what_discover_asks(install: Callable[..., FakeNvml]) -> None:
    install(FakeGpu("GPU-1", "one"))
    assert tokens_and_uuids(discover("auto", {})) == [("GPU-1", "GPU-1")]


@pytest.mark.parametrize("error", [LibraryNotFoundError("no library"), DriverNotLoadedError("no driver")])
@pytest.mark.parametrize("dev", [[], ["/dev/nvidiactl", "/dev/nvidia-uvm"]])
def test_no_driver_means_no_gpu(install: Callable[..., FakeNvml], error: Exception, dev: list[str]) -> None:
    install(at_init=error, dev=dev)
    assert nvml_gpus() == []


@pytest.mark.parametrize("error", [LibraryNotFoundError("no library"), DriverNotLoadedError("no driver")])
def test_no_driver_beside_a_gpu_is_an_error(install: Callable[..., FakeNvml], error: Exception) -> None:
    install(at_init=error, dev=["/dev/nvidia1", "/dev/nvidia0", "/dev/nvidiactl"])
    with pytest.raises(DeviceError, match=rf"^/dev/nvidia0, /dev/nvidia1 is there.*\({error}\).*GPUWORKER_DEVICES=cpu"):
        nvml_gpus()


def test_a_driver_that_does_not_answer_is_an_error(install: Callable[..., FakeNvml]) -> None:
    install(at_init=NvmlError("version mismatch"))
    with pytest.raises(DeviceError, match=r"does not answer \(version mismatch\)"):
        nvml_gpus()


def test_a_driver_that_cannot_count_is_an_error(install: Callable[..., FakeNvml]) -> None:
    install(at_count=NvmlError("unknown error"))
    with pytest.raises(DeviceError, match=r"does not answer \(unknown error\)"):
        nvml_gpus()


LOST = FakeGpu("", "", error=NvmlError("GPU is lost"))


def test_a_lost_gpu_is_an_error_that_names_its_index(install: Callable[..., FakeNvml]) -> None:
    install(FakeGpu("GPU-1", "one"), LOST)
    with pytest.raises(DeviceError, match=r"GPU 1 does not answer \(GPU is lost\)"):
        discover("auto", {})


def test_a_lost_gpu_that_is_listed_is_an_error(install: Callable[..., FakeNvml]) -> None:
    install(FakeGpu("GPU-1", "one"), LOST)
    with pytest.raises(DeviceError, match=r"GPU 1 does not answer \(GPU is lost\)"):
        discover("auto", {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("visible", ["0", "GPU-1"])
def test_a_lost_gpu_can_be_left_out_as_the_error_says(install: Callable[..., FakeNvml], visible: str) -> None:
    install(FakeGpu("GPU-1", "one"), LOST)
    assert tokens_and_uuids(discover("auto", {"CUDA_VISIBLE_DEVICES": visible})) == [(visible, "GPU-1")]


def test_nvml_is_shut_down(install: Callable[..., FakeNvml]) -> None:
    nvml = install(FakeGpu("GPU-1", "one"))
    nvml_gpus()
    assert nvml.open == 0


@pytest.mark.parametrize("broken", [LOST, FakeGpu("GPU-1", "one", NvmlError("unknown error"))])
def test_nvml_is_shut_down_after_an_error(install: Callable[..., FakeNvml], broken: FakeGpu) -> None:
    nvml = install(broken)
    with pytest.raises(DeviceError):
        discover("auto", {})
    assert nvml.open == 0
