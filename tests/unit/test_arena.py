from __future__ import annotations

import os

import pytest
import torch

from gpuworker.weights import staging
from gpuworker.weights.arena import ALIGNMENT, ArenaError, lay_out, slices
from gpuworker.weights.cpu import CpuArena

ARENA = CpuArena()


def storage(*values: int) -> torch.UntypedStorage:
    return torch.tensor(values, dtype=torch.uint8).untyped_storage()


def values(of: torch.UntypedStorage) -> list[int]:
    return list(of)


# Layout


def test_storages_are_aligned_and_do_not_overlap() -> None:
    layout = lay_out([1, 512, 513, 0, 7], [False] * 5)
    assert layout.places == ((0, 1), (512, 512), (1024, 513), (2048, 0), (2048, 7))
    assert layout.nbytes == layout.private == 2048 + ALIGNMENT


def test_private_storages_come_last() -> None:
    layout = lay_out([10, 20, 30], [True, False, True])
    assert layout.places == ((512, 10), (0, 20), (1024, 30))
    assert (layout.private, layout.nbytes) == (512, 1536)


def test_nothing_needs_no_arena() -> None:
    assert lay_out([], []).nbytes == lay_out([0, 0], [False, True]).nbytes == 0


def test_private_storages_are_copies_and_the_others_are_not() -> None:
    layout = lay_out([2, 2], [True, False])
    memory = torch.arange(layout.nbytes).to(torch.uint8).untyped_storage()
    own, shared = slices(layout, memory, copy_private=True)
    assert values(own) == values(memory[512:514])
    own[0], shared[0] = 99, 88
    assert memory[0] == 88
    assert memory[512] != 99


# The CPU arena


@pytest.mark.parametrize("mutable", [False, True])
def test_what_was_filled_is_what_is_attached(mutable: bool) -> None:
    fd, memory = ARENA.create(4)
    memory.copy_(storage(1, 2, 3, 4), False)
    ARENA.finish(fd, mutable=mutable)
    attached = ARENA.attach(fd, 4, mutable=mutable)
    os.close(fd)
    assert values(attached) == [1, 2, 3, 4]
    assert attached.nbytes() == 4


def test_a_write_stays_with_the_writer() -> None:
    fd, memory = ARENA.create(4)
    ARENA.finish(fd, mutable=False)
    one, other = (ARENA.attach(fd, 4, mutable=False) for _ in range(2))
    os.close(fd)
    one[0] = 7
    assert (one[0], other[0], memory[0]) == (7, 0, 0)


def test_a_write_to_a_mutable_arena_is_seen_by_all() -> None:
    fd, _ = ARENA.create(4)
    ARENA.finish(fd, mutable=True)
    one, other = (ARENA.attach(fd, 4, mutable=True) for _ in range(2))
    os.close(fd)
    one[0] = 7
    assert other[0] == 7


def test_a_finished_arena_can_be_neither_written_nor_resized_nor_unsealed() -> None:
    fd, _ = ARENA.create(4096)
    ARENA.finish(fd, mutable=False)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.truncate(fd, 0)
    with pytest.raises(ArenaError, match="cannot be mapped"):
        ARENA.attach(fd, 4096, mutable=True)
    os.close(fd)


def test_memory_that_is_not_there_is_an_error_with_the_size() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArenaError, match=r"need 1073741824\.00 GiB of memory, and [\d.]+ GiB are available"):
        ARENA.create(2**60)
    assert os.listdir("/proc/self/fd") == before


# Staging


def test_a_copy_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUFFER", 3)
    sources = [storage(1, 2, 3, 4, 5, 6, 7), storage(), storage(8)]
    targets = [torch.zeros(source.nbytes(), dtype=torch.uint8).untyped_storage() for source in sources]
    staging.copy(zip(sources, targets, strict=True), lambda done, seconds: None)
    assert [values(target) for target in targets] == [values(source) for source in sources]


def test_a_long_copy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUFFER", 2)
    monkeypatch.setattr(staging, "REPORT_EVERY", -1.0)
    reports: list[int] = []
    staging.copy([(storage(1, 2, 3), storage(0, 0, 0))], lambda done, seconds: reports.append(done))
    assert reports == [2, 3]
