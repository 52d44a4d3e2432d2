"""The CPU arena: a memfd. It depends on neither the size of ``/dev/shm`` nor the number of parameters."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from gpuworker.weights.arena import ArenaError

# Linux 5.1, linux/fcntl.h; not in Python's fcntl module.
_F_SEAL_FUTURE_WRITE = 0x0010


class CpuArena:
    """Arenas in the memory of the machine."""

    device_type = "cpu"
    copies_on_write = True

    def create(self, nbytes: int) -> tuple[int, torch.UntypedStorage]:
        """See :class:`~gpuworker.weights.arena.Arena`."""
        available = _available_bytes()
        if nbytes > available:
            # Asked before, since the kernel would give page after page, and then kill somebody.
            raise ArenaError(
                f"the shared weights need {nbytes / 2**30:.2f} GiB of memory, and {available / 2**30:.2f} GiB are "
                "available: free some, or share less."
            )
        fd = os.memfd_create("gpuworker-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fails here, not with a bus error when the memory is touched
            return fd, _map(fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"there is no memory for {nbytes:,} bytes of shared weights: {error}") from error

    def finish(self, fd: int, *, mutable: bool) -> None:
        """See :class:`~gpuworker.weights.arena.Arena`.

        The mapping of the process that filled it stays writable (F_SEAL_WRITE is refused while there is one), so that
        process has to let go of it and attach like all others.
        """
        seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        if not mutable:
            seals |= _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)

    def attach(self, fd: int, nbytes: int, *, mutable: bool) -> torch.UntypedStorage:
        """See :class:`~gpuworker.weights.arena.Arena`. MAP_PRIVATE: what a worker writes stays in that worker."""
        try:
            return _map(fd, nbytes, mmap.MAP_SHARED if mutable else mmap.MAP_PRIVATE)
        except OSError as error:
            raise ArenaError(f"{nbytes:,} bytes of shared weights cannot be mapped: {error}") from error

    def trim(self) -> None:
        """See :class:`~gpuworker.weights.arena.Arena`."""


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _map(fd: int, nbytes: int, flags: int) -> torch.UntypedStorage:
    memory = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # The tensor, and so its storage, keeps the mapping.
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
