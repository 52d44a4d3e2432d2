"""A reload costs no request, whatever becomes of the new workers; and the one that is meant to cost some."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live.server import Load, Server, is_running, wait_until
from tests.live.test_share import FDS_OF_AN_OBJECT, ask_each, loads, memfds, parked_fds, wait_until_each

Make = Callable[..., Server]
READY = r"Slot \d+ on .* ready"
#: A graceful timeout that no test lives to see.
NEVER = "1000"


def hup(server: Server) -> set[int]:
    """HUP, and the workers there were."""
    old = server.worker_pids()
    server.signal(signal.SIGHUP)
    return old


def wait_until_gone(server: Server, pids: set[int]) -> None:
    try:
        wait_until(lambda: not any(map(is_running, pids)), "the old workers to leave")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log}") from None


def wait_for_loads(tmp_path: Path, count: int) -> list[int]:
    """The pids of those that began to import ``slow``, once there are `count`."""
    wait_until(lambda: (tmp_path / "loads").read_text().count("\n") == count, f"{count} loads")
    return list(map(int, (tmp_path / "loads").read_text().split()))


def wait_for_failure(server: Server, old: set[int], count: int) -> None:
    """Until all new workers have given up, and `count` old ones said so in the whole log."""
    server.wait_for_log("The reload failed, no new worker lives", count)
    wait_until(lambda: server.worker_pids() == old, "the new workers to leave")


def go_on(load: Load, requests: int = 20) -> None:
    served = load.good
    wait_until(lambda: load.good > served + requests, "requests to be served")


# Under load.


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_any_number_of_workers(make_server: Make, workers: int) -> None:
    server = make_server("slow:app", workers=workers, env={"LOAD_SECONDS": "2"}).wait_ready(workers)
    with Load(server, clients=4) as load:
        old = hup(server)
        wait_until_gone(server, old)
        go_on(load)
    assert load.failures == []
    server.wait_for_workers(workers)


def test_a_load_longer_than_the_graceful_timeout(make_server: Make, gunicorn: Path | None) -> None:
    # The arbiter sends its SIGTERM again and again: on 25 and later after the timeout, before that every second.
    server = make_server("slow:app", "--graceful-timeout", "1", env={"LOAD_SECONDS": "4"}, gunicorn=gunicorn)
    server.wait_ready()
    with Load(server) as load:
        old = hup(server)
        wait_until_gone(server, old)
        go_on(load)
    assert load.failures == []
    server.wait_for_workers(2)


def test_a_loader_that_is_killed(make_server: Make, tmp_path: Path, gunicorn: Path | None) -> None:
    server = make_server("slow:app", workers=2, gunicorn=gunicorn).wait_ready()
    (tmp_path / "hang").touch()
    with Load(server) as load:
        old = hup(server)
        killed = wait_for_loads(tmp_path, 4)[-1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{killed}").exists(), "the arbiter to reap it")
        go_on(load)
        assert old <= server.worker_pids()
        (tmp_path / "hang").unlink()
        # One old worker has no successor that lives, and gunicorn makes one only when it has gone.
        wait_until_gone(server, old)
        go_on(load)
    assert load.failures == []
    server.wait_for_workers(2)


def test_the_only_loader_is_killed(make_server: Make, tmp_path: Path) -> None:
    server = make_server("slow:app", "--graceful-timeout", "1", workers=1).wait_ready(1)
    (tmp_path / "hang").touch()
    with Load(server) as load:
        old = hup(server)
        os.kill(wait_for_loads(tmp_path, 2)[-1], signal.SIGKILL)
        wait_for_failure(server, old, 1)
        go_on(load)
        (tmp_path / "hang").unlink()
        hup(server)
        wait_until_gone(server, old)
    assert load.failures == []
    server.wait_for_workers(1)


def test_other_numbers_of_workers_and_other_settings(make_server: Make, gunicorn: Path | None) -> None:
    def config(workers: int, devices: str) -> str:
        environment = [f"GPUWORKER_DEVICES={devices}", "LOAD_SECONDS=1"]
        return f"workers = {workers}\ngraceful_timeout = 2\nraw_env = {environment}\n"

    server = make_server("slow:app", workers=None, devices=None, config=config(3, "cpu"), gunicorn=gunicorn)
    server.wait_for_workers(3)
    with Load(server) as load:
        for workers, devices in ((1, "cpu,cpu"), (3, "cpu,cpu,cpu")):
            server.write_config(config(workers, devices))
            old = hup(server)
            wait_until_gone(server, old)
            go_on(load)
    assert load.failures == []
    server.wait_for_workers(3)
    devices = re.findall(r"Slot (\d) on device (\d) .* ready", server.log)
    assert sorted(devices[:3]) == [("0", "0"), ("1", "0"), ("2", "0")]
    assert devices[3] == ("0", "0")
    assert sorted(devices[4:]) == [("0", "0"), ("1", "1"), ("2", "2")]


# Shutdown.

TAKEN_UP = "def pre_request(worker, request):\n    worker.log.info('taken up')\n"


@contextlib.contextmanager
def endless_request(server: Server) -> Iterator[None]:
    """An old worker is busy for longer than the block, which has to end it."""

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.get("/where?hold=1000")

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for_log("taken up")
    yield
    thread.join()


def shut_down(server: Server, tmp_path: Path, *signals: signal.Signals) -> None:
    """Stop `server` while new workers load and an old one has a request that does not end."""
    (tmp_path / "hang").touch()
    with endless_request(server):
        hup(server)
        wait_for_loads(tmp_path, 4)
        for number in signals:
            server.signal(number)
            if number != signals[-1]:
                # The first is being obeyed: only the busy worker is left.
                wait_until(lambda: len(server.worker_pids()) == 1, "the others to leave")
        assert server.wait() == 0


def test_a_quick_shutdown_waits_for_nobody(make_server: Make, tmp_path: Path, gunicorn: Path | None) -> None:
    server = make_server("slow:app", "--graceful-timeout", NEVER, config=TAKEN_UP, gunicorn=gunicorn).wait_ready()
    shut_down(server, tmp_path, signal.SIGQUIT)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGQUIT]], ids=["int", "term-quit"])
def test_other_ways_of_shutting_down(make_server: Make, tmp_path: Path, signals: list[signal.Signals]) -> None:
    server = make_server("slow:app", "--graceful-timeout", NEVER, config=TAKEN_UP).wait_ready()
    shut_down(server, tmp_path, *signals)


# Broken code.


def max_requests(server: Server, tmp_path: Path) -> None:
    """The old workers stay for more requests than they may, and the new ones do not."""
    old = server.wait_ready().worker_pids()
    (tmp_path / "fail").touch()
    hup(server)
    wait_for_failure(server, old, 2)
    with Load(server, clients=4) as load:
        wait_until(lambda: load.good > 600, "more requests than two workers may serve")
        assert server.worker_pids() == old
        assert "Autorestarting" not in server.log
        (tmp_path / "fail").unlink()
        hup(server)
        wait_until_gone(server, old)
        server.wait_for_log("Autorestarting worker")
    assert load.failures == []
    assert "and ignores --max-requests" in server.log
    server.wait_for_workers(2)


ARGUMENTS = ("--graceful-timeout", "1", "--max-requests", "200")


def test_max_requests_does_not_end_the_old_workers(make_server: Make, tmp_path: Path, gunicorn: Path | None) -> None:
    max_requests(make_server("slow:app", *ARGUMENTS, gunicorn=gunicorn), tmp_path)


def test_max_requests_does_not_end_the_old_workers_with_threads(make_server: Make, tmp_path: Path) -> None:
    threads = ("--threads", "4")
    max_requests(make_server("slow:app", *ARGUMENTS, *threads, worker="gpuworker.CudaThreadWorker"), tmp_path)


FRAGILE = """
import os
from pathlib import Path
import gpuworker
from gpuworker.weights import cpu
import where
app = where.app
home = Path(os.environ["HOME"])
if (home / "full").exists():
    cpu._available_bytes = lambda: 1000

