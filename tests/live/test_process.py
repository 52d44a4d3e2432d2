"""What a worker sets up for its own process."""

from __future__ import annotations

import os
import pwd
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Load, Server, is_running, wait_until

Make = Callable[..., Server]


def states(server: Server, workers: int = 2) -> list[dict[str, Any]]:
    """The state of every worker."""
    found: dict[int, dict[str, Any]] = {}

    def all_of_them() -> bool:
        with Load(server, clients=workers, path="/where?hold=0.05"):
            state = server.json("/state")
        found[state["pid"]] = state
        return len(found) == workers

    wait_until(all_of_them, "an answer of every worker")
    return list(found.values())


def test_slot_and_device_at_import_time_and_in_the_environment(make_server: Make) -> None:
    server = make_server().wait_ready()
    for state in states(server):
        assert state["at_import"]["slot"] == int(state["environ"]["GPUWORKER_SLOT"])
        assert state["at_import"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, max(1, len(os.sched_getaffinity(0)) // 2)),
        ({"GPUWORKER_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"GPUWORKER_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
    ],
)
@pytest.mark.parametrize("preload", [False, True])
def test_threads(make_server: Make, env: dict[str, str], threads: int, preload: bool) -> None:
    server = make_server("where:app", *(["--preload"] if preload else []), env=env).wait_ready()
    assert {state["threads"] for state in states(server)} == {threads}


def test_threads_that_a_preloaded_app_asks_for(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("import torch\ntorch.set_num_threads(4)\nfrom where import app\n")
    server = make_server("asks:app", "--preload").wait_ready()
    assert {state["threads"] for state in states(server)} == {4}


@pytest.mark.parametrize("preload", [False, True])
def test_workers_draw_different_numbers(make_server: Make, tmp_path: Path, preload: bool) -> None:
    (tmp_path / "draws.py").write_text(
        "import random, numpy, torch, where\n"
        "app = where.app\n"
        "@app.get('/draw')\n"
        "def draw():\n"
        "    import os\n"
        "    return {'pid': os.getpid(), 'draws': [random.random(), torch.rand(1).item(), numpy.random.rand()]}\n"
    )
    server = make_server("draws:app", *(["--preload"] if preload else [])).wait_ready()
    first: dict[int, list[float]] = {}

    def both() -> bool:
        with Load(server, clients=2, path="/where?hold=0.05"):
            answer = server.json("/draw")
        first.setdefault(answer["pid"], answer["draws"])
        return len(first) == 2

    wait_until(both, "draws of both workers")
    one, other = first.values()
    assert not set(one) & set(other)


def test_an_idle_worker_leaves_when_the_arbiter_is_killed(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("where:app", "--timeout", "600", gunicorn=gunicorn)
    workers, port = server.wait_for_workers(2), server.port
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers.values()), "the workers to leave", 20)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_busy_worker_finishes_its_request_when_the_arbiter_is_killed(make_server: Make) -> None:
    server = make_server("where:app", "--timeout", "600", workers=1)
    server.wait_for_workers(1)
    with Load(server, clients=1, path="/where?hold=2") as load:
        wait_until(lambda: load.good, "the first answer")
        os.kill(server.pid, signal.SIGKILL)
        load.stop_asking()
    assert load.failures == []
    assert load.good == 2
    server.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user(make_server: Make, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/") and directory != Path("/tmp"):
            directory.chmod(0o755)
    nobody = pwd.getpwnam("nobody")
    # Preloaded, since the other user may not be allowed to read the modules of root's python.
    server = make_server("bare:app", "--preload", "--user", "nobody", "--timeout", "600").wait_ready()
    assert server.json("/")["uid"] == nobody.pw_uid
    workers = server.worker_pids()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "the workers to leave", 20)
