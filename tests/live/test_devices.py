"""The operator's list of devices: what stops the start, what a HUP does with a bad one, what the worker sees."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Load, Server, is_running, wait_until

Make = Callable[..., Server]


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"GPUWORKER_DEVICES": "7"}, "GPUWORKER_DEVICES='7': '7' is not among the visible devices: none."),
        ({"GPUWORKER_DEVICES": "gpu0"}, "GPUWORKER_DEVICES='gpu0': 'gpu0' is not a device."),
        ({"GPUWORKER_DEVICES": "cpu,0"}, "GPUWORKER_DEVICES='cpu,0' mixes cpu with other devices."),
        (
            {"GPUWORKER_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""},
            "CUDA_VISIBLE_DEVICES='' leaves no GPU to select from.",
        ),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1234"}, "there is no device 'GPU-1234'; this machine has no NVIDIA GPU."),
        ({"GPUWORKER_DEVICE": "0"}, "there is no setting GPUWORKER_DEVICE: did you mean GPUWORKER_DEVICES?"),
        ({"GPUWORKER_LOAD_TIMEOUT": "soon"}, "GPUWORKER_LOAD_TIMEOUT='soon' is not a number of seconds"),
        ({"GPUWORKER_THREADS": "0"}, "GPUWORKER_THREADS='0' is not a whole number"),
    ],
)
def test_a_bad_setting_stops_the_start(
    make_server: Make, tmp_path: Path, gunicorn: Path | None, env: dict[str, str], sentence: str
) -> None:
    socket = tmp_path / "app.sock"
    server = make_server(bind=f"unix:{socket}", devices=None, env=env, gunicorn=gunicorn)
    assert server.wait() == 1
    assert server.log.count(sentence) == 1
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log
    assert not server.pid_path.exists()
    assert not socket.exists()


@pytest.mark.parametrize("raw_env", [True, False])
def test_the_config_file_does_what_the_command_line_does(make_server: Make, raw_env: bool) -> None:
    config = 'worker_class = "gpuworker.CudaWorker"\nworkers = 3\nbind = "127.0.0.1:0"\n'
    if raw_env:
        config += 'raw_env = ["GPUWORKER_DEVICES=cpu,cpu,cpu"]\n'
    devices = None if raw_env else "cpu,cpu,cpu"
    server = make_server(worker=None, workers=None, bind=None, config=config, devices=devices)
    server.wait_for_workers(3)
    for slot in range(3):
        server.wait_for_log(rf"Slot {slot} on device {slot} \(CPU\) ready")


def test_the_worker_class_as_an_object(make_server: Make, gunicorn: Path | None) -> None:
    if gunicorn and gunicorn.name.startswith("22"):
        pytest.skip("gunicorn 22 takes the name of a class only")
    config = "import gpuworker\nworker_class = gpuworker.CudaWorker\n"
    make_server(worker=None, config=config, gunicorn=gunicorn).wait_for_workers(2)


def test_a_worker_sees_its_own_device_only_whatever_raw_env_says(make_server: Make) -> None:
    config = 'raw_env = ["CUDA_VISIBLE_DEVICES=5,6", "GPUWORKER_DEVICES=cpu"]\n'
    server = make_server(config=config, devices=None).wait_ready()
    state = server.json("/state")
    assert state["at_import"]["CUDA_VISIBLE_DEVICES"] == ""
    assert state["environ"]["CUDA_VISIBLE_DEVICES"] == ""
    assert state["environ"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in state["environ"]


def test_the_operators_order_is_kept(make_server: Make) -> None:
    server = make_server(env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}).wait_ready()
    assert server.json("/state")["environ"]["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_no_gpu_means_cpu_with_a_warning(make_server: Make) -> None:
    server = make_server(devices=None).wait_ready()
    server.wait_for_log("WARNING.*No NVIDIA GPU on this machine")


@pytest.mark.parametrize("empty", ["", "-1"])
def test_an_empty_list_means_cpu_without_one(make_server: Make, empty: str) -> None:
    server = make_server(devices=None, env={"CUDA_VISIBLE_DEVICES": empty}).wait_ready()
    assert "WARNING" not in server.log


def test_a_bad_setting_on_hup_is_reported_and_the_old_workers_serve_on(
    make_server: Make, gunicorn: Path | None
) -> None:
    server = make_server("where:app", "--graceful-timeout", "2", gunicorn=gunicorn)
    old = {worker.pid for worker in server.wait_for_workers(2).values()}
    with Load(server) as load:
        server.write_config('raw_env = ["GPUWORKER_DEVICES=7"]\n')
        server.signal(signal.SIGHUP)
        server.wait_for_log(r"Slot \d cannot start.*GPUWORKER_DEVICES='7'", 2)
        wait_until(lambda: server.worker_pids() == old, "the new workers to leave")
        assert is_running(server.pid)
        server.write_config('raw_env = ["GPUWORKER_DEVICES=cpu,cpu,cpu"]\n')
        server.signal(signal.SIGHUP)
        wait_until(lambda: not any(map(is_running, old)), "the hand-over")
    assert load.failures == []
    server.wait_for_workers(2)


def test_threads_with_the_sync_worker(make_server: Make) -> None:
    server = make_server("where:app", "--threads", "4").wait_ready()
    server.wait_for_log("WARNING.*-k gpuworker.CudaThreadWorker")
