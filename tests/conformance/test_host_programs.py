"""The C of the host path compiles without warnings and runs without undefined behaviour."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gckernels.ops import QSGD, ChunkTopK, OneBit
from gckernels.ops.chunktopk import host as chunktopk_host
from gckernels.ops.powersgd import host as powersgd_host
from gckernels.ops.randomk import host as randomk_host
from gckernels.patches.format import host as patches_host
from gckernels.patches.format.kinds import BF16, BYTES, KINDS
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.toolkit.cast import host as cast_host
from gckernels.toolkit.host import compilers
from gckernels.toolkit.quantizer import MapQuantizer
from gckernels.toolkit.quantizer import host as quantizer_host
from gckernels.toolkit.sparsifier import host as sparsifier_host

SLOW = pytest.mark.slow
WARNINGS = ("-Wall", "-Wextra", "-Werror")
ABOUT_OPTIONS = {"clang": ("-Wno-unknown-warning-option", "-Wno-overriding-t-option", "-Wno-overriding-option")}
"""Disables a warning about the options rather than the program: clang warns if one option resets a part of another."""
SUITE = (
    *("test_equivalence.py", "test_feedback.py", "test_merging.py", "test_robustness.py", "test_batches.py"),
    *("../ops/test_powersgd_ops.py", "../ops/test_powersgd_bases.py", "../patches/test_patch_codes.py"),
)


@pytest.fixture(scope="module", params=["gcc", "clang"])
def named(request) -> str:
    """The name of a compiler that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return request.param


def sources() -> Iterator[str]:
    """The source of every program of the tested configurations."""
    for compressor in CONFIGURATIONS.values():
        if isinstance(compressor, MapQuantizer):
            for merging in (False, True):
                yield quantizer_host.program(compressor, merging)
        if isinstance(compressor, ChunkTopK):
            yield chunktopk_host.program(compressor)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield cast_host.program(dtype)
    for module in (powersgd_host, randomk_host, sparsifier_host):
        yield module.program()
    for kind in KINDS:
        yield patches_host.program(kind)


@pytest.mark.parametrize(
    "processor",
    ["native", "x86-64", "sapphirerapids", *(pytest.param(each, marks=SLOW) for each in ("haswell", "skylake-avx512"))],
)
def test_a_program_of_each_family_has_no_warnings(named, processor, tmp_path):
    """Only the warnings that need no optimiser are checked, to be quick; the next test checks all.

    The last processor computes in fp16.
    """
    if subprocess.run(
        [named, f"-march={processor}", "-fsyntax-only", "-xc", os.devnull], capture_output=True
    ).returncode:
        pytest.skip(f"{named} does not know -march={processor}")
    programs = (
        *(quantizer_host.program(OneBit(), False), quantizer_host.program(QSGD(), True)),
        *(chunktopk_host.program(ChunkTopK()), cast_host.program(torch.bfloat16)),
        *(powersgd_host.program(), randomk_host.program(), sparsifier_host.program()),
        *(patches_host.program(BF16), patches_host.program(BYTES)),
    )
    for source in programs:
        (tmp_path / "host.c").write_text(source)
        command = [named, "-std=gnu11", f"-march={processor}", "-fsyntax-only", *WARNINGS, "host.c"]
        output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processor", ["native", "x86-64"])
def test_programs_compile_without_a_warning(named, processor, tmp_path):
    """Programs are compiled for this processor, and without the intrinsics of newer processors.

    All of gcc's passes are enabled: it needs the disabled ones to see which variables are initialised.
    """
    tuning = [*compilers.TUNINGS[1], f"-march={processor}"]
    options = [*compilers.FLAGS, *tuning, *WARNINGS, *ABOUT_OPTIONS.get(named, ())]
    if subprocess.run([named, *options, "-xc", os.devnull, "-o", tmp_path / "empty"]).returncode:
        pytest.skip(f"{named} does not know -march={processor}")
    for source in dict.fromkeys(sources()):
        (tmp_path / "host.c").write_text(source)
        command = [named, *options, "host.c", "-o", "host.so", "-lm"]
        output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr


@SLOW
@pytest.mark.timeout(1800)
def test_the_suite_finds_nothing_in_a_sanitised_host_path(named, tmp_path):
    """AddressSanitizer sees torch's allocations as well, because its runtime is loaded before everything else."""
    name = {"gcc": "libasan.so", "clang": f"libclang_rt.asan-{os.uname().machine}.so"}[named]
    runtime = subprocess.run([named, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{named} has no {name}")
    # the compiler itself needs no sanitiser, which would slow it down
    command = ["env", "-u", "LD_PRELOAD", named, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1"]
    environment = os.environ | {
        "CC": shlex.join(command),
        "GCKERNELS_CACHE": str(tmp_path / "cache"),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path / 'found'}",  # Python keeps some memory until it ends
        "OMP_NUM_THREADS": "1",
    }
    files = [str(Path(__file__).parent / name) for name in SUITE]
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "host", "-m", "not slow and not gpu"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *files], env=environment, capture_output=True, text=True
    )
    found = "\n".join(path.read_text() for path in tmp_path.glob("found*"))
    assert ran.returncode == 0 and not found, f"{found}\n{ran.stdout[-4000:]}\n{ran.stderr[-2000:]}"
    assert list((tmp_path / "cache").glob("*.so")), "the host path itself has run"
