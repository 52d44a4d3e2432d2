"""Locks between the processes of a server that the kernel releases when the holder dies.

They are byte ranges of one anonymous file (`lockf`), which serves for nothing else: a process loses *all* its locks on
a file as soon as it closes *any* descriptor of it, so this one is opened once, in the arbiter, and never closed. A
forked child has the file but not the locks, so what an app forks holds none of them.

To `lockf` all threads of a process are one, so a lock of `threading` stands in front of every byte.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import threading
import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.020  # seconds between two looks at a lock that another process holds


class Locks:
    """All locks of a server, by label. Made in the arbiter, used in the workers forked from it.

    It lives as long as the process.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("gpuworker-locks", os.MFD_CLOEXEC)
        self._threads: dict[int, _ThreadLock] = {}
        os.register_at_fork(after_in_child=self._forget_threads)

    def lock(self, label: str) -> Lock:
        """The lock of `label`; nothing is held yet. All locks of one label are one, in all processes and threads."""
        return Lock(self, label)

    def _forget_threads(self) -> None:
        """In a forked child: the threads of the parent are not there to release what they held."""
        self._threads = {}

    def _thread_lock(self, byte: int) -> _ThreadLock:
        return self._threads.setdefault(byte, _ThreadLock())  # one atomic step, so it needs no lock itself


class Lock:
    """One lock, as a context manager. It is not re-entrant."""

    def __init__(self, locks: Locks, label: str) -> None:
        self._locks = locks
        self._label = label
        self._byte = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") >> 1  # offsets have 63 bits

    def acquire(self, timeout: float | None = None) -> bool:
        """Take the lock and return True, or False when others held it for `timeout` seconds.

        Signal handlers run while it waits. None waits for ever, 0 only looks.

        :raises RuntimeError: when this thread holds the lock already.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        threads = self._locks._thread_lock(self._byte)
        if threads.owner == threading.get_ident():
            raise RuntimeError(f"this thread already holds the lock {self._label!r}")
        if not threads.lock.acquire(timeout=min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)):
            return False
        taken = False
        try:
            threads.owner = threading.get_ident()
            taken = self._poll(deadline)
            return taken
        finally:
            if not taken:  # also when a signal handler raised
                self._leave(threads)

    def release(self) -> None:
        """Let the lock go.

        :raises RuntimeError: when this thread does not hold it; a forked child does not hold what its parent held.
        """
        threads = self._locks._thread_lock(self._byte)
        if threads.owner != threading.get_ident():
            raise RuntimeError(f"this thread does not hold the lock {self._label!r}")
        self._leave(threads)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _poll(self, deadline: float) -> bool:
        pause = _FIRST_PAUSE
        while not self._take_byte():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _take_byte(self) -> bool:
        try:
            # Never blocking: a blocked lockf may fail with EDEADLK where several threads hold and want several locks.
            fcntl.lockf(self._locks._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
        except BlockingIOError:
            return False
        return True

    def _leave(self, threads: _ThreadLock) -> None:
        # The byte first: the next thread would get it, as its process has it, and lose it to the unlock of this one.
        fcntl.lockf(self._locks._file, fcntl.LOCK_UN, 1, self._byte)
        threads.owner = None
        threads.lock.release()


class _ThreadLock:
    """The lock that stands before one byte within a process, and the thread that holds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
