"""Links without root: a program in user, network and mount namespaces of its own, in which it may make links."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from .namespaces import PACKAGES, SYSTEM_FOLDERS, found_tool, lacking

_ENTER = ("--user", "--map-root-user", "--net", "--mount")
_MOUNT = "mount -t tmpfs tmpfs /run && mkdir /run/netns"  # the folder of named namespaces belongs to root otherwise
_TRY = "ip link add bridge type bridge && tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"


def enter_own_namespaces(program: Sequence[str]) -> str | None:
    """Run a program in place of this one, in namespaces of its own where it has the rights of root over links, and with
    the rights of this user over everything else.

    Args:
        program: arguments of the interpreter.

    Returns:
        Why that is not possible; ``None`` if it is not needed, because root or such a program has called. Otherwise the
        function does not return.
    """
    if os.geteuid() == 0 or not sys.platform.startswith("linux"):
        return None
    if (why := lacking((*PACKAGES, "unshare", "mount"))) is not None:
        return why
    unshare = found_tool("unshare") or "unshare"
    tried = subprocess.run(
        [unshare, *_ENTER, "sh", "-ec", f"{_MOUNT}; {_TRY}"], capture_output=True, text=True, check=False, env=_paths()
    )
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        return f"this system lets only root make links ({lines[-1] if lines else f'exit status {tried.returncode}'})"
    sys.stdout.flush()
    sys.stderr.flush()
    run = ["sh", "-ec", f'{_MOUNT}; exec "$@"', "sh", sys.executable, *program]
    os.execve(unshare, [unshare, *_ENTER, *run], _paths())


def _paths() -> dict[str, str]:
    """The environment, with a PATH that has the folders of administrators."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"}
