"""The host path is compiled where it runs: tests of the cache of libraries, and of failures to compile."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gckernels
from gckernels.ops.chunktopk import host as chunktopk_host
from gckernels.toolkit.cast import host as cast_host
from gckernels.toolkit.host import cache as program_cache
from gckernels.toolkit.host import compilers, library
from gckernels.toolkit.quantizer import MapQuantizer, Maps
from gckernels.toolkit.quantizer import host as quantizer_host
from gckernels.toolkit.quantizer.statistics import MEAN_MAGNITUDE
from gckernels.toolkit.sparsifier import host as sparsifier_host
from helpers import HOST, REFERENCE, assert_equal, decode, encode
from workloads import thinned

COMPRESSORS = (
    *(gckernels.EFSignSGD(), gckernels.BlockQuant(bits=4), gckernels.Cast16()),
    *(gckernels.ChunkTopK(), gckernels.TopK()),
)
BUILDS = (quantizer_host.build, cast_host.build, chunktopk_host.build, sparsifier_host.build)
CACHES = (library.library, compilers.compiler, library.warn_once, program_cache._warn_once, *BUILDS)


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """Empty the caches as in a new process, before and after the test."""
    monkeypatch.setenv("GCKERNELS_CACHE", str(tmp_path / "cache"))
    for each in CACHES:
        each.cache_clear()
    yield monkeypatch
    for each in CACHES:
        each.cache_clear()


def check(compressor: gckernels.Compressor, numel: int = 3000) -> None:
    """Assert that encode, decode and recode equal the reference."""
    grad, residual = torch.randn(numel), torch.randn(numel)
    got, kept = encode(HOST, compressor, grad, residual, chunks=2)
    want, left = encode(REFERENCE, compressor, grad, residual, chunks=2)
    if "sum" not in getattr(getattr(getattr(compressor, "maps", None), "statistic", None), "kinds", ()):
        assert torch.equal(got, want)
        assert_equal(kept, left)
    assert_equal(decode(HOST, compressor, got, grad), decode(REFERENCE, compressor, got, grad))


def reasons(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught]


# -------------------------------------------------------------------- functions without a C form


@dataclass(frozen=True)
class WithoutForm(MapQuantizer):
    """A quantiser without kernels, whose code comes from a function that has no C form."""

    bits: ClassVar[int] = 1
    block: int | None = 128
    maps = Maps(
        quantize=lambda values, stats, u, C: torch.exp(values) >= 1,
        dequantize=lambda codes, stats, C: torch.where(codes == 1, stats[0], -stats[0]),
        statistic=MEAN_MAGNITUDE,
    )


def _branching(values, stats, u, C):
    return values >= 0 if values.numel() > 0 and bool((values > 0).any()) else values > 0


@dataclass(frozen=True)
class Branching(WithoutForm):
    """A quantiser whose code branches in Python, depending on the values."""

    maps = Maps(
        quantize=_branching,
        dequantize=WithoutForm.maps.dequantize,
        statistic=MEAN_MAGNITUDE,
    )


@dataclass(frozen=True)
class OddBlocks(WithoutForm):
    """A quantiser whose blocks do not fill the host path's tiles."""

    block: int | None = 96
    maps = gckernels.EFSignSGD.maps


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [(WithoutForm(), "WithoutForm .*: exp"), (Branching(), "Branching"), (OddBlocks(), "OddBlocks .*block")],
    ids=["no form", "control flow", "odd blocks"],
)
def test_a_quantiser_that_cannot_be_lowered_works_all_the_same(afresh, quantizer, reason):
    with pytest.warns(UserWarning, match=f"20 to 150 times slower, because {reason}") as caught:
        check(quantizer)
        check(quantizer)
    assert len(caught) == 1


# -------------------------------------------------------------------- missing and failing compilers


def test_without_a_compiler_everything_works_with_one_warning(afresh, tmp_path):
    afresh.setenv("PATH", str(tmp_path))
    afresh.delenv("CC", raising=False)
    afresh.setattr(compilers, "_packaged", list)
    with pytest.warns(UserWarning, match="there is no C compiler") as caught:
        for compressor in COMPRESSORS:
            check(compressor)
    assert len(caught) == 1, reasons(caught)


@pytest.mark.parametrize("command", ["false", "sh -c 'echo no licence >&2; exit 3'"])
def test_a_compiler_that_fails_is_named_once(afresh, command):
    afresh.setenv("CC", command)
    with pytest.warns(UserWarning, match="the C compiler fails") as caught:
        for compressor in COMPRESSORS:
            check(compressor)
    assert len(caught) == 1, reasons(caught)
    assert ("no licence" if "licence" in command else "exit status 1") in reasons(caught)[0]


def test_what_the_compiler_does_not_accept_is_reported(afresh, compiler):
    with pytest.warns(UserWarning, match="(?s)the C compiler fails: .*nonsense"):
        assert library.library("nonsense") is None


# -------------------------------------------------------------------- the variable CC

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


# -------------------------------------------------------------------- the cache


