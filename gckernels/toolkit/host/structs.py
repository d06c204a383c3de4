"""C structures generated from ``ctypes`` ones, so that the fields of a host program's arguments are listed once.

A ``ctypes.Structure`` in Python is the source; :func:`c_structs` returns its ``typedef``, which ``host.py`` puts in
front of the C text. The compiler checks size and offsets, so a layout that ``ctypes`` and C see differently does not
compile. Example::

    class Call(ctypes.Structure):
        _fields_ = (("source", pointer(const=True)), ("sums", pointer(ctypes.c_float)), ("numel", ctypes.c_int64))

    c_structs(call_t=Call)

    typedef struct {
        const void *source;
        float *sums;
        int64_t numel;
    } call_t;
    _Static_assert(sizeof(call_t) == 24, "call_t: size");
    _Static_assert(offsetof(call_t, source) == 0, "call_t: source");
    ...
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

_C_NAMES: dict[Any, str] = {
    None: "void",
    ctypes.c_uint8: "uint8_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}


class _Pointer(ctypes.c_void_p):
    """An address, set from an integer (``data_ptr()``) or ``None``, and what is there."""

    to: ClassVar[type | None]
    const: ClassVar[bool]


@functools.cache
def pointer(to: type | None = None, const: bool = False) -> type[ctypes.c_void_p]:
    """The type of a field that is a pointer in C and is set from an integer or ``None``.

    Args:
        to: type of the elements: a number of ``ctypes``, a structure, or ``None`` for ``void``.
        const: whether the program only reads them.
    """
    return type("pointer", (_Pointer,), {"to": to, "const": const})


def c_structs(**structures: type[ctypes.Structure]) -> str:
    """The ``typedef`` of each structure under its name, with assertions about its size and its fields' offsets.

    The fields of base classes come first. A structure that is a field of another one, or pointed to, is named before
    it.

    Raises:
        TypeError: a field has a type without a C name.
    """
    names: dict[Any, str] = dict(_C_NAMES)
    texts = []
    for name, structure in structures.items():
        texts.append(_typedef(name, structure, names))
        names[structure] = name
    return "\n".join(texts) + "\n"


def _typedef(name: str, structure: type[ctypes.Structure], names: Mapping[Any, str]) -> str:
    members, offsets = [], []
    for field, kind, alignment in _fields(structure):
        try:
            members.append(f"    {alignment}{_declared(field, kind, names)};")
        except KeyError as error:
            raise TypeError(f"{structure.__name__}.{field}: {error.args[0]} has no C name") from None
        offset = getattr(structure, field).offset
        offsets.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}: {field}");')
    size = f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}: size");'
    return "\n".join(["typedef struct {", *members, f"}} {name};", size, *offsets])


def _fields(structure: type[ctypes.Structure]) -> Iterator[tuple[str, Any, str]]:
    """``(name, type, alignment in C)`` of all fields, those of base classes first."""
    alignment = ""
    for each in reversed(structure.__mro__):
        for field, kind in vars(each).get("_fields_", ()):
            yield field, kind, alignment
            alignment = ""
        if "_fields_" in vars(each):  # ctypes pads a base class to its alignment before the fields of a subclass
            alignment = f"_Alignas({ctypes.alignment(each)}) "


def _declared(name: str, kind: Any, names: Mapping[Any, str]) -> str:
    """The declaration of ``name`` in C.

    Raises:
        KeyError: a type has no C name.
    """
    if issubclass(kind, ctypes.Array):
        return _declared(f"{name}[{kind._length_}]", kind._type_, names)
    if issubclass(kind, _Pointer):
        return f"{'const ' if kind.const else ''}{names[kind.to]} *{name}"
    return f"{names[kind]} {name}"
