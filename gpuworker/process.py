"""What a worker sets up once for its own process."""

from __future__ import annotations

import ctypes
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
