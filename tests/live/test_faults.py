"""A worker whose device breaks replaces itself, and its siblings never notice."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Load, Server, is_running, wait_until
from tests.live.test_share import ask, ask_each, kill, loads, memfds

Make = Callable[..., Server]
CLASSES = {"sync": ("gpuworker.CudaWorker",), "threads": ("gpuworker.CudaThreadWorker", "--threads", "2")}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_worker_that_lost_its_device_is_replaced(
    make_server: Make, tmp_path: Path, kind: str, gunicorn: Path | None
) -> None:
    worker, *args = CLASSES[kind]
    server = make_server("faulty:app", *args, worker=worker, workers=2, devices="cpu", gunicorn=gunicorn)
    before = ask_each(server, 2)
    with Load(server, clients=2, path="/answer") as load:
        status, body = server.get("/assert")
        assert (status, b"pid" in body) == (503, False)
        server.wait_for_log(r"Slot \d on .* ready", 3)
    after = ask_each(server, 2)
    assert len(before.keys() & after.keys()) == 1, "one was replaced"
    assert {answer["slot"] for answer in after.values()} == {0, 1}
    assert {answer["out"] for answer in after.values()} == {answer["out"] for answer in before.values()}
    assert len(loads(tmp_path)) == 1, "the weights were not loaded again"
    # Before 25 gthread drops, when it leaves, connections it has accepted and not yet read.
    drops = kind == "threads" and gunicorn is not None and gunicorn.name < "25"
    failures = [failure for failure in load.failures if not (drops and "Connection" in failure)]
    assert len(failures) <= 1 + (kind == "threads"), failures
    server.wait_for_log(r"Slot (\d) has lost its device over GET /assert: CUDA error: device-side assert")
    assert server.log.count("has lost its device") == 1
    assert "Worker failed to boot" not in server.log


def test_out_of_memory_is_answered_and_recovered_from(make_server: Make) -> None:
    server = make_server("faulty:app", workers=1, devices="cpu")
    status, _ = server.get("/oom")
    assert status == 503
    state = server.json("/faults")
    assert (state["ooms"], state["given back"]) == (1, 1)
    assert server.worker_pids() == {state["pid"]}


def test_a_hung_request_says_where_and_takes_its_children_along(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    server = make_server("faulty:app", "--timeout", "2", workers=1, devices="cpu", gunicorn=gunicorn)
    server.wait_ready(1)
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.get("/hang")
    children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert len(children) == 2
    server.wait_ready(2)
    wait_until(lambda: not any(map(is_running, children)), "the children to go")
    log = server.log
    assert log.index("WORKER TIMEOUT") < log.index("ends it, and not for lack of memory") < log.index("in stuck_here")
    server.json("/answer")


def test_a_worker_stuck_where_python_cannot_reach_it_ends_too(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "from where import app\n\n"
        "@app.get('/stuck')\ndef stuck():\n    sum(range(10**13))  # keeps the interpreter's lock\n"
    )
    server = make_server("stuck:app", "--timeout", "2", workers=1, devices="cpu").wait_ready(1)
    assert ask(server, "/stuck") is None
    server.wait_ready(2)
    assert "in stuck" in server.log


def test_forked_children_go_with_a_killed_worker(make_server: Make) -> None:
    server = make_server("faulty:app", workers=1, devices="cpu")
    answer = server.json("/children")
    assert is_running(answer["forked"])
    kill(answer["pid"])
    wait_until(lambda: not is_running(answer["forked"]), "the child to go")


def test_a_client_that_has_gone_is_not_served(make_server: Make, tmp_path: Path) -> None:
    server = make_server("faulty:app", workers=1, devices="cpu").wait_ready(1)
    with Load(server, clients=1, path="/count?hold=1") as load:
        wait_until(lambda: (tmp_path / "counted").exists(), "the first request")
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(b"GET /count HTTP/1.1\r\nHost: x\r\n\r\n")
        load.stop_asking()
    server.json("/answer")
    assert len((tmp_path / "counted").read_text()) == load.good
    assert load.failures == []


def test_eight_at_once(make_server: Make, tmp_path: Path) -> None:
    server = make_server("faulty:app", workers=8, devices="cpu,cpu").wait_ready(8)
    old = server.worker_pids()
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(server.worker_pids() - old) == 8, "eight new workers")
    answers = ask_each(server, 8)
    assert {answer["slot"] for answer in answers.values()} == set(range(8))
    assert len(loads(tmp_path)) == 2, "once for each device"


def test_kills_under_load_cost_the_requests_of_the_killed(make_server: Make, tmp_path: Path) -> None:
    server = make_server("faulty:app", workers=4, devices="cpu").wait_ready(4)
    ask_each(server, 4)
    memory = memfds(server)
    chance, kills = random.Random(3), 0
    outs: set[str] = set()
    with Load(server, clients=4, path="/answer?hold=0.01") as load:
        for _ in range(40):
            pids = server.worker_pids()
            if len(pids) > 1:
                kill(chance.choice(sorted(pids)))
                kills += 1
            outs.add(server.json("/answer")["out"]) if kills % 5 == 0 else None
            time.sleep(0.1)
    assert len(load.failures) <= kills, load.failures
    assert load.good > 40
    assert len(ask_each(server, 4)) == 4
    assert len(loads(tmp_path)) == 1
    assert memfds(server) == memory
    assert len(outs) <= 1


LOST = """
import os
from pathlib import Path
from where import app
import gpuworker
from gpuworker.context import DeviceUnavailableError

home = Path(os.environ["HOME"])
if gpuworker.slot() == 1 and (home / "lost").exists():
    with (home / "tries").open("a") as tries:
        tries.write("x")
    raise DeviceUnavailableError("CUDA does not start on device 1: it has fallen off the bus.")
"""


def test_a_lost_device_is_said_once_and_its_neighbour_serves(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "losing.py").write_text(LOST)
    server = make_server("losing:app", devices="cpu,cpu")
    workers = server.wait_for_workers(2)
    lost, tries = tmp_path / "lost", tmp_path / "tries"
    lost.touch()
    with Load(server, clients=1) as load:
        kill(workers[1].pid)
        wait_until(lambda: tries.exists() and len(tries.read_text()) >= 3, "three tries")
    assert len(load.failures) <= 1, load.failures
    assert server.log.count("has fallen off the bus") == 1
    assert "Traceback" not in server.log
    lost.unlink()
    server.wait_for_workers(2)
