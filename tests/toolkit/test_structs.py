"""C structures are generated from Python ones: C reads every field where Python has put it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

import gckernels
from gckernels.toolkit.host import compilers, library
from gckernels.toolkit.host.structs import c_structs, pointer


class Inner(ctypes.Structure):
    _fields_ = (("flag", ctypes.c_uint8), ("weight", ctypes.c_double), ("odd", ctypes.c_int32))


class Base(ctypes.Structure):
    _fields_ = (("source", pointer(ctypes.c_float, const=True)), ("small", ctypes.c_uint8))


class Outer(Base):
    """A structure with every kind of field. The padding of ``Base`` is kept, and the first field after it is narrow."""

    _fields_ = (
        ("code", ctypes.c_uint8),
        ("inner", Inner),
        ("inners", pointer(Inner)),
        ("grid", ctypes.c_int32 * 3 * 2),
        ("seed", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("anything", pointer()),
    )


READ = """
void read_outer(const outer_t *o, double *to) {
    double found[] = {
        o->source[1], o->small, o->code, o->inner.flag, o->inner.weight, o->inner.odd, o->inners[1].weight,
        o->grid[0][0], o->grid[1][2], (double)o->seed, o->scale, o->anything == 0,
    };
    memcpy(to, found, sizeof found);
}
"""


def outer() -> str:
    return c_structs(inner_t=Inner, outer_t=Outer)


@pytest.fixture
def command():
    found = compilers.compiler()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def test_fields_are_read_where_they_were_written(command, tmp_path):
    source = library.COMMON + outer() + READ
    built = ctypes.CDLL(str(compilers.compile_library((*command, "-Wall", "-Wextra", "-Werror"), source, tmp_path)))
    values, inners = torch.tensor([1.0, 2.0]), (Inner * 2)(Inner(), Inner(weight=6.0))
    grid = (ctypes.c_int32 * 3 * 2)((7, 0, 0), (0, 0, 8))
    argument = Outer(
        *(values.data_ptr(), 3, 4, Inner(5, 0.5, -5), ctypes.addressof(inners), grid, 9, 10.0, None),
    )
    found = torch.empty(12, dtype=torch.float64)
    built.read_outer(ctypes.byref(argument), ctypes.c_void_p(found.data_ptr()))
    assert found.tolist() == [2, 3, 4, 5, 0.5, -5, 6, 7, 8, 9, 10, 1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    uint64_t seed;\n    float scale;\n", "    float scale;\n    uint64_t seed;\n"),
        ("    float scale;\n    void *anything;\n", "    void *anything;\n    float scale;\n"),
        ("    float scale;\n", ""),
        ("    int32_t grid[2][3];\n", "    int64_t grid[2][3];\n"),
        ("    _Alignas(8) uint8_t code;\n", "    uint8_t code;\n"),
        ("    double weight;\n    int32_t odd;\n", "    int32_t odd;\n    double weight;\n"),
    ],
)
def test_a_layout_that_differs_does_not_compile(command, tmp_path, before, after):
    text = outer()
    assert text.count(before) == 1, text
    with pytest.raises(compilers.CompilerFailed, match=r"(?i)static assertion|static_assert"):
        compilers.compile_library(command, library.COMMON + text.replace(before, after), tmp_path)


def test_types_without_a_name_are_refused():
    class Flags(ctypes.Structure):
        _fields_ = (("wide", ctypes.c_longdouble),)

    class Call(ctypes.Structure):
        _fields_ = (("inner", pointer(Inner)),)

    with pytest.raises(TypeError, match=r"Flags\.wide: .*longdouble.* has no C name"):
        c_structs(flags_t=Flags)
    with pytest.raises(TypeError, match=r"Call\.inner: .*Inner.* has no C name"):
        c_structs(call_t=Call, inner_t=Inner)


@pytest.mark.parametrize(
    "path", sorted(Path(gckernels.__file__).parent.rglob("*.c")), ids=lambda path: path.parent.name
)
def test_no_program_declares_what_python_fills(path):
    """The structures declared in the C texts are used by C alone."""
    assert not re.findall(r"\} (?:call|batch|matrix)_t;", path.read_text())
