"""Loading has its own deadline, and there is one rule for everything that can go wrong in it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Load, Server, is_running, wait_until

Make = Callable[..., Server]


def test_loading_may_take_longer_than_the_timeout_of_a_request(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("slow:app", "--timeout", "2", env={"LOAD_SECONDS": "5"}, gunicorn=gunicorn)
    server.wait_for_workers(2)
    assert "WORKER TIMEOUT" not in server.log
    # After the boot the timeout means what it always meant.
    with contextlib.suppress(http.client.HTTPException, OSError):
        assert server.get("/where?hold=60")[0] == 500
    server.wait_for_log("WORKER TIMEOUT")
    server.wait_for_workers(2)


def test_a_slow_load_is_reported(make_server: Make) -> None:
    server = make_server("slow:app", env={"LOAD_SECONDS": "12"}, workers=1)
    server.wait_for_log(r"Slot 0 still loading, 10 s")
    server.wait_ready(1)


def test_a_load_that_hangs_stops_a_server_that_never_served(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    (tmp_path / "hang").touch()
    server = make_server("slow:app", env={"GPUWORKER_LOAD_TIMEOUT": "2"}, workers=4, gunicorn=gunicorn)
    assert server.wait() != 0
    assert server.log.count("still loading after GPUWORKER_LOAD_TIMEOUT=2 s") == 1
    assert "slow.py" in server.log, "the stack of the hung worker"
    assert not server.pid_path.exists()


def test_a_loader_that_holds_the_interpreter_lock_is_ended_too(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(
        "import ctypes\nfrom where import app\nctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the lock\n"
    )
    server = make_server("locked:app", env={"GPUWORKER_LOAD_TIMEOUT": "1"}, workers=1)
    assert server.wait() != 0
    assert "locked.py" in server.log
    assert "still loading after 1 s and had to be killed" in server.log


def test_a_worker_that_still_loads_leaves_at_once(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    server = make_server("slow:app", "--graceful-timeout", "100", workers=2)
    wait_until(
        lambda: (tmp_path / "loads").exists() and len((tmp_path / "loads").read_text().split()) == 2, "the loads"
    )
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.mark.parametrize(("flag", "reason"), [("fail", "the weights are not there"), ("exit", "sys.exit(7)")])
def test_a_failed_start_prints_one_traceback(
    make_server: Make, tmp_path: Path, gunicorn: Path | None, flag: str, reason: str
) -> None:
    (tmp_path / flag).touch()
    server = make_server("slow:app", workers=8, gunicorn=gunicorn)
    assert server.wait() == 3
    assert server.log.count("Traceback") == (1 if flag == "fail" else 0)
    assert reason in server.log
    assert not server.pid_path.exists()


def test_an_app_that_does_not_exist(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("nowhere:app", workers=4, gunicorn=gunicorn)
    assert server.wait() == 3
    assert server.log.count("Traceback") == 1
    assert "No module named 'nowhere'" in server.log


def test_an_app_object_that_does_not_exist_keeps_gunicorns_own_words(make_server: Make) -> None:
    server = make_server("where:nothing", workers=4)
    assert server.wait() == 4
    assert server.log.count("Failed to find attribute 'nothing' in 'where'.") == 1
    assert "Traceback" not in server.log


@pytest.mark.parametrize("flag", ["fail", "exit", "hang"])
def test_a_replacement_that_cannot_start_leaves_the_others_alone(
    make_server: Make, tmp_path: Path, gunicorn: Path | None, flag: str
) -> None:
    server = make_server("slow:app", workers=3, env={"GPUWORKER_LOAD_TIMEOUT": "3"}, gunicorn=gunicorn)
    workers = server.wait_for_workers(3)
    (tmp_path / flag).touch()
    with Load(server, clients=1) as load:
        os.kill(workers[1].pid, signal.SIGKILL)
        server.wait_for_log("it is ended. It hangs here" if flag == "hang" else "Slot 1 cannot start, next try in 2 s")
    assert len(load.failures) <= 1, "the request in the killed worker"
    assert is_running(workers[0].pid)
    assert is_running(workers[2].pid)
    (tmp_path / flag).unlink()
    server.wait_for_workers(3)


def test_the_server_outlives_all_its_workers(make_server: Make, tmp_path: Path, gunicorn: Path | None) -> None:
    server = make_server("slow:app", workers=2, gunicorn=gunicorn)
    workers = server.wait_for_workers(2)
    (tmp_path / "fail").touch()
    for worker in workers.values():
        os.kill(worker.pid, signal.SIGKILL)
    for slot in (0, 1):
        server.wait_for_log(f"Slot {slot} cannot start, next try in 2 s")
    assert server.log.count("Traceback") == 2, "one for each worker, none for each try"
    (tmp_path / "fail").unlink()
    server.wait_for_workers(2)


def test_a_reload_with_broken_code_leaves_the_old_workers_serving(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    server = make_server("slow:app", "--graceful-timeout", "2", workers=2, gunicorn=gunicorn)
    old = server.wait_for_workers(2)
    (tmp_path / "fail").touch()
    with Load(server) as load:
        server.signal(signal.SIGHUP)
        for slot in (0, 1):
            server.wait_for_log(f"Slot {slot} cannot start, the old worker serves on")
        for slot in (0, 1):
            server.wait_for_log(f"The reload failed, no new worker lives: slot {slot} serves on until the next HUP")
        wait_until(lambda: server.worker_pids() == {worker.pid for worker in old.values()}, "the new ones to leave")
        (tmp_path / "fail").unlink()
        served = load.good
        wait_until(lambda: load.good > served + 5, "the old workers to go on")
        server.signal(signal.SIGHUP)
        wait_until(lambda: not any(is_running(worker.pid) for worker in old.values()), "the hand-over")
    assert load.failures == []
    server.wait_for_workers(2)


def test_a_reload_waits_for_a_slow_load(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("slow:app", workers=2, env={"LOAD_SECONDS": "4"}, gunicorn=gunicorn)
    old = server.wait_for_workers(2)
    with Load(server) as load:
        server.signal(signal.SIGHUP)
        wait_until(lambda: not any(is_running(worker.pid) for worker in old.values()), "the hand-over")
    assert load.failures == []
    server.wait_for_workers(2)


def test_a_shutdown_during_a_reload_waits_for_nobody(make_server: Make, tmp_path: Path, gunicorn: Path | None) -> None:
    server = make_server("slow:app", "--graceful-timeout", "60", workers=2, gunicorn=gunicorn)
    server.wait_for_workers(2)
    (tmp_path / "hang").touch()
    server.signal(signal.SIGHUP)
    wait_until(lambda: len((tmp_path / "loads").read_text().split()) == 4, "the new workers to load")
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 50, "the graceful timeout was waited for"


def test_after_a_failed_reload_ttou_means_what_it_always_meant(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    server = make_server("slow:app", "--graceful-timeout", "2", workers=3, gunicorn=gunicorn)
    old = server.wait_for_workers(3)
    (tmp_path / "fail").touch()
    server.signal(signal.SIGHUP)
    server.wait_for_log("The reload failed", 3)
    wait_until(lambda: server.worker_pids() == {worker.pid for worker in old.values()}, "the new ones to leave")
    server.signal(signal.SIGTTOU)
    server.wait_for_workers(2, slots={1, 2})


def test_what_an_app_makes_of_being_told_to_leave_while_it_loads(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    (tmp_path / "turns.py").write_text(
        "from where import app\ntry:\n    import slow\n"
        "except BaseException as error:\n    raise RuntimeError from error\n"
    )
    server = make_server("turns:app", workers=2, gunicorn=gunicorn)
    server.wait_for_workers(2)
    (tmp_path / "hang").touch()
    server.signal(signal.SIGTTIN)
    wait_until(lambda: len((tmp_path / "loads").read_text().split()) == 3, "the third load")
    loading = int((tmp_path / "loads").read_text().split()[-1])
    os.kill(loading, signal.SIGTERM)
    (tmp_path / "hang").unlink()
    wait_until(lambda: not is_running(loading), "it to leave")
    server.wait_for_workers(3)


def test_a_worker_that_crashes_while_it_loads_is_slowed_down(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(
        "import os, signal\nfrom pathlib import Path\nimport slow\napp = slow.app\n"
        "if Path(os.environ['HOME'], 'crash').exists():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    server = make_server("crash:app", workers=2)
    workers = server.wait_for_workers(2)
    (tmp_path / "crash").touch()
    os.kill(workers[1].pid, signal.SIGKILL)
    server.wait_for_log("The last worker of slot 1 died while it was loading", 2)
    assert len((tmp_path / "loads").read_text().split()) <= 5
    (tmp_path / "crash").unlink()
    server.wait_for_workers(2)


@pytest.mark.parametrize("when", ["start", "respawn"])
def test_a_thread_the_app_left_does_not_keep_a_failed_worker(make_server: Make, tmp_path: Path, when: str) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "import slow\napp = slow.app\n"
    )
    flag = tmp_path / "fail"
    if when == "start":
        flag.touch()
        assert make_server("threads:app", "--graceful-timeout", "2").wait() == 3
        return
    server = make_server("threads:app", "--graceful-timeout", "2")
    workers = server.wait_for_workers(2)
    flag.touch()
    os.kill(workers[1].pid, signal.SIGKILL)
    server.wait_for_log("Slot 1 cannot start")
    flag.unlink()
    server.wait_for_workers(2)
