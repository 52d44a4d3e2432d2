"""CudaThreadWorker: the same promises over gunicorn's gthread."""

from __future__ import annotations

import http.client
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from tests.live.server import Load, Server, is_running, wait_until

Make = Callable[..., Server]
THREADS = {"worker": "gpuworker.CudaThreadWorker"}


def test_slots_survive_crashes_and_reloads(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("where:app", "--threads", "4", gunicorn=gunicorn, **THREADS).wait_ready()
    started = 2
    for _ in range(3):
        with Load(server, clients=4) as load:
            wait_until(lambda load=load: load.good > 4, "some answers")
            os.kill(max(server.worker_pids()), signal.SIGKILL)
            started += 1
            server.wait_ready(started)
        assert len(load.failures) <= 4, "one for each thread of the killed worker"
        old = server.worker_pids()
        with Load(server, clients=4) as load:
            server.signal(signal.SIGHUP)
            started += 2
            server.wait_ready(started)
            wait_until(lambda old=old: not any(map(is_running, old)), "the old workers to leave")
        # Before 25 gthread drops, when it leaves, the connections it has accepted and not yet read.
        assert load.failures == [] or (gunicorn and gunicorn.name < "25")
    assert set(re.findall(r"Slot (\d+) on device \1 .* ready", server.log)) == {"0", "1"}


def test_one_worker_serves_several_requests_at_once(make_server: Make) -> None:
    server = make_server("where:app", "--threads", "4", workers=1, **THREADS).wait_ready(1)
    answers = server.ask_all(4)
    assert {answer.slot for answer in answers} == {0}
    assert "has no effect" not in server.log


def test_a_stopping_worker_answers_what_it_has_taken_up(make_server: Make) -> None:
    config = "def pre_request(worker, req):\n    worker.log.info('taken up')\n"
    server = make_server("where:app", "--threads", "2", workers=1, config=config, **THREADS).wait_ready(1)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/where?hold=1")
    server.wait_for_log("taken up")
    server.signal(signal.SIGTERM)
    assert connection.getresponse().status == 200
    connection.close()
    assert server.wait() == 0


def test_an_idle_worker_leaves_when_the_arbiter_is_killed(make_server: Make) -> None:
    server = make_server("where:app", "--threads", "2", "--timeout", "600", **THREADS).wait_ready()
    workers = server.worker_pids()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "the workers to leave", 20)


def test_a_failed_start_prints_one_traceback(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    server = make_server("slow:app", "--threads", "2", workers=4, **THREADS)
    assert server.wait() == 3
    assert server.log.count("Traceback") == 1
