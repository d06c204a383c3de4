"""The folder in which compiled libraries are kept.

Its libraries are run, so only this user may be able to change them. The owner and the mode are read through the
folder's descriptor, and files are named relative to the descriptor. Links and parents of the path may therefore belong
to anybody and change at any time: nobody can put another folder in the place of the checked one. The folder is opened
for each program, since a process may close descriptors that it does not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 60.0
"""Longest wait for another process that compiles the same program, many times what a compilation takes. A process that
holds the lock longer may be stopped, or its machine may be gone."""
_POLL_S = 0.02


def digest(content: bytes) -> str:
    """32 hexadecimal digits that identify ``content``."""
    return hashlib.sha256(content).hexdigest()[:32]


class ProgramCache:
    """An opened folder of libraries, each named by a key and the digest of its content.

    Args:
        descriptor: the open folder.
        path: its path, for messages.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self.path = descriptor, path

    def find(self, key: str) -> str | None:
        """The name of the library under ``key``, or ``None``.

        A damaged library, which might crash when it is loaded, and a library that another user can write to are not
        found.
        """
        for name in os.listdir(self._descriptor):
            if name.startswith(key) and name.endswith(".so"):
                content = self._own_content(name)
                if content is not None and name == _name(key, content):
                    return name
        return None

    def keep(self, key: str, library: Path) -> str:
        """Move a library from a :meth:`scratch` folder into this folder, whole or not at all, and return its name."""
        name = _name(key, library.read_bytes())
        library.chmod(0o600)  # independent of the umask
        os.rename(library, name, dst_dir_fd=self._descriptor)
        return name

    def load(self, name: str) -> ctypes.CDLL:
        """Load the library with this name.

        The loader identifies libraries by their names; no two contents have the same name.
        """
        return ctypes.CDLL(f"/proc/self/fd/{self._descriptor}/{name}")

    def may_run(self) -> bool:
        """Whether the folder is on a file system from which programs may be run."""
        return not os.fstatvfs(self._descriptor).f_flag & os.ST_NOEXEC

    def remove(self, name: str) -> None:
        """Remove the library with this name, unless another process has done so."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new folder in this one, removed at the end.

        Its path is valid in this process only; child processes can have it as their working directory.
        """
        name = f"{secrets.token_hex(8)}.scratch"
        os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            yield Path(f"/proc/self/fd/{self._descriptor}/{name}")
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key``, which one process has at a time, on all machines that share the file system.

        A process that dies releases the lock. After ``WAIT_S``, or where files cannot be locked, the caller goes on
        without it.
        """
        name = f"{key}.lock"
        lock = self._lock(name)
        try:
            yield
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not unlock if a child was forked meanwhile
                os.close(lock)

    def _lock(self, name: str) -> int | None:
        """The descriptor of the held lock, or ``None`` without one."""
        deadline = time.monotonic() + WAIT_S
        while True:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._descriptor)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same(lock, name, self._descriptor):  # otherwise its last holder has removed the file
                    return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    return None
                time.sleep(_POLL_S)
            except OSError:
                os.close(lock)
                return None
            os.close(lock)

    def _own_content(self, name: str) -> bytes | None:
        """The content of a file that only this user can write to; ``None`` for any other."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._descriptor)
        except OSError:  # removed, a link, unreadable
            return None
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or not _private(about):
                return None
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def opened() -> Iterator[ProgramCache]:
    """The folder ``$GCKERNELS_CACHE``, by default ``~/.cache/gckernels``.

    If others can write to that folder, or this user cannot, a warning is given once and a temporary folder is opened,
    which is removed at the end.

    Raises:
        OSError: there is no place for temporary files either.
    """
    descriptor, path, why = _open_users()
    if descriptor is None:
        _warn_once(why)
        with tempfile.TemporaryDirectory(prefix="gckernels-") as scratch:
            descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield ProgramCache(descriptor, "a temporary folder")
            finally:
                os.close(descriptor)
        return
    try:
        yield ProgramCache(descriptor, path)
    finally:
        os.close(descriptor)


def _open_users() -> tuple[int | None, str, str]:
    """``(descriptor, path, "")`` of the user's folder, or ``(None, path, reason)``."""
    path = ""
    try:
        path = str(_users_path())
        os.makedirs(path, 0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if (owner := os.fstat(descriptor).st_uid) != os.getuid():
            why = f"{path} belongs to another user ({owner}), and this one is {os.getuid()}"
        elif not _private(os.fstat(descriptor)):
            why = f"others can write to {path}"
        elif not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=descriptor):
            why = f"{path} is not writable"
        else:
            return descriptor, path, ""
        os.close(descriptor)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        why = str(error)
    return None, path, why


def keep_source(name: str, text: str) -> str:
    """The path of a file with that text in the user's folder, whole or not at all.

    The path is returned also where the file cannot be written: its readers have the text by other means.
    """
    descriptor, path, _ = _open_users()
    where = f"{path or '<gckernels>'}/{name}"
    if descriptor is None:
        return where
    scratch = f"{secrets.token_hex(8)}.scratch"
    try:
        with contextlib.suppress(OSError):
            if Path(where).read_text() == text:
                return where
        with contextlib.suppress(OSError):
            file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor)
            try:
                with open(file, "w") as writer:
                    writer.write(text)
                os.rename(scratch, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            except OSError:
                os.unlink(scratch, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return where


def _users_path() -> Path:
    chosen = os.environ.get("GCKERNELS_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gckernels").absolute()


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(f"gckernels: every process compiles the CPU path anew (set GCKERNELS_CACHE): {why}", stacklevel=2)


def _private(about: os.stat_result) -> bool:
    """Whether the described file or folder belongs to this user and nobody else can write to it."""
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _same(descriptor: int, name: str, folder: int) -> bool:
    """Whether ``name`` in ``folder`` is still the file that is open as ``descriptor``."""
    try:
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), about)


def _name(key: str, content: bytes) -> str:
    return f"{key}-{digest(content)}.so"