@pytest.fixture
def compiler(tmp_path_factory):
    """A wrapper of this machine's compiler that counts its calls: ``(command, log)``, with one line per call in the
    log."""
    real = compilers.compiler.__wrapped__()
    if real is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("compiler")
    wrapper, log = folder / "counted", folder / "log"
    wrapper.write_text(f'#!/bin/sh\necho call >> "{log}"\nexec {" ".join(real)} "$@"\n')
    wrapper.chmod(0o700)
    log.touch()
    return str(wrapper), log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines())


ANSWER = "int answer(void) { return 42; }"


def answer(source: str = ANSWER) -> int:
    built = library.library(source)
    assert built is not None
    return built.answer()


def anew() -> None:
    for each in CACHES:
        each.cache_clear()


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """A forked child process that runs ``work``."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def stop(child: multiprocessing.process.BaseProcess, code: int = 0) -> None:
    child.join(60)
    assert child.exitcode == code


def check_answer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer() == 42


def test_processes_that_start_together_compile_once(afresh, compiler, tmp_path):
    command, log = compiler
    afresh.setenv("CC", command)
    for child in [forked(check_answer) for _ in range(8)]:
        stop(child)
    check_answer()
    assert calls(log) == 1
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".so"], "nothing else is left behind"


def hold_lock(held: Any) -> None:
    """Hold for ever the lock of a process that compiles ``ANSWER``."""
    afterwards = library.compile_library

    def never(*_):
        held.set()
        time.sleep(1000)
        return afterwards(*_)

    library.compile_library = never
    answer()


@pytest.fixture
def holder(afresh, compiler):
    """A process in the middle of compiling: ``(process, log of the compiler)``."""
    afresh.setenv("CC", compiler[0])
    held = multiprocessing.get_context("fork").Event()
    child = forked(lambda: hold_lock(held))
    assert held.wait(60)
    yield child, compiler[1]
    child.kill()
    child.join()


def test_a_process_that_died_while_it_compiled_holds_nobody_up(holder, afresh):
    child, log = holder
    afresh.setattr(program_cache, "WAIT_S", 1e9)
    child.kill()
    child.join()
    check_answer()
    assert calls(log) == 1


def test_the_wait_for_another_process_is_bounded(holder, afresh):
    _, log = holder
    afresh.setattr(program_cache, "WAIT_S", 0.1)
    check_answer()
    assert calls(log) == 1


def test_a_file_system_without_locks_does(afresh, compiler):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    afresh.setattr(fcntl, "flock", refuse)
    check_answer()


def test_what_is_kept_is_found_whatever_the_umask(afresh, compiler, tmp_path):
    afresh.setenv("CC", compiler[0])
    before = os.umask(0)
    try:
        check_answer()
    finally:
        os.umask(before)
    (kept,) = (tmp_path / "cache").glob("*.so")
    assert kept.stat().st_mode & 0o777 == 0o600
    anew()
    check_answer()
    assert calls(compiler[1]) == 1


def test_a_library_that_others_could_write_to_is_built_anew(afresh, compiler, tmp_path):
    afresh.setenv("CC", compiler[0])
    check_answer()
    (kept,) = (tmp_path / "cache").glob("*.so")
    kept.chmod(0o666)
    anew()
    check_answer()
    assert calls(compiler[1]) == 2


@pytest.mark.parametrize("when", ["find", "keep", "load"])
def test_nobody_can_put_another_folder_in_the_place_of_the_checked_one(afresh, compiler, tmp_path, when):
    """A user who can write to a folder above the cache can rename the cache."""
    open_to_all, ran = tmp_path / "open", tmp_path / "ran"
    cache, planted = open_to_all / "cache", tmp_path / "planted"
    planted.mkdir()
    command, wrong = compilers.compiler(), f'__attribute__((constructor)) void f(void) {{ fopen("{ran}", "w"); }}'
    evil = compilers.compile_library(command, "#include <stdio.h>\n" + wrong, planted).read_bytes()
    real = getattr(program_cache.ProgramCache, when)

    def swap(kept, *arguments):
        if not (tmp_path / "old").exists():
            cache.rename(tmp_path / "old")
            cache.mkdir()
            names = [each.name for each in (tmp_path / "old").iterdir()]
            key = program_cache.digest("\0".join((ANSWER, *compilers.dependencies(command))).encode())
            for name in (*names, f"{key}-{program_cache.digest(evil)}.so"):
                if name.endswith(".scratch"):
                    (cache / name).mkdir()
                    name += "/host.so"
                (cache / name).write_bytes(evil)
        return real(kept, *arguments)

    afresh.setattr(program_cache.ProgramCache, when, swap)
    afresh.setenv("GCKERNELS_CACHE", str(cache))
    check_answer()
    assert (tmp_path / "old").exists()
    assert not ran.exists()


def test_the_cache_folder_is_the_users_alone(afresh, compiler, tmp_path):
    assert answer() == 42
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_default_folder_is_in_the_users_cache(afresh, compiler, tmp_path):
    afresh.delenv("GCKERNELS_CACHE")
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert answer() == 42
    assert list((tmp_path / "xdg" / "gckernels").glob("*.so"))
    anew()
    afresh.delenv("XDG_CACHE_HOME")
    afresh.setenv("HOME", str(tmp_path / "home"))
    assert answer() == 42
    assert list((tmp_path / "home" / ".cache" / "gckernels").glob("*.so"))


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "not a library", "cut short"])
def test_a_damaged_library_is_built_anew(afresh, compiler, tmp_path, damage):
    command, log = compiler
    afresh.setenv("CC", command)
    assert answer() == 42
    (kept,) = (tmp_path / "cache").glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # the library loaded in this process remains as it is
    kept.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    for _ in range(2):  # the second time, the rebuilt library is loaded
        anew()
        assert answer() == 42
        assert calls(log) == 2
    assert kept.read_bytes() == whole


def _read_only(folder: Path) -> None:
    folder.mkdir(mode=0o500)


def _shared(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("make", [_read_only, _shared, _a_file])
def test_a_folder_that_cannot_be_trusted_or_used_is_left_alone(afresh, compiler, tmp_path, make):
    compilers.compiler()
    if make is _read_only and os.geteuid() == 0:  # root can write everywhere
        afresh.setattr(os, "access", lambda *_, **__: False)
    folder = tmp_path / "elsewhere"
    make(folder)
    afresh.setenv("GCKERNELS_CACHE", str(folder))
    afresh.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="every process compiles the CPU path anew .*elsewhere"):
        assert answer() == 42
    assert [each.name for each in tmp_path.iterdir()] == ["elsewhere"], "and no folder of its own is left behind"
    assert folder.is_file() or not list(folder.iterdir())


def test_a_foreign_folder_is_left_alone(afresh, compiler, tmp_path):
    afresh.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.warns(UserWarning, match="others can write to"):
        assert answer() == 42


def test_a_full_disk_is_reported(afresh, compiler):
    def full(*_):
        raise OSError(28, "No space left on device")

    afresh.setattr(library, "compile_library", full)
    with pytest.warns(UserWarning, match="cannot be kept or loaded: No space left on device"):
        assert library.library(ANSWER) is None


def test_other_compilers_and_processors_have_libraries_of_their_own(afresh, compiler, tmp_path):
    """A home directory may be shared between machines."""
    assert answer() == 42
    anew()
    afresh.setenv("CC", compiler[0])
    assert answer() == 42
    anew()
    afresh.setattr(compilers, "_processor", lambda: "another one")
    assert answer() == 42
    assert len(list((tmp_path / "cache").glob("*.so"))) == 3


# -------------------------------------------------------------------- 16-bit numbers

CONVERSIONS = """
void load_all(const void *from, int32_t dtype, int64_t n, float *to) { load(from, dtype, 0, (int)n, to); }
void store_all(void *to, int32_t dtype, int64_t n, const float *from) { store(to, dtype, 0, (int)n, from); }
"""


@pytest.mark.parametrize("prefix", ["", "#undef __FLT16_MAX__\n"], ids=["as it is", "without _Float16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_converted_as_torch_does(dtype, prefix):
    """Tested are all 16-bit numbers, and the fp32 numbers at, below and above them and around their midpoints."""
    built = library.library(prefix + library.COMMON + CONVERSIONS)
    if built is None:
        pytest.skip("there is no C compiler")
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    loaded = torch.empty(2**16)
    count, code = ctypes.c_int64(2**16), ctypes.c_int32(library.DTYPES[dtype])
    built.load_all(ctypes.c_void_p(every.data_ptr()), code, count, ctypes.c_void_p(loaded.data_ptr()))
    assert_equal(loaded, every.float())
    half = 1 << (15 if dtype == torch.bfloat16 else 12)
    for offset in (-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1):
        values = (every.float().view(torch.int32) + offset).view(torch.float32)
        stored = torch.empty(2**16, dtype=dtype)
        built.store_all(ctypes.c_void_p(stored.data_ptr()), code, count, ctypes.c_void_p(values.data_ptr()))
        assert_equal(stored, values.to(dtype))
        same = stored.view(torch.int16) == values.to(dtype).view(torch.int16)
        assert (same | values.isnan()).all(), "zeros have the same sign"


def test_views_at_odd_elements_and_payloads_at_any_sixteen_bytes():
    """The C code accepts all of torch's tensors, which may be aligned to a single element."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for compressor in COMPRESSORS:
            memory, kept, out = torch.randn(3001).to(dtype), torch.randn(3003), torch.zeros(3001, dtype=dtype)
            nbytes = compressor.payload_nbytes(3000)
            buffer = torch.zeros(nbytes + 64, dtype=torch.uint8)
            payload = buffer[16 : 16 + nbytes]
            want_payload, want_kept = encode(HOST, compressor, memory[1:].clone(), kept[3:].clone())
            compressor.encode(memory[1:], kept[3:], payload)
            assert torch.equal(payload, want_payload[0])
            assert_equal(kept[3:], want_kept)
            compressor.decode(payload, out[1:])
            assert_equal(out[1:], decode(HOST, compressor, want_payload, torch.zeros(3000, dtype=dtype)))
