"""Promise 1: which worker holds which slot and device, whatever happens to the others."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.server import Answer, Load, Server, is_running, wait_until

Make = Callable[..., Server]


def kill(answer: Answer) -> None:
    """kill -9, until the arbiter has noticed."""
    os.kill(answer.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{answer.pid}").exists(), f"the arbiter to reap {answer.pid}")


def rounds(gunicorn: Path | None, full: int) -> int:
    """How often to repeat: in full on the newest gunicorn."""
    return full if gunicorn is None else full // 5


def assert_devices_follow_slots(server: Server, devices: int = 2) -> None:
    pairs = re.findall(r"Slot (\d+) on device (\d+)", server.log)
    assert pairs
    assert all(int(device) == int(slot) % devices for slot, device in pairs)


def test_killed_workers_come_back_in_their_slot(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=3, gunicorn=gunicorn)
    chance = random.Random(1)
    for _ in range(rounds(gunicorn, 50)):
        workers = server.wait_for_workers(3)
        kill(workers[chance.randrange(3)])
    server.wait_for_workers(3)
    assert_devices_follow_slots(server)


def test_two_killed_at_once(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=4, gunicorn=gunicorn)
    workers = server.wait_for_workers(4)
    for slot in (0, 2):
        os.kill(workers[slot].pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(workers[slot].pid) for slot in (0, 2)), "both to die")
    after = server.wait_for_workers(4)
    assert {slot for slot in range(4) if after[slot].pid != workers[slot].pid} == {0, 2}
    assert_devices_follow_slots(server)


def test_more_workers_than_devices_by_ttin(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=1, gunicorn=gunicorn)
    for count in (2, 3, 4):
        server.wait_for_workers(count - 1)
        server.signal(signal.SIGTTIN)
    server.wait_for_workers(4)
    assert_devices_follow_slots(server)


def test_ttou_leaves_a_gap_that_the_next_worker_fills(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=3, gunicorn=gunicorn)
    before = server.wait_for_workers(3)
    server.signal(signal.SIGTTOU)  # takes the oldest, which holds slot 0
    after = server.wait_for_workers(2, slots={1, 2})
    assert {after[1].pid, after[2].pid} == {before[1].pid, before[2].pid}
    server.signal(signal.SIGTTIN)
    server.wait_for_workers(3)


def test_hups_under_load(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=2, gunicorn=gunicorn)
    pids = {answer.pid for answer in server.wait_for_workers(2).values()}
    with Load(server) as load:
        for round_ in range(1, 1 + rounds(gunicorn, 10)):
            server.signal(signal.SIGHUP)
            server.wait_for_log(r"Slot \d+ on .* ready", 2 + 2 * round_)
            wait_until(lambda old=pids: not any(map(is_running, old)), "the old workers to leave")
            pids = server.worker_pids()
    assert load.good > 20
    assert load.failures == []
    server.wait_for_workers(2)
    assert_devices_follow_slots(server)


def test_hup_followed_by_a_crash(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=3, gunicorn=gunicorn)
    server.wait_for_workers(3)
    for slot in (2, 0, 1):
        server.signal(signal.SIGHUP)
        old = server.worker_pids()
        wait_until(lambda old=old: server.worker_pids() - old, "a new worker")
        newest = max(server.worker_pids() - old)
        os.kill(newest, signal.SIGKILL)  # while the others still start
        wait_until(lambda old=old: not any(map(is_running, old)), "the old workers to leave")
        kill(server.wait_for_workers(3)[slot])
        server.wait_for_workers(3)
    assert_devices_follow_slots(server)


def test_upgrade_by_usr2_and_back_out(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server(workers=2, gunicorn=gunicorn)
    old = server.wait_for_workers(2)
    server.signal(signal.SIGUSR2)
    upgraded = server.tmp_path / "gunicorn.pid.2"
    wait_until(upgraded.exists, "the new arbiter's pid file")
    new_arbiter = int(upgraded.read_text())
    server.wait_for_log(r"Slot \d+ on .* ready", 4)
    assert sorted(re.findall(r"Slot (\d+) on .* ready", server.log)) == ["0", "0", "1", "1"]
    os.kill(new_arbiter, signal.SIGTERM)
    wait_until(lambda: not is_running(new_arbiter), "the new arbiter to go")
    back = server.wait_for_workers(2)
    assert {slot: answer.pid for slot, answer in back.items()} == {slot: answer.pid for slot, answer in old.items()}
    kill(back[1])
    server.wait_for_workers(2)


def test_workers_that_recycle_after_some_requests(make_server: Make, gunicorn: Path | None) -> None:
    server = make_server("where:app", "--max-requests", "5", workers=2, gunicorn=gunicorn)
    server.wait_ready()
    with Load(server) as load:
        server.wait_for_log("Autorestarting worker", 12)
    assert load.good > 50
    server.wait_for_log(r"Slot \d+ on .* ready", 12)
    assert set(re.findall(r"Slot (\d+) on", server.log)) == {"0", "1"}
    assert_devices_follow_slots(server)


def test_a_slot_is_not_given_out_before_its_last_holder_is_reaped(make_server: Make) -> None:
    # The old oldest worker, in slot 0, is told to go but finishes a request first; the one that comes meanwhile must
    # not be given its slot.
    server = make_server(workers=2)
    workers = server.wait_for_workers(2)
    with Load(server, clients=4, path="/where?hold=1") as load:
        wait_until(lambda: load.good >= 2, "both workers to be busy")
        server.signal(signal.SIGTTOU)
        server.signal(signal.SIGTTIN)
        server.wait_for_log(r"Slot \d+ on .* ready", 3)
        newcomer = re.findall(r"Slot (\d+) on .* ready", server.log)[-1]
        assert newcomer == ("2" if is_running(workers[0].pid) else "0")
    assert load.failures == []


def test_a_guard_that_cannot_be_installed_stops_the_start(make_server: Make) -> None:
    config = (
        "from gpuworker.arbiter.guard import Guard\n"
        "def broken(self):\n    raise OSError('no luck today')\n"
        "Guard._set_nvml_check = broken\n"
    )
    server = make_server(config=config)
    assert server.wait() == 1
    assert "no luck today" in server.log
    assert "Traceback" not in server.log
    assert not server.pid_path.exists()


@pytest.mark.parametrize("step", ["slots.SlotTable.take", "prefork.discover", "prefork.guard.driver_problem"])
@pytest.mark.parametrize("when", ["start", "respawn", "reload"])
def test_a_failing_step_in_the_arbiter_never_ends_it(make_server: Make, tmp_path: Path, step: str, when: str) -> None:
    module, _, attribute = step.partition(".")
    owner, _, name = f"{module}.{attribute}".rpartition(".")
    flag = tmp_path / "fail"
    config = f"""
