from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuworker.cpus import granted_cpus, threads_of_worker
from gpuworker.settings import Settings

CORES = 16


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def v1(directory: str, quota: str, period: str = "100000") -> dict[str, str]:
    return {f"{directory}/cpu.cfs_quota_us": quota, f"{directory}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2, id="own-level"),
        pytest.param({"/sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3, id="parent"),
        pytest.param({"/sys/fs/cgroup/cpu.max": "400000 100000"}, 4, id="mount"),
        pytest.param(
            {"/sys/fs/cgroup/a/b/cpu.max": "max 100000", "/sys/fs/cgroup/a/cpu.max": "500000 100000"},
            5,
            id="max-below-a-limited-parent",
        ),
        pytest.param(
            {"/sys/fs/cgroup/a/b/cpu.max": "800000 100000", "/sys/fs/cgroup/a/cpu.max": "600000 100000"},
            6,
            id="parent-below-own",
        ),
        pytest.param(
            {"/sys/fs/cgroup/a/b/cpu.max": "600000 100000", "/sys/fs/cgroup/a/cpu.max": "800000 100000"},
            6,
            id="own-below-parent",
        ),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "max 100000"}, CORES, id="max"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "100000 50000"}, 2, id="another-period"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 1, id="half-a-cpu"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "1000 100000"}, 1, id="a-hundredth-of-a-cpu"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "290000 100000"}, 2, id="rounded-down"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "6400000 100000"}, CORES, id="more-than-there-are"),
        pytest.param({}, CORES, id="no-file"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": ""}, CORES, id="empty"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "200000"}, CORES, id="no-period"),
        pytest.param({"/sys/fs/cgroup/a/b/cpu.max": "many 100000"}, CORES, id="not-a-number"),
        pytest.param({"/sys/fs/cgroup/other/cpu.max": "100000 100000"}, CORES, id="another-group"),
    ],
)
def test_quotas_of_cgroup_v2(root: Path, files: dict[str, str], cpus: int) -> None:
    write(root, {"/proc/self/cgroup": "0::/a/b", **files})
    assert granted_cpus(root) == cpus


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        pytest.param(v1("/sys/fs/cgroup/cpu/a/b", "200000"), 2, id="own-level"),
        pytest.param(v1("/sys/fs/cgroup/cpu/a", "300000"), 3, id="parent"),
        pytest.param(v1("/sys/fs/cgroup/cpu", "400000"), 4, id="mount-as-in-a-container"),
        pytest.param(v1("/sys/fs/cgroup/cpu/a/b", "50000"), 1, id="half-a-cpu"),
        pytest.param(v1("/sys/fs/cgroup/cpu/a/b", "100000", "50000"), 2, id="another-period"),
        pytest.param(v1("/sys/fs/cgroup/cpu/a/b", "-1"), CORES, id="no-limit"),
        pytest.param(
            v1("/sys/fs/cgroup/cpu/a/b", "-1") | v1("/sys/fs/cgroup/cpu/a", "500000"),
            5,
            id="no-limit-below-a-limited-parent",
        ),
        pytest.param({}, CORES, id="no-file"),
        pytest.param({"/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "200000"}, CORES, id="no-period"),
        pytest.param(v1("/sys/fs/cgroup/memory/a/b", "200000"), CORES, id="another-controller"),
    ],
)
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_quotas_of_cgroup_v1(root: Path, files: dict[str, str], cpus: int, controllers: str) -> None:
    lines = ["12:memory:/a/b", f"4:{controllers}:/a/b", "1:name=systemd:/a/b"]
    write(root, {"/proc/self/cgroup": "\n".join(lines), **files})
    assert granted_cpus(root) == cpus


@pytest.mark.parametrize("line", ["3:cpuset:/a/b", "3:cpuacct:/a/b", "1:name=cpu:/a/b"])
def test_only_the_cpu_controller_of_cgroup_v1_counts(root: Path, line: str) -> None:
    write(root, {"/proc/self/cgroup": line, **v1("/sys/fs/cgroup/cpu/a/b", "200000")})
    assert granted_cpus(root) == CORES


def test_the_lowest_of_cgroup_v1_and_v2_counts(root: Path) -> None:
    files = v1("/sys/fs/cgroup/cpu/a", "300000") | {"/sys/fs/cgroup/b/cpu.max": "200000 100000"}
    write(root, {"/proc/self/cgroup": "4:cpu:/a\n0::/b", **files})
    assert granted_cpus(root) == 2


@pytest.mark.parametrize(("path", "directory"), [("/", ""), ("/a:b", "/a:b"), ("/a b/c", "/a b/c")])
def test_a_cgroup_of_any_name(root: Path, path: str, directory: str) -> None:
    write(root, {"/proc/self/cgroup": f"0::{path}", f"/sys/fs/cgroup{directory}/cpu.max": "200000 100000"})
    assert granted_cpus(root) == 2


def test_without_cgroups_the_affinity_counts(root: Path) -> None:
    assert granted_cpus(root) == CORES


def test_an_affinity_below_the_quota_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "800000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    assert granted_cpus(root) == 3


def test_this_machine_grants_at_least_one() -> None:
    assert 1 <= granted_cpus() <= CORES


@pytest.mark.parametrize(
    ("threads", "environ", "workers", "cpus", "expected"),
    [
        pytest.param(None, {}, 1, 8, 8, id="alone"),
        pytest.param(None, {}, 2, 8, 4, id="half"),
        pytest.param(None, {}, 3, 8, 2, id="rounded-down"),
        pytest.param(None, {}, 8, 8, 1, id="one-each"),
        pytest.param(None, {}, 16, 8, 1, id="more-workers-than-cpus"),
        pytest.param(None, {}, 0, 8, 8, id="no-workers"),
        pytest.param(None, {"OMP_NUM_THREADS": "3"}, 2, 8, 3, id="omp"),
        pytest.param(None, {"OMP_NUM_THREADS": "6,2"}, 2, 8, 6, id="omp-nested"),
        pytest.param(None, {"OMP_NUM_THREADS": "all"}, 2, 8, 4, id="omp-nonsense"),
        pytest.param(None, {"OMP_NUM_THREADS": ""}, 2, 8, 4, id="omp-empty"),
        pytest.param(5, {}, 2, 8, 5, id="setting"),
        pytest.param(20, {}, 2, 8, 20, id="setting-above-the-cpus"),
        pytest.param(5, {"OMP_NUM_THREADS": "3"}, 2, 8, 5, id="setting-over-omp"),
    ],
)
def test_threads_of_worker(
    threads: int | None, environ: dict[str, str], workers: int, cpus: int, expected: int | None
) -> None:
    assert threads_of_worker(Settings(threads=threads), environ, workers, cpus) == expected