@gpuworker.share(files=[home / "weights"])
def net():
    return __import__("torch").nn.Linear(64, 64).eval()
"""


def test_every_way_of_being_broken(make_server: Make, tmp_path: Path) -> None:
    app, weights = tmp_path / "fragile.py", tmp_path / "weights"

    def break_code() -> None:
        app.write_text(FRAGILE + "def broken(:\n")

    def lose_weights() -> None:
        weights.unlink()

    def fill_memory() -> None:
        weights.write_text("2")  # new ones, so that a second copy is needed
        (tmp_path / "full").touch()

    app.write_text(FRAGILE)
    weights.write_text("1")
    server = make_server("fragile:app", "--graceful-timeout", "1").wait_ready()
    failures = 0
    with Load(server) as load:
        for break_it, reason in (
            (break_code, "SyntaxError"),
            (lose_weights, "weights' cannot be read"),
            (fill_memory, "the shared weights need 0.00 GiB of memory, and 0.00 GiB are available"),
        ):
            break_it()
            failures += 2
            old = hup(server)
            wait_for_failure(server, old, failures)
            assert reason in server.log
            assert is_running(server.pid)
            go_on(load)
            app.write_text(FRAGILE)
            weights.touch()
        (tmp_path / "full").unlink()
        hup(server)
        wait_until_gone(server, old)
        go_on(load)
    assert load.failures == []
    server.wait_for_workers(2)


# GPUWORKER_RELOAD=recreate


def recreating(**more: str) -> dict[str, str]:
    return {"GPUWORKER_RELOAD": "recreate", **more}


def test_the_old_workers_and_their_weights_go_before_new_ones_are_loaded(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    server = make_server("shares:app", env=recreating(), devices="cpu", gunicorn=gunicorn)
    old = set(ask_each(server, 2))
    before = memfds(server)
    (tmp_path / "hang").touch()
    with Load(server, path="/answer") as load:
        hup(server)
        wait_until(lambda: len(loads(tmp_path)) == 2, "the new load")
        assert not any(map(is_running, old))
        assert parked_fds(server) == 0
        assert not memfds(server) & before
        (tmp_path / "hang").unlink()
        go_on(load)
    assert load.failures == [], "they waited"
    assert not old & set(ask_each(server, 2))


def test_nobody_goes_for_weights_that_are_kept_or_code_that_is_broken(make_server: Make, tmp_path: Path) -> None:
    app = tmp_path / "fragile.py"
    app.write_text(FRAGILE)
    (tmp_path / "weights").write_text("1")
    server = make_server("fragile:app", "--graceful-timeout", "1", env=recreating()).wait_ready()
    with Load(server) as load:
        app.write_text(FRAGILE + "def broken(:\n")
        old = hup(server)
        wait_for_failure(server, old, 2)
        app.write_text(FRAGILE)
        hup(server)
        wait_until_gone(server, old)
        go_on(load)
    assert load.failures == []
    assert "The old workers leave before" not in server.log


def test_a_request_that_does_not_end_is_given_the_graceful_timeout(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", "--graceful-timeout", "2", env=recreating(), config=TAKEN_UP, devices="cpu")
    server.wait_ready()
    with endless_request(server):
        wait_until_gone(server, hup(server))
    ask_each(server, 2)
    assert len(loads(tmp_path)) == 2
    assert parked_fds(server) == FDS_OF_AN_OBJECT


# Warm-up.

WARMED = """
import os
import time
from pathlib import Path
import torch
import gpuworker
import where
app = where.app
home = Path(os.environ["HOME"])

