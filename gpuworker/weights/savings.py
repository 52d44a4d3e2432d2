"""Tells an app that loads its weights in every worker what it could save."""

from __future__ import annotations

import torch

from gpuworker.standin import marks

#: Bytes that are worth a line in the log.
WORTH_TELLING = 64 << 20


def own_bytes(*, on_cpu: bool) -> int:
    """Bytes of this worker's device that are this worker's alone; on a CPU device those that claim to be on a GPU."""
    if on_cpu:
        return sum(storage.nbytes() for storage in marks.living_storages())
    return int(torch.cuda.memory_allocated())


def advice(own: int, workers: int, devices: int) -> str:
    """What to log.

    :param own: bytes each of `workers` holds for itself.
    :returns: empty if sharing would save little.
    """
    saved = own * (workers - min(workers, devices))
    if saved < WORTH_TELLING:
        return ""
    return (
        f"Each of {workers} workers holds {own / 2**30:.2f} GiB on its device for itself. One copy for all of a device "
        f"would save {saved / 2**30:.2f} GiB: load the model with gpuworker.share(), or use --preload."
    )
