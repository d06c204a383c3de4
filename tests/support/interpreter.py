"""Patches of Triton's interpreter for the tests: a fix for NumPy 2.5, and a change that saves a fifth of its time."""

from __future__ import annotations

import triton
from triton.runtime import interpreter


def fix_numpy_indexing() -> None:
    """Make ``range(number)`` work with Triton 3.6 and NumPy 2.5, whose ``int()`` refuses arrays with one element.

    Triton 3.7 has the same fix. Compiled kernels are not affected.
    """
    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_with_index


def patch_once_per_launch() -> None:
    """Patch Triton's language once per launch, instead of again for every function that a kernel calls.

    Triton 3.7 searches the whole language each time, although it is already patched.
    """
    if not triton.__version__.startswith("3.7."):
        return
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = {id(interpreter.tl), id(interpreter.tl.core)}
    patched: set[int] = set()  # modules already patched in the running launch

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
