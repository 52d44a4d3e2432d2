"""How many CPUs this process may really use, and a worker's share of them.

torch starts as many threads as the host has cores in every process, whatever a container was granted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from gpuworker.settings import Settings


def threads_of_worker(settings: Settings, environ: Mapping[str, str], workers: int, cpus: int) -> int:
    """Intra-op threads for one of `workers` workers on `cpus` CPUs, unless the operator says otherwise.

    ``GPUWORKER_THREADS`` comes first, then ``OMP_NUM_THREADS`` (for nested levels a list, OpenMP 5.2, section 21.1.2).
    """
    if settings.threads is not None:
        return settings.threads
    outermost = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if outermost.isascii() and outermost.isdigit() and int(outermost) > 0:
        return int(outermost)
    return max(1, cpus // max(1, workers))


def granted_cpus(root: Path = Path("/")) -> int:
    """CPUs by affinity and by the quotas of all cgroups (v1 and v2) this process is in, at least 1.

    :param root: where ``proc`` and ``sys`` are mounted.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    for directory in cgroups(root, "cpu"):
        try:
            if (directory / "cpu.max").exists():
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue  # no limit at this level, or none that can be read


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Every directory from this process's own up to the mount, in the v2 tree and in the v1 tree of `controller`."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = PurePosixPath(path.lstrip("/"))
        for relative in (own, *own.parents):
            yield mount / relative
