from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuworker import clients, memory
from gpuworker.arbiter import deaths


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_oom_kills_of_a_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/app/web\n")
    write(tmp_path, "sys/fs/cgroup/app/web/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert deaths.count_oom_kills(tmp_path) == 2


def test_oom_kills_of_a_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/x\n7:memory:/app\n")
    write(tmp_path, "sys/fs/cgroup/memory/app/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert deaths.count_oom_kills(tmp_path) == 5


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill x\n"])
def test_a_kernel_that_does_not_tell(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.events", text)
    assert deaths.count_oom_kills(tmp_path) == 0
    assert deaths.count_oom_kills(tmp_path / "nowhere") == 0


def test_a_late_worker_and_what_it_started(caplog: pytest.LogCaptureFixture) -> None:
    nested = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    worker = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    child = int(worker.stdout.readline())
    deaths.report_timeout(worker.pid, 3, None, logging.getLogger())
    assert worker.wait() == 0, "it saw its child end"
    worker.stdout.close()
    assert not Path(f"/proc/{child}").exists()
    assert f"Slot 3 (pid {worker.pid}) has not come back in time" in caplog.text


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def test_clients_that_have_gone(family: socket.AddressFamily, tmp_path: Path) -> None:
    with socket.socket(family) as listener:
        listener.bind(str(tmp_path / "socket") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        client = socket.socket(family)
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert not clients.has_gone(connection)
            client.close()
            end = time.monotonic() + 10
            while not clients.has_gone(connection) and time.monotonic() < end:
                time.sleep(0.01)
            assert clients.has_gone(connection)
        assert clients.has_gone(connection)
    assert not clients.has_gone(None)


def test_memory_of_a_gpu_that_is_not_there() -> None:
    assert memory.describe(None) == memory.users(f"GPU-{os.getpid()}") == ""
