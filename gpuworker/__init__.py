"""gpuworker: a gunicorn worker class that serves PyTorch models. ``gunicorn -k gpuworker.CudaWorker app:app``."""

from gpuworker.faults import out_of_memory
from gpuworker.placement import device, slot
from gpuworker.weights.share import lock, share
from gpuworker.worker import CudaThreadWorker, CudaWorker

__version__ = "0.1.0.dev0"

__all__ = ["CudaThreadWorker", "CudaWorker", "device", "lock", "out_of_memory", "share", "slot"]
