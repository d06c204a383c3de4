"""Fresh builds of the host path, and a compiler that counts its calls; a plugin of pytest, for its fixtures."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from gckernels.ops.chunktopk import host as chunktopk_host
from gckernels.ops.powersgd import host as powersgd_host
from gckernels.ops.randomk import host as randomk_host
from gckernels.patches.format import host as patches_host
from gckernels.toolkit.cast import host as cast_host
from gckernels.toolkit.host import cache as program_cache
from gckernels.toolkit.host import compilers, library
from gckernels.toolkit.quantizer import host as quantizer_host
from gckernels.toolkit.sparsifier import host as sparsifier_host

BUILDS = (
    *(quantizer_host.build, cast_host.build, chunktopk_host.build, sparsifier_host.build),
    *(powersgd_host.build, randomk_host.build, patches_host.build),
)
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


PROCESSORS = {"x86_64": ("x86-64", "x86-64-v2", "x86-64-v3")}
"""Names of older processors by kind of machine: the oldest of all, the last one without a fused multiplication and
addition, and the first one with it."""
OLDER = pytest.mark.parametrize(
    "processor",
    [
        pytest.param(each, marks=[pytest.mark.slow] if i else [])
        for i, each in enumerate(PROCESSORS.get(platform.machine(), ()))
    ],
)


@contextlib.contextmanager
def compiled_for(processor: str) -> Iterator[None]:
    """Programs are compiled for a processor that may be older than this one."""
    if compilers.compiler() is None:
        pytest.skip("there is no C compiler")
    anew()
    try:
        with mock.patch.object(compilers, "TUNINGS", ((f"-march={processor}",),)):
            yield
    finally:
        anew()


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


def check_answer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer() == 42
