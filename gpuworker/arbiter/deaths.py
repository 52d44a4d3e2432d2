"""Tells in the log why a worker died, which gunicorn knows only as a signal; in the arbiter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuworker import memory
from gpuworker.arbiter.devices import Device
from gpuworker.cpus import cgroups


def report_timeout(pid: int, slot: int, device: Device | None, log: Any) -> None:
    """Log what can be told of a worker that is about to be ended because its request takes too long.

    The processes that it has started are ended here: when it is gone, nothing leads to them any more.
    """
    held = memory.describe(device.uuid) if device and not device.is_cpu else ""
    log.error(
        "Slot %d (pid %d) has not come back in time from its request: gunicorn ends it, and not for lack of memory, "
        "whatever it says below. Its Python stacks follow. %s",
        slot,
        pid,
        f"Memory of {device}: {held}" if held else "",
    )
    for descendant in list(_descendants(pid)):
        with suppress(OSError):
            os.kill(descendant, signal.SIGKILL)


def count_oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this container or service the kernel has killed for lack of memory; 0 if it does not tell.

    :param root: where ``proc`` and ``sys`` are mounted.
    """
    for directory in cgroups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            with suppress(OSError, StopIteration, ValueError):
                lines = (directory / name).read_text().splitlines()
                return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))
    return 0


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)
