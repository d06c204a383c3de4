"""C compilers that the host path finds or is given: options that would change results, and commands that are none."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import pytest

from gckernels.toolkit.host import compilers, library
from host_builds import anew, answer, calls, check_answer
from workloads import thinned

ARITHMETIC = """
float sum(const float *x, int n) { float total = 0; for (int i = 0; i < n; i++) total += x[i]; return total; }
float product_sum(float a, float b, float c) { return a * b + c; }
float thirds(const float *x, float by) { return x[0] / by + x[1] / by + x[2] / by; }
int special(float x) { return (x != x) + 2 * (x - x == 0) + 4 * (1 / (x + 0.0f) > 0) + 8 * (fabsf(x) < INFINITY); }
double root(double x) { return sqrt(x) * 0.1; }
"""
ALLOWANCES = (
    *("-ffast-math", "-Ofast", "-Ofast -ffast-math", "-funsafe-math-optimizations", "-ffp-contract=fast"),
    *("-ffinite-math-only", "-fno-signed-zeros -freciprocal-math", "-fassociative-math -O1", "-fvisibility=hidden"),
)
"""Options that permit optimisations which C does not, and which would change results."""


@pytest.fixture(params=["gcc", "clang"])
def named(request):
    """The name of a compiler that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return request.param


@pytest.mark.parametrize("options", thinned([(each,) for each in ALLOWANCES], 2))
def test_options_that_would_change_results_are_overruled(named, tmp_path, options):
    """The library stays the same byte for byte, in its code and in the code that runs when it is loaded."""
    source = library.COMMON + ARITHMETIC
    plain = compilers.compile_library((named,), source, tmp_path).read_bytes()
    assert compilers.compile_library((named, *options.split()), source, tmp_path).read_bytes() == plain


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("-mfpmath=387", "rounded to their own type"),
        ("-fsingle-precision-constant", "of their own type"),
        ("-fpack-struct", "their usual layout"),
    ],
)
def test_what_cannot_be_overruled_is_refused(afresh, option, reason):
    command = f"gcc {option}"
    if subprocess.run([*command.split(), "-E", "-xc", os.devnull], capture_output=True).returncode:
        pytest.skip(f"there is no {command}")
    afresh.setenv("CC", command)
    with pytest.warns(UserWarning, match=f"(?s)the C compiler fails: .*{reason}"):
        assert library.library(library.COMMON) is None


@pytest.mark.parametrize(
    ("command", "reason"),
    [("gcc '", "No closing quotation"), ("no-such-compiler -O1", "there is no command 'no-such-compiler'")],
)
def test_a_command_that_is_none_is_left_alone(afresh, compiler, command, reason):
    compilers.compiler.cache_clear()
    afresh.setenv("CC", command)
    with pytest.warns(UserWarning, match=f"is not used to compile the CPU path: {reason}"):
        assert answer() == 42


def test_gcc_and_clang_make_libraries(afresh, named):
    afresh.setenv("CC", named)
    assert answer() == 42


@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ("", compilers.TUNINGS[0]),
        ("-mprefer*", ("-march=native", *compilers._FOR_GCC)),  # gcc on other machines than x86
        ("-fno-tree-pre", ("-march=native", "-mprefer-vector-width=512")),  # another compiler
        ("-m*", ()),
    ],
)
def test_the_best_options_are_those_that_a_compiler_knows(compiler, tmp_path, refused, left):
    script, log = tmp_path / "picky", tmp_path / "options"
    refuse = f'for each; do case "$each" in {refused}) exit 1;; esac; done\n' if refused else ""
    script.write_text(f'#!/bin/sh\n{refuse}echo "$@" > "{log}"\nexec "{compiler[0]}" "$@"\n')
    script.chmod(0o700)
    compilers.compile_library((str(script),), "int answer(void) { return 42; }", tmp_path)
    given = log.read_text().split()
    assert given[len(compilers.FLAGS) : given.index("host.c")] == list(left)


def test_the_packaged_compiler_is_found_where_there_is_no_other(afresh, compiler, tmp_path):
    """The package ``ziglang`` has a command beside its module; the one here calls this machine's compiler."""
    package, path = tmp_path / "packages" / "ziglang", os.environ["PATH"]
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    command = f'[ "$1" = cc ] && shift && PATH="{path}" exec "{compiler[0]}" "$@"'
    (package / "zig").write_text(f"#!/bin/sh\n{command}\n")
    (package / "zig").chmod(0o700)
    afresh.syspath_prepend(package.parent)
    afresh.delenv("CC", raising=False)
    assert compilers.compiler()[0] != str(package / "zig")
    anew()
    afresh.setenv("PATH", "/nonexistent")
    assert compilers.compiler() == (str(package / "zig"), "cc")
    check_answer()
    assert calls(compiler[1]) == 1


def test_ziglang_makes_libraries(afresh):
    command = compilers._packaged()
    if not command:
        pytest.skip("the extra [compiler] is not installed")
    afresh.setenv("CC", shlex.join(command))
    assert answer() == 42
