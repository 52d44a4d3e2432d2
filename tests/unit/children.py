"""Forked children, for tests of what is shared between processes."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def start_child(action: Callable[[], object]) -> int:
    """Fork a child that exits with 0, or with 99 and a traceback if `action` raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        signal.alarm(60)
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_child(action: Callable[[], object]) -> None:
    assert exit_code(start_child(action)) == 0
