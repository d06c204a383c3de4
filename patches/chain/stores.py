"""Stores: where the objects of a chain lie.

A store is any object with these four methods. An object appears as a whole or not at all, and a ``put`` of an object
that is there replaces it. A store that also has ``delete(name)`` is pruned by the publisher.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TRIES, _WAIT_S = 4, 0.25
_OLD_S = 24 * 3600.0  # a file that a killed process has left behind


class PatchStore(Protocol):
    """The methods of a store."""

    def get(self, name: str) -> bytes | None:
        """The object with this name, or ``None`` without one."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one with this name. Returns whether it was written."""

    def names(self) -> Iterable[str]:
        """The names of all objects."""


def checked_name(name: str) -> str:
    """A name of an object, which is the name of a file in a folder and nothing else.

    Raises:
        ValueError: it has other characters than letters, digits, ``.``, ``_`` and ``-``, or begins with one of these.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"patches: an object cannot have the name {name!r:.80}")
    return name


class Folder:
    """A store in a folder. A file system that several machines share is enough to send weights between them.

    Args:
        path: the folder, which is made if there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        for file in self.path.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _OLD_S:
                    file.unlink()

    def get(self, name: str) -> bytes | None:
        """The object with this name, or ``None`` without one."""
        try:
            return (self.path / checked_name(name)).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write an object: beside its place, to the disk, and then renamed."""
        part = self._written(name, data)
        os.replace(part, self.path / name)
        self._sync()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one with this name. Returns whether it was written."""
        part = self._written(name, data)
        try:
            os.link(part, self.path / name)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        self._sync()
        return True

    def names(self) -> list[str]:
        """The names of all objects."""
        return sorted(name for name in os.listdir(self.path) if _NAME.fullmatch(name))

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""
        (self.path / checked_name(name)).unlink(missing_ok=True)

    def _written(self, name: str, data: bytes) -> Path:
        part = self.path / f".{checked_name(name)}.{secrets.token_hex(6)}.part"
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part

    def _sync(self) -> None:
        """Bring the names to the disk."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Http:
    """A store behind a web server, such as ``gckernels patches serve``. Any server of files will do for followers.

    Args:
        url: address of the folder.
        token: sent with every request, as ``Authorization: Bearer TOKEN``.
        certificates: a file with the certificates that are trusted; by default those of the system.
        timeout_s: seconds that a request may wait for the server.
    """

    def __init__(
        self, url: str, token: str | None = None, *, certificates: str | None = None, timeout_s: float = 60.0
    ) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"Http: url must begin with http:// or https://, got {url!r}")
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._context = ssl.create_default_context(cafile=certificates) if url.startswith("https") else None

    def get(self, name: str) -> bytes | None:
        """The object with this name, or ``None`` without one. It is asked for again where the server fails."""
        return self._get(checked_name(name))

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        self._asked(checked_name(name), "PUT", data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one with this name. Returns whether it was written."""
        try:
            self._asked(checked_name(name), "PUT", data, {"If-None-Match": "*"})
        except urllib.error.HTTPError as error:
            if error.code == 412:
                return False
            raise
        return True

    def names(self) -> list[str]:
        """The names of all objects."""
        return (self._get("") or b"").decode().split()

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""
        self._asked(checked_name(name), "DELETE")

    def _get(self, name: str) -> bytes | None:
        for number in range(_TRIES):
            try:
                return self._asked(name, "GET")
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code < 500 or number == _TRIES - 1:
                    raise
            except OSError:
                if number == _TRIES - 1:
                    raise
            time.sleep(_WAIT_S * 2**number)
        raise AssertionError

    def _asked(self, name: str, method: str, data: bytes | None = None, more: dict[str, str] | None = None) -> bytes:
        request = urllib.request.Request(f"{self._url}/{name}", data, self._headers | (more or {}), method=method)
        with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._context) as answer:
            content: bytes = answer.read()
            expected = answer.headers.get("Content-Length")
        if expected is not None and int(expected) != len(content):
            raise OSError(f"{name}: {len(content):,} of {expected} bytes have come")
        return content
