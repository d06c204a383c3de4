"""Changes of the tests to Triton's interpreter: a mend, and one that saves a fifth of its time."""

from __future__ import annotations

import triton
from triton.runtime import interpreter


def mend() -> None:
    """Let ``range(number)`` run with NumPy 2.5, whose ``int()`` refuses the array of one number that Triton 3.6 makes.

    Triton 3.7 does the same. Kernels that are compiled are not concerned.
    """
    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_mend


def patch_once_per_launch() -> None:
    """Patch Triton's language once for a launch, and not again for every function that a kernel calls.

    Triton 3.7 looks through the whole language each time, and finds it patched.
    """
    if not triton.__version__.startswith("3.7."):
        return
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = {id(interpreter.tl), id(interpreter.tl.core)}
    patched: set[int] = set()  # which of these are, in the launch that runs

    def patch_once(function):
        seen = language & {id(value) for value in function.__globals__.values()}
        if seen and seen <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen)
        return patch(function)

    def run_patched(executor, *args, **kwargs):
        patched.clear()
        try:
            return run(executor, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_patched
