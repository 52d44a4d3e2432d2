from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import mmap

import pytest

from gpuworker.weights.locks import Lock, Locks
from tests.unit.children import exit_code, run_child, start_child

# Python 3.12 and later warn of forks in a process with threads, which torch may have started.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

LONG = 20  # seconds; only a failure takes as long


@pytest.fixture(scope="module")
def locks() -> Locks:
    """One for all tests: like the one of a server it lives as long as the process."""
    return Locks()


@pytest.fixture
def lock(locks: Locks, request: pytest.FixtureRequest) -> Lock:
    return locks.lock(request.node.name)


@contextmanager
def child_that_holds(lock: Lock) -> Iterator[Callable[[], None]]:
    """A child that holds `lock` until the end, or until what this gives is called: then it is killed."""
    ready, tell = os.pipe()

    def hold() -> None:
        lock.acquire()
        os.write(tell, b".")
        signal.pause()

    pid = start_child(hold)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    try:
        yield lambda: os.kill(pid, signal.SIGKILL)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL


@contextmanager
def thread_that_holds(lock: Lock) -> Iterator[Callable[[], None]]:
    """A thread that holds `lock` until the end, or until what this gives is called."""
    holds, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            let_go.wait(LONG)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(LONG)
    try:
        yield let_go.set
    finally:
        let_go.set()
        thread.join()


Holder = Callable[[Lock], AbstractContextManager[Callable[[], None]]]
HOLDERS = [child_that_holds, thread_that_holds]


def is_free(lock: Lock) -> bool:
    """Whether another process can have the lock."""
    return exit_code(start_child(lambda: lock.acquire(timeout=0) or os._exit(1))) == 0


# One holder at a time


def add(lock: Lock, counter: mmap, times: int) -> None:
    """Count in a way that loses counts unless the lock excludes others."""
    for _ in range(times):
        with lock:
            value = int.from_bytes(counter[:], "little")
            time.sleep(0)  # let others in
            counter[:] = (value + 1).to_bytes(8, "little")


