"""Where CUDA must not start, or is not there, what an app puts on ``cuda`` stays on the CPU, and is remembered."""

from gpuworker.standin import compiler, legacy, loading, queries, tensors
from gpuworker.standin.redirect import Redirect

__all__ = ["redirect"]

redirect = Redirect(
    at_rest=[tensors.patch_moves, compiler.patch_at_rest, legacy.patch, loading.patch, queries.patch],
    in_use=[tensors.patch_attributes, compiler.patch_in_use],
)
