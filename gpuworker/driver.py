"""The two questions put to the CUDA driver itself, which torch cannot answer.

By ctypes, since both must work with every torch and without loading anything: a driver library that is not in the
process cannot have been started in it.
"""

from __future__ import annotations

import ctypes
import os
import uuid

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_ERROR_NOT_INITIALIZED = 3  # cuda.h: CUDA_ERROR_NOT_INITIALIZED


def is_initialised() -> bool:
    """Whether anything in this process has started the CUDA driver (``cuInit``).

    ``cuDeviceGetCount`` answers CUDA_ERROR_NOT_INITIALIZED before ``cuInit`` and changes nothing (CUDA Driver API).
    """
    library = _loaded()
    if library is None:
        return False
    count = ctypes.c_int()
    return int(library.cuDeviceGetCount(ctypes.byref(count))) != _ERROR_NOT_INITIALIZED


def device_uuid() -> str | None:
    """The UUID of this process's first device, as NVML writes it without its ``GPU-`` or ``MIG-``.

    ``cuDeviceGetUuid_v2`` names the instance on a GPU in MIG mode. CUDA must have been started.

    :returns: None if the driver cannot tell.
    """
    library = _loaded()
    if library is None or not hasattr(library, "cuDeviceGetUuid_v2"):  # new in CUDA 11.4
        return None
    device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if library.cuDeviceGet(ctypes.byref(device), 0) != _SUCCESS:
        return None
    if library.cuDeviceGetUuid_v2(octets, device) != _SUCCESS:
        return None
    return str(uuid.UUID(bytes=bytes(octets)))


def _loaded() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
