"""Patches of Triton's interpreter for the tests: a fix for NumPy 2.5, masks as strict as in the newest release, and
changes that save half of its time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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


def refuse_numbers_as_masks() -> None:
    """Make loads and stores raise if a mask is of numbers, as Triton 3.9 does and earlier releases do not.

    In all releases ``vector & scalar`` is one, of two results of comparisons: see ``toolkit/numeric.py``.
    """
    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(builder, name, _with_bool_mask(getattr(builder, name), place))


def _with_bool_mask(access: Any, place: int) -> Any:
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        dtype = arguments[place].data.dtype
        assert dtype.kind == "b", f"a mask must be of booleans, got {dtype}"
        return access(self, *arguments, **named)

    return checked


def patch_once_per_launch() -> None:
    """Patch Triton's language once per launch, instead of again for every function that a kernel calls.

    Triton 3.7 searches the whole language each time, although it is already patched.
    """
    if not triton.__version__.startswith("3.7."):
        return
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = {id(interpreter.tl), id(interpreter.tl.core)}
    patched: set[int] = set()  # modules already patched in the running launch

    @functools.cache
    def language_of(function):
        return language & {id(value) for value in function.__globals__.values()}

    def patch_once(function):
        seen = language_of(function)
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


def leave_out_what_has_no_effect() -> None:
    """Leave out the search for overflows, which reports nothing without debugging, and keep NumPy's types in a cache.

    For every integer addition, subtraction and product that search computes the result again in 64 bits.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    of_pointers = interpreter._get_np_dtype(triton.language.pointer_type(triton.language.int8))
    of_numbers = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: of_pointers if dtype.scalar.is_ptr() else of_numbers(dtype.scalar)


def make_shapes_once() -> None:
    """Make every shape once, instead of anew for each tensor and each type of a block, and compare shapes by identity.

    In Triton 3.7 a shape is a tuple of constants that has a type with the types of the constants. Making shapes and
    comparing them took half of the interpreter's time.
    """
    if not triton.__version__.startswith("3.7."):
        return
    core, semantic = triton.language.core, triton.language.semantic.TritonSemantic
    make_block, make_tensor, broadcast = core.block_type.__init__, core.tensor.__init__, semantic.broadcast_impl_value
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[Any, tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = vars(shape).get("numbers") if isinstance(shape, core.tuple) else None
        if numbers is None:
            numbers = tuple(map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape)))
        known = blocks.get((element_ty.name, numbers))
        if known is None:
            make_block(self, element_ty, shape)
            self.numbers = self.shape.numbers = numbers
            known = blocks[element_ty.name, numbers] = vars(self).copy()
        vars(self).update(known)
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        numbers = type.numbers if type.is_block() else ()
        known = tensors.get(numbers)
        if known is None:
            make_tensor(self, handle, type)
            self.shape.numbers = numbers
            known = tensors[numbers] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def equal_blocks(self: Any, other: Any) -> bool:
        return isinstance(other, core.block_type) and (self.numbers, self.element_ty) == (
            other.numbers,
            other.element_ty,
        )

    def equal_types(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = core._unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    def broadcast_together(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    core.block_type.__eq__, core.dtype.__eq__ = equal_blocks, equal_types
    semantic.broadcast_impl_value = broadcast_together
