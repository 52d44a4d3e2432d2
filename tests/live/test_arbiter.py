"""Promise 3: the arbiter never starts CUDA, and an app it preloads cannot hang its workers."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Server, is_running, wait_until

Make = Callable[..., Server]

USES = {
    "stream": "x = torch.cuda.Stream()",
    "graph": "x = torch.cuda.CUDAGraph()",
    "seed": "x = torch.cuda.get_rng_state()",
    "in use": "y = torch.zeros(1).cuda()\nx = torch.cuda.current_stream()",
    "swallowed": "try:\n    x = torch.cuda.Stream()\nexcept RuntimeError:\n    x = None",
}


@pytest.mark.parametrize("use", USES)
def test_a_preloaded_app_that_starts_cuda_stops_the_start(make_server: Make, tmp_path: Path, use: str) -> None:
    (tmp_path / "early.py").write_text(f"import torch\nfrom where import app\n{USES[use]}\n")
    server = make_server("early:app", "--preload")
    assert server.wait() == 1
    assert server.log.count("CUDA must not start before the fork") == 1
    assert str(tmp_path / "early.py") in server.log, "the file of the app"
    assert "x = torch." in server.log, "its line"
    assert "without --preload" in server.log, "what to do"
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log
    assert not server.pid_path.exists()


def test_a_hook_that_starts_cuda_stops_the_start(make_server: Make, gunicorn: Path | None) -> None:
    config = "import torch\ndef on_starting(server):\n    torch.cuda.Stream()\n"
    server = make_server(config=config, gunicorn=gunicorn)
    assert server.wait() != 0
    assert "gunicorn.conf.py" in server.log
    assert "torch.cuda.Stream()" in server.log
    assert "Booting worker" not in server.log


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler for a stand-in of the driver")
@pytest.mark.parametrize("where", ["config file", "preloaded app"])
def test_a_driver_that_another_library_started_stops_the_start(make_server: Make, tmp_path: Path, where: str) -> None:
    # Not in the directory of the server, where others would find it, too.
    (tmp_path / "driver").mkdir()
    source, library = tmp_path / "stub.c", tmp_path / "driver" / "libcuda.so.1"
    source.write_text("int cuDeviceGetCount(int *count) { *count = 1; return 0; }\n")
    subprocess.run(["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    code = f"import ctypes\ndriver = ctypes.CDLL({str(library)!r})\n"
    (tmp_path / "early.py").write_text(code + "from where import app\n")
    server = make_server(config=code) if where == "config file" else make_server("early:app", "--preload")
    assert server.wait() == 1
    assert server.log.count("CUDA was started in gunicorn's arbiter") == 1
    assert (f'File "{tmp_path}/early.py", line 3: from where import app' in server.log) == (where == "preloaded app")
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log
    assert not server.pid_path.exists()


@pytest.mark.parametrize("preload", [False, True])
def test_asking_whether_there_is_a_gpu_is_harmless(make_server: Make, tmp_path: Path, preload: bool) -> None:
    (tmp_path / "asks.py").write_text(
        "import torch\nfrom where import app\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "count = torch.cuda.device_count()\nmodel = torch.nn.Linear(2, 2).to(device)\n"
    )
    make_server(
        "asks:app", *(["--preload"] if preload else []), config="import torch\ntorch.cuda.device_count()\n"
    ).wait_ready()


@pytest.mark.parametrize("step", ["nothing", "forward", "share_memory", "load_state_dict", "half", "many_threads"])
def test_a_preloaded_app_that_computed_does_not_hang_its_workers(make_server: Make, step: str) -> None:
    env = {"AT_IMPORT": step, "GPUWORKER_THREADS": "2"}
    server = make_server("preloaded:app", "--preload", "--timeout", "30", env=env).wait_ready()
    sums = {server.json("/infer")["sum"] for _ in range(6)}
    assert len(sums) == 1
    assert "WORKER TIMEOUT" not in server.log


def test_an_attempt_in_a_reload_spoils_that_reload_only(make_server: Make) -> None:
    use = "import torch\ntry:\n    torch.cuda.synchronize()\nexcept RuntimeError:\n    pass\n"
    server = make_server("where:app", "--graceful-timeout", "2")
    old = {worker.pid for worker in server.wait_for_workers(2).values()}
    server.write_config(use)
    server.signal(signal.SIGHUP)
    server.wait_for_log(r"Slot \d cannot start.*CUDA must not start before the fork", 2)
    wait_until(lambda: server.worker_pids() == old, "the new workers to leave")
    server.write_config("")
    server.signal(signal.SIGHUP)
    wait_until(lambda: not any(map(is_running, old)), "the hand-over")
    server.wait_for_workers(2)


def test_another_child_of_the_arbiter_may_use_cuda(make_server: Make, tmp_path: Path) -> None:
    config = (
        "import os\nimport torch\n"
        "def when_ready(server):\n"
        "    if os.fork() == 0:\n"
        "        try:\n            torch.zeros(1).cuda()\n        except Exception as error:\n"
        f"            open({str(tmp_path / 'child')!r}, 'w').write(type(error).__name__)\n"
        "        os._exit(0)\n"
    )
    make_server(config=config).wait_ready()
    child = wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    assert child != "CudaInArbiterError"


def test_cuda_in_post_fork_is_too_early(make_server: Make) -> None:
    config = "import torch\ndef post_fork(server, worker):\n    torch.zeros(1).cuda()\n"
    # One worker: with several, gunicorn trips over the second that fails while it stops for the first.
    server = make_server(config=config, workers=1)
    assert server.wait() == 3
    assert "CUDA must not start before the worker has its device" in server.log


def test_gunicorns_hooks_are_called_as_ever(make_server: Make, gunicorn: Path | None) -> None:
    hooks = ["pre_fork", "post_fork", "post_worker_init", "worker_int", "worker_exit", "child_exit"]
    config = "".join(
        f"def {name}({'worker' if name in ('post_worker_init', 'worker_int') else 'server, worker'}):\n"
        f"    worker.log.info('hook {name} slot %d', worker.slot)\n"
        for name in hooks
    )
    server = make_server(config=config, workers=1, gunicorn=gunicorn).wait_ready(1)
    server.signal(signal.SIGINT)
    server.wait()
    for name in hooks:
        assert f"hook {name} slot 0" in server.log
