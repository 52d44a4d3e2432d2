"""``torch.compile`` while operations are redirected: what is compiled for the GPU is compiled in a worker, later."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from gpuworker.patches import Patches
from gpuworker.standin.redirect import Redirect


def patch_at_rest(redirect: Redirect, patches: Patches) -> None:
    """Notice what is compiled once the redirection is in use."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def compile_later(*args: Any, **kwargs: Any) -> Any:
        if redirect.in_use:
            _run_eagerly(redirect.in_use)
        return compile_(*args, **kwargs)

    patches.on_removal(_forget_rules)
    patches.put(torch, "compile", compile_later)


def _forget_rules() -> None:
    """If the compiler was loaded meanwhile, its rules are about our functions in place of torch's."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for function in list(vars(rules).values()) if rules else ():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def patch_in_use(redirect: Redirect, patches: Patches) -> None:
    """Have what has been compiled run as it was written."""
    if "torch._dynamo" in sys.modules:
        _run_eagerly(patches)


def _run_eagerly(patches: Patches) -> None:
    """Not before it is needed, since it imports the compiler.

    What runs while the compiler is merely disabled by its configuration would never be compiled afterwards.
    """
    compiler: Any = torch.compiler
    if hasattr(compiler, "set_stance"):
        compiler.set_stance("force_eager")
        patches.on_removal(lambda: compiler.set_stance("default"))
    else:  # before torch 2.6
        import torch._dynamo.eval_frame as frames

        switch: Any = vars(frames)["set_eval_frame"]
        patches.put(frames, "set_eval_frame", lambda callback: switch(None))
