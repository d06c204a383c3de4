"""The compiled part of the simulated device, built by torch's loader of extensions and kept."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "order.h", "pinned.h", "queues.h")


@functools.cache
def reason_against() -> str | None:
    """The reason why the device cannot be built here; ``None`` if it can, or has been."""
    if _library().exists():
        return None
    for tool in ("c++", "ninja"):
        if shutil.which(tool, path=_path()) is None:
            return f"the simulated device is compiled, and there is no {tool}"
    return None


def build() -> Path:
    """Build the library unless there is one of the same sources and the same torch, and return its path."""
    library = _library()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks and test processes need it at the same time
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        options = f"name='device', sources=[{str(_HERE / 'device.cpp')!r}], build_directory={folder!r}"
        program = f"from torch.utils.cpp_extension import load; load({options}, extra_cflags=['-O1'])"
        environment = os.environ | {"PATH": _path()}
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        if found.returncode:
            raise RuntimeError(f"the simulated device cannot be compiled\n{found.stderr[-4000:]}")
        os.replace(Path(folder, "device.so"), library)


def load() -> ModuleType:
    """The compiled module. It makes the device ``PrivateUse1`` of this process, and can be loaded once."""
    loader = importlib.machinery.ExtensionFileLoader("device", str(build()))
    spec = importlib.util.spec_from_loader("device", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _library() -> Path:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in _SOURCES:
        digest.update((_HERE / source).read_bytes())
    return _HERE.parents[1] / "build" / "simulated_device" / f"{digest.hexdigest()[:16]}.so"


def _path() -> str:
    """The places of programs, with those of this environment, which may have installed ninja."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
