"""Copies storages from the memory of the machine to a GPU at the speed of the bus.

A plain copy goes through one small buffer of the driver. Two page-locked buffers that take turns keep the bus busy:
while one is on its way, the other is filled, by all CPUs (CUDA C++ Best Practices Guide, "Asynchronous and Overlapping
Transfers with Computation").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

#: Bytes of one of the two buffers.
BUFFER = 64 << 20
#: Seconds between two reports of a copy that takes longer than that.
REPORT_EVERY = 5.0
#: Seconds a copy must have taken to be reported at its end.
WORTH_REPORTING = 0.1

#: One copy: from, to.
Pair = tuple[torch.UntypedStorage, torch.UntypedStorage]


def copy(pairs: Iterable[Pair], report: Callable[[int, float], None]) -> None:
    """Copy each storage to its partner of the same size.

    :param report: called with the bytes done and the seconds since the start every few seconds, and at the end of a
        copy that took long enough to tell its rate.
    """
    start = reported = time.monotonic()
    done = 0
    stage = _Stage()
    for source, target in pairs:
        for source_part, target_part in _parts(source, target):
            stage.copy(source_part, target_part)
            done += target_part.numel()
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                report(done, reported - start)
    stage.wait()
    if time.monotonic() - start > WORTH_REPORTING:
        report(done, time.monotonic() - start)


def _parts(source: torch.UntypedStorage, target: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    whole_source, whole_target = bytes_of(source), bytes_of(target)
    for start in range(0, source.nbytes(), BUFFER):
        yield whole_source[start : start + BUFFER], whole_target[start : start + BUFFER]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of all bytes of `storage`, which is not copied."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Stage:
    """The two buffers; only made when something goes from the CPU to a GPU."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if target.device.type == "cpu" or source.device.type != "cpu":
            target.copy_(source)
            return
        if not self._buffers:
            self._buffers = [_new_buffer(), _new_buffer()]
        buffer, sent = self._buffers[self._turn]
        sent.synchronize()
        part = buffer[: source.numel()]
        part.copy_(source)
        target.copy_(part, non_blocking=True)
        sent.record()
        self._turn ^= 1

    def wait(self) -> None:
        for _, sent in self._buffers:
            sent.synchronize()


def _new_buffer() -> tuple[torch.Tensor, torch.cuda.Event]:
    return torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
