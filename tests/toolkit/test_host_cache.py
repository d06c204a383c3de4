"""The cache of compiled libraries: processes that start together, damage, and folders that others can write to."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gckernels.toolkit.host import cache as program_cache
from gckernels.toolkit.host import compilers, library
from host_builds import ANSWER, anew, answer, calls, check_answer


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """A forked child process that runs ``work``."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def stop(child: multiprocessing.process.BaseProcess, code: int = 0) -> None:
    child.join(60)
    assert child.exitcode == code


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


def test_a_library_that_cannot_be_loaded_is_built_anew(afresh, compiler, tmp_path):
    """It may come from a machine with other system libraries: here it needs one that does not exist any more."""
    command, log = compiler
    afresh.setenv("CC", command)
    assert answer() == 42
    (kept,) = (tmp_path / "cache").glob("*.so")
    subprocess.run([command, "-shared", "-xc", "/dev/null", "-o", tmp_path / "libelsewhere.so"], check=True)
    linked = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lelsewhere"]
    (tmp_path / "answer.c").write_text(ANSWER)
    subprocess.run([command, "-shared", tmp_path / "answer.c", *linked, "-o", tmp_path / "foreign.so"], check=True)
    key, content = kept.name.split("-")[0], (tmp_path / "foreign.so").read_bytes()
    kept.unlink()
    foreign = kept.with_name(f"{key}-{program_cache.digest(content)}.so")
    foreign.write_bytes(content)
    before = calls(log)
    for _ in range(2):
        anew()
        check_answer()
        assert calls(log) == before + 1
    assert list((tmp_path / "cache").iterdir()) == [kept]


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
    with pytest.warns(UserWarning, match="belongs to another user"):
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


CPUINFO = {
    "x86": "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: {noise}\nflags\t\t: fpu {kind}\n\nprocessor\t: 1\n",
    "arm": "processor\t: 0\nBogoMIPS\t: {noise}\nFeatures\t: fp {kind}\nCPU part\t: 0xd0c\n\nprocessor\t: 1\n",
    "power": "processor\t: 0\ncpu\t\t: POWER{kind}, altivec supported\nclock\t\t: {noise}MHz\n",
    "z": "vendor_id       : IBM/S390\nfeatures\t: esan3 {kind}\nbogomips per cpu: {noise}\n",
    "z without features": "bogomips per cpu: {noise}\nprocessor 0: version = FF,  machine = {kind}\n",
    "risc-v": "processor\t: 0\nhart\t\t: {noise}\nisa\t\t: rv64imafdc_{kind}\nmmu\t\t: sv39\n",
}


@pytest.mark.parametrize("machine", CPUINFO)
def test_processors_are_told_apart_by_kind_alone(machine):
    """Machines have different descriptions of their processors. Numbers that change from moment to moment are left out,
    so that a library is found again."""

    def described(kind: int, noise: int) -> dict[str, str]:
        return compilers.described(CPUINFO[machine].format(kind=kind, noise=noise))

    assert described(8, 1) == described(8, 2) != described(10, 1)


def test_a_library_is_for_one_c_library(afresh):
    before = compilers.dependencies(("cc",))
    afresh.setattr(platform, "libc_ver", lambda: ("glibc", "9.9"))
    assert compilers.dependencies(("cc",)) != before
