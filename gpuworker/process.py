"""What a worker sets up once for its own process."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from typing import Any

import torch

#: Stands for the pid of a process that has been reaped: the kernel may give the number to another.
NOBODY = -1

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when `parent`, which forked it, is gone.

    A change of user clears the request (prctl(2)), so it is made after that.

    :raises SystemExit: if the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(0)


def take_children_along() -> None:
    """Have the kernel kill what this process forks from now on, when this process is gone.

    Only what its main thread forks: the kernel counts the end of the forking *thread* (prctl(2)). And nothing that a
    child forks in its turn, which may be a daemon that detaches itself.
    """
    own = os.getpid()
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        if os.getppid() == own and forked_by_main[0]:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    forked_by_main = [False]

    def before() -> None:
        forked_by_main[0] = threading.current_thread() is threading.main_thread()

    os.register_at_fork(before=before, after_in_child=in_child)


def show_stacks_when_aborted(log: Any) -> None:
    """Write the Python stacks of all threads to the error log when gunicorn aborts this process, even if Python hangs.

    The handler that gunicorn has set for SIGABRT is called after that.

    :param log: gunicorn's logger.
    """
    handlers = getattr(log, "error_log", None) and log.error_log.handlers
    streams = [handler.stream for handler in handlers or () if getattr(handler, "stream", None)]
    try:
        # A descriptor of our own: the log may be reopened, and its number become somebody else's.
        file = os.dup(streams[0].fileno() if streams else 2)
    except (OSError, ValueError):
        return
    handler = signal.getsignal(signal.SIGABRT)
    faulthandler.disable()  # it may have been enabled before gunicorn set its handler
    signal.signal(signal.SIGABRT, handler)
    faulthandler.enable(file, all_threads=True)


def exists(pid: int) -> bool:
    """Whether there is a process `pid`; True for 0, which stands for one that is being made, False for NOBODY."""
    if pid in (0, NOBODY):
        return pid == 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_by_force(seconds: float, code: int) -> None:
    """Have this process end in `seconds`, whatever it does until then."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def reseed() -> None:
    """Give torch and numpy random states of their own: all workers inherit the arbiter's. gunicorn reseeds `random`."""
    torch.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random:
        numpy_random.seed()
