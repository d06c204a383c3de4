"""The folder where compiled programs are kept.

What lies there is run, so only this user may be able to change it. That is asked of the folder itself, through its
descriptor, and whatever is looked for, made and loaded is named relative to that descriptor: links and parents on the
way to it may belong to anybody and change at any time, and still nobody can put another folder in its place. The folder
is opened anew for each program, since a process may close descriptors that it does not know.
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
"""How long to wait for a process that compiles the same: many times what that takes. Then it may be stopped, or on a
machine that is gone."""
_POLL_S = 0.02


def digest(content: bytes) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:32]


class ProgramCache:
    """An opened folder of libraries, each under a key and the digest of its content.

    Args:
        descriptor: of the folder.
        path: that led to it, for messages.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self.path = descriptor, path

    def find(self, key: str) -> str | None:
        """The name of a library that was kept under ``key`` and is what was written: a damaged one may crash when it is
        loaded, and one of another user's must not be."""
        for name in os.listdir(self._descriptor):
            if name.startswith(key) and name.endswith(".so"):
                content = self._own_content(name)
                if content is not None and name == _name(key, content):
                    return name
        return None

    def keep(self, key: str, library: Path) -> str:
        """Move a library from a :meth:`scratch` folder to where it is found; whole or not at all. Returns its name."""
        name = _name(key, library.read_bytes())
        library.chmod(0o600)  # whatever the umask
        os.rename(library, name, dst_dir_fd=self._descriptor)
        return name

    def load(self, name: str) -> ctypes.CDLL:
        """Load a library. Its content tells its name from that of any other, by which the loader knows it again."""
        return ctypes.CDLL(f"/proc/self/fd/{self._descriptor}/{name}")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new folder in this one, which is removed in the end. Its path holds in this process and, as a working
        directory, in what it starts."""
        name = f"{secrets.token_hex(8)}.scratch"
        os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            yield Path(f"/proc/self/fd/{self._descriptor}/{name}")
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Let one process at a time in here with ``key``, on all machines whose file system is the same. A process that
        dies lets the next one in; after ``WAIT_S``, or where files cannot be locked, all get in."""
        name = f"{key}.lock"
        lock = self._lock(name)
        try:
            yield
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a child was forked meanwhile
                os.close(lock)

    def _lock(self, name: str) -> int | None:
        """The descriptor of a lock that is held, or ``None``."""
        deadline = time.monotonic() + WAIT_S
        while True:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._descriptor)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same(lock, name, self._descriptor):  # else whoever held it has removed it
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
        """The content of a file that this user alone can write to; ``None`` for any other."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._descriptor)
        except OSError:  # removed, a link, not to be read
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
    """The folder ``$GCKERNELS_CACHE`` or, by default, ``~/.cache/gckernels``. Where that cannot be trusted or written,
    after a warning, one of this process, which is removed in the end.

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
    """The descriptor of the user's folder, its path; or why there is none."""
    path = ""
    try:
        path = str(_users_path())
        os.makedirs(path, 0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if not _private(os.fstat(descriptor)):
            why = f"others can write to {path}"
        elif not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=descriptor):
            why = f"{path} is not writable"
        else:
            return descriptor, path, ""
        os.close(descriptor)
    except (OSError, RuntimeError) as error:  # the latter: no home
        why = str(error)
    return None, path, why


def _users_path() -> Path:
    chosen = os.environ.get("GCKERNELS_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gckernels").absolute()


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(f"gckernels: every process compiles the CPU path anew (set GCKERNELS_CACHE): {why}", stacklevel=2)


def _private(about: os.stat_result) -> bool:
    """Whether what this describes belongs to this user, and no other one can write to it."""
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _same(descriptor: int, name: str, folder: int) -> bool:
    """Whether the file of that name is still the opened one."""
    try:
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), about)


def _name(key: str, content: bytes) -> str:
    return f"{key}-{digest(content)}.so"