import os
from gpuworker.arbiter import prefork, slots
original = getattr({owner}, "{name}")
def broken(*args, **kwargs):
    if os.path.exists({str(flag)!r}):
        raise OSError("no luck today")
    return original(*args, **kwargs)
if not getattr(original, "patched", False):
    broken.patched = True
    setattr({owner}, "{name}", broken)
"""
    if when == "start":
        flag.touch()
        server = make_server(config=config)
        assert server.wait() != 0
        assert "no luck today" in server.log
        assert not server.pid_path.exists()
        return
    # From 25 on gunicorn waits as long for the old workers of a reload before it does anything else.
    server = make_server("where:app", "--graceful-timeout", "2", config=config)
    workers = server.wait_for_workers(2)
    flag.touch()
    if when == "respawn":
        os.kill(workers[1].pid, signal.SIGKILL)
        if step == "prefork.discover":  # done once for all workers
            server.wait_for_workers(2)
            return
        survivor = workers[0].pid
    else:
        server.signal(signal.SIGHUP)
        survivor = workers[0].pid
    server.wait_for_log("cannot start.*no luck today")
    assert is_running(server.pid)
    assert is_running(survivor)
    flag.unlink()
    if when == "reload":
        server.signal(signal.SIGHUP)
        wait_until(lambda: not is_running(survivor), "the old worker to hand over")
    server.wait_for_workers(2)