def warm(net):
    assert isinstance(net, torch.nn.Linear)
    with (home / "warmed").open("a") as warmed:
        warmed.write(f"{os.getpid()}\\n")
    while (home / "hang").exists():
        time.sleep(0.1)
    if (home / "fail").exists():
        raise ValueError("no warm-up today")
    net(torch.ones(1, 64))
    time.sleep(0.05)

@gpuworker.share(version=1, warmup=warm)
def net():
    return torch.nn.Linear(64, 64).eval()
"""


@pytest.mark.parametrize("args", [(), ("--preload",)], ids=["import", "preload"])
def test_a_worker_serves_when_it_is_warm(make_server: Make, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "warmed.py").write_text(WARMED)
    server = make_server("warmed:app", "--graceful-timeout", "1", *args, devices="cpu").wait_ready()
    workers = server.worker_pids()
    assert sorted(map(int, (tmp_path / "warmed").read_text().split())) == sorted(workers)
    times = re.findall(r"ready in ([\d.]+) s: .*weights ([\d.]+) s, warm-up ([\d.]+) s$", server.log, re.M)
    assert len(times) == 2
    assert all(float(total) > float(warm) > 0.05 for total, _, warm in times)
    assert min(float(weights) for _, weights, _ in times) < 0.05, "one of them did not load"
    with Load(server) as load:
        (tmp_path / "hang").touch()
        hup(server)
        wait_until(lambda: (tmp_path / "warmed").read_text().count("\n") == 4, "the new workers to warm up")
        go_on(load)
        assert workers <= server.worker_pids()
        (tmp_path / "fail").touch()
        (tmp_path / "hang").unlink()
        wait_for_failure(server, workers, 2)
        assert "no warm-up today" in server.log
        go_on(load)
        (tmp_path / "fail").unlink()
        hup(server)
        wait_until_gone(server, workers)
    assert load.failures == []


def test_a_failing_warm_up_is_a_failing_start(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "warmed.py").write_text(WARMED)
    (tmp_path / "fail").touch()
    server = make_server("warmed:app")
    assert server.wait() == 3
    assert server.log.count("Traceback") == 1
    assert "no warm-up today" in server.log


# gunicorn's own --reload, for development.

EDITED = """
import os
from pathlib import Path
import torch
import gpuworker
import where
app = where.app