def in_threads(number: int, action: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_processes_exclude_each_other(lock: Lock) -> None:
    counter = mmap(-1, 8)
    children = [start_child(lambda: add(lock, counter, 300)) for _ in range(4)]
    assert [exit_code(child) for child in children] == [0] * 4
    assert int.from_bytes(counter[:], "little") == 1200


def test_threads_exclude_each_other(locks: Locks) -> None:
    counter = mmap(-1, 8)
    in_threads(8, lambda: add(locks.lock("threads"), counter, 100))
    assert int.from_bytes(counter[:], "little") == 800


def test_threads_of_several_processes_exclude_each_other(lock: Lock) -> None:
    counter = mmap(-1, 8)
    children = [start_child(lambda: in_threads(3, lambda: add(lock, counter, 50))) for _ in range(3)]
    in_threads(3, lambda: add(lock, counter, 50))
    assert [exit_code(child) for child in children] == [0] * 3
    assert int.from_bytes(counter[:], "little") == 600


def test_one_label_is_one_lock(locks: Locks) -> None:
    with child_that_holds(locks.lock("one")):
        assert not locks.lock("one").acquire(timeout=0)
        assert locks.lock("other").acquire(timeout=0)
        locks.lock("other").release()


def test_every_set_of_locks_is_its_own(locks: Locks) -> None:
    with locks.lock("a"), Locks().lock("a"):
        pass


def test_labels_are_spread_over_all_offsets(locks: Locks) -> None:
    offsets = {locks.lock(f"label {number}")._byte for number in range(1000)}
    assert len(offsets) == 1000
    assert 0 <= min(offsets) < 2**60
    assert 2**62 < max(offsets) < 2**63


@pytest.mark.parametrize("byte", [0, 2**63 - 1])
def test_the_first_and_the_last_byte_can_be_locked(lock: Lock, byte: int) -> None:
    lock._byte = byte
    with lock:
        assert not is_free(lock)
    assert is_free(lock)


# Waiting


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("timeout", [-1, 0, 0.05])
def test_timeout(lock: Lock, holder: Holder, timeout: float) -> None:
    with holder(lock):
        start = time.monotonic()
        assert lock.acquire(timeout) is False
        assert max(timeout, 0) <= time.monotonic() - start < 5
    assert lock.acquire(timeout) is True
    lock.release()


@pytest.mark.parametrize("timeout", [None, LONG, 1e300, float("inf")])
@pytest.mark.parametrize("holder", HOLDERS)
def test_waiting_until_it_is_free(lock: Lock, holder: Holder, timeout: float | None) -> None:
    with holder(lock) as end:
        timer = threading.Timer(0.03, end)
        timer.start()
        assert lock.acquire(timeout) is True
        timer.join()
    lock.release()


def test_the_death_of_the_holder_frees(lock: Lock) -> None:
    for _ in range(5):
        with child_that_holds(lock):
            assert not lock.acquire(timeout=0)
        assert lock.acquire(timeout=0)
        lock.release()


@contextmanager
def alarm(handler: Callable[..., object], seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("holder", HOLDERS)
def test_signal_handlers_run_while_it_waits(lock: Lock, holder: Holder) -> None:
    with holder(lock) as end, alarm(lambda *_: end(), 0.02):
        assert lock.acquire(LONG) is True  # nothing but the handler ends the holder
    lock.release()


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_signal_handler_that_raises_ends_the_wait(lock: Lock, holder: Holder) -> None:
    def handler(*_: object) -> None:
        raise ZeroDivisionError

    with holder(lock):
        with alarm(handler, 0.02), pytest.raises(ZeroDivisionError):
            lock.acquire()
        assert not is_free(lock)
    assert is_free(lock)
    assert lock.acquire(timeout=0)
    lock.release()


# Held and not held


def test_an_error_within_releases(lock: Lock) -> None:
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    assert is_free(lock)


def test_with(lock: Lock) -> None:
    with lock as entered:
        assert entered is lock
        assert not is_free(lock)
    assert is_free(lock)


def test_acquiring_twice_raises(locks: Locks) -> None:
    with locks.lock("twice"):
        with pytest.raises(RuntimeError, match="this thread already holds the lock 'twice'"):
            locks.lock("twice").acquire()
        assert not is_free(locks.lock("twice"))
    assert is_free(locks.lock("twice"))


def test_only_the_holder_releases(lock: Lock) -> None:
    with pytest.raises(RuntimeError, match="this thread does not hold"):
        lock.release()
    with thread_that_holds(lock):
        with pytest.raises(RuntimeError, match="this thread does not hold"):
            lock.release()
        assert not is_free(lock)


def test_no_thread_gets_a_lock_that_is_being_released(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    lockf = fcntl.lockf

    def unlock(*arguments: int) -> None:
        lockf(*arguments)
        in_threads(1, lambda: got.append(lock.acquire(timeout=0)))

    lock.acquire()
    monkeypatch.setattr(fcntl, "lockf", unlock)
    lock.release()
    assert got == [False]


def test_several_locks_at_once(locks: Locks) -> None:
    first, second = locks.lock("first"), locks.lock("second")
    with first:
        with second:
            pass
        assert is_free(second)
        assert not is_free(first)


# Forks


def test_the_file_is_close_on_exec(locks: Locks) -> None:
    assert not os.get_inheritable(locks._file)


def test_a_child_holds_nothing(lock: Lock) -> None:
    def act() -> None:
        with pytest.raises(RuntimeError, match="does not hold"):
            lock.release()
        assert not lock.acquire(timeout=0)
        os.close(lock._locks._file)

    with lock:
        run_child(act)
        assert not is_free(lock)
    assert is_free(lock)


def test_a_fork_while_another_thread_holds(lock: Lock) -> None:
    ready, tell = os.pipe()

    def act() -> None:
        assert not lock.acquire(timeout=0.02)  # the thread is in the parent, and holds
        os.write(tell, b".")
        assert lock.acquire(timeout=LONG)
        lock.release()

    with thread_that_holds(lock) as let_go:
        child = start_child(act)
        os.read(ready, 1)
        let_go()
        assert exit_code(child) == 0
    os.close(ready)
    os.close(tell)


def test_a_fork_while_another_thread_waits(lock: Lock) -> None:
    with child_that_holds(lock) as end:
        waiter = threading.Thread(target=lambda: lock.acquire() and lock.release())
        waiter.start()
        while lock._locks._thread_lock(lock._byte).owner != waiter.ident:
            time.sleep(0.001)
        child = start_child(lambda: lock.acquire(timeout=LONG) or os._exit(1))
        end()
        assert exit_code(child) == 0
        waiter.join()