@gpuworker.share(version=1)
def net():
    with Path(os.environ["HOME"], "loads").open("a") as loads:
        loads.write(f"cpu {os.getpid()}\\n")
    return torch.nn.Linear(64, 64).eval()

@app.get("/edited")
def edited():
    return {"pid": os.getpid(), "edited": EDITED}
"""


# A change between the import of a file and the first look at it goes unnoticed.
LOOKED = """
import os
from pathlib import Path
from gunicorn.reloader import Reloader
look = Reloader.get_files
home = Path(os.environ["HOME"])
def looks_again(self):
    first, second = home / f"first-{os.getpid()}", home / f"second-{os.getpid()}"
    (second if first.exists() else first).touch()
    return look(self)
if not hasattr(Reloader, "original"):
    Reloader.original = look
    Reloader.get_files = looks_again
"""


def save(server: Server, text: str) -> None:
    """Write the app, once all workers watch it."""
    pids = server.worker_pids()
    wait_until(lambda: all((server.tmp_path / f"second-{pid}").exists() for pid in pids), "the workers to watch")
    (server.tmp_path / "edited.py").write_text(text)


def test_a_saved_file_restarts_the_workers_and_keeps_the_weights(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    app = tmp_path / "edited.py"
    app.write_text(EDITED.replace("EDITED", "1"))
    args = ("--reload", "--reload-engine", "poll")
    server = make_server("edited:app", *args, config=LOOKED, devices="cpu", gunicorn=gunicorn)
    ask_each(server, 2, "/edited")
    save(server, EDITED.replace("EDITED", "22"))
    wait_until_each(server, 2, "/edited", lambda answer: answer["edited"] == 22)
    # gunicorn serves a page with the error, and looks at the file from then on.
    save(server, EDITED.replace("EDITED", "3 3"))
    server.wait_for_log(READY, 6)
    status, page = server.get("/edited")
    assert (status, b"in load_wsgi" in page) == (500, True), page
    # An error of another kind would end gunicorn's own worker, and with it the server.
    save(server, "import nothing_of_that_name\n")
    for slot in (0, 1):
        server.wait_for_log(f"Slot {slot} cannot start, next try in 1 s: .*'nothing_of_that_name'")
    app.write_text(EDITED.replace("EDITED", "4444"))
    wait_until_each(server, 2, "/edited", lambda answer: answer["edited"] == 4444)
    assert len(loads(tmp_path)) == 1
