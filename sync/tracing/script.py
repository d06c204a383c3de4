"""Measurements in training scripts that know nothing of them: the first model of DDP or FSDP2 of a script is
measured."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

_FAILED = " failed with "


class ScriptError(RuntimeError):
    """Raised if a script has ended before its model was measured; the message says why."""


class _Measured(BaseException):  # so that no "except Exception" of the script catches it
    """Raised in the script's next forward when everything is measured."""


class Measurement(Protocol):
    """A measurement of a training, which ends by itself."""

    @property
    def done(self) -> bool:
        """Whether everything is measured."""

    def close(self) -> None:
        """End it; without effect if it has ended."""


M = TypeVar("M", bound=Measurement)
R = TypeVar("R")


def measured_in_script(
    script: str,
    arguments: Sequence[str],
    begin: Callable[[torch.nn.Module], M],
    result: Callable[[M], R],
    *,
    is_module: bool = False,
    goes_on: bool = False,
) -> R:
    """Run a training script and return what is measured of its first DDP model or model of FSDP2. Every rank of
    torchrun calls it; without torchrun the script runs as the only rank.

    Args:
        script: the path of the script, or the name of a module.
        arguments: the script's own arguments.
        begin: begins to measure the model, when the script has made it, or in the first forward of a model of FSDP2.
        result: returns what has been measured, or raises a RuntimeError that says how far the measurement is.
        is_module: whether ``script`` is the name of a module.
        goes_on: whether the script runs to its end; otherwise it is ended at the first forward when all is measured.

    Raises:
        ScriptError: the measurement is not done when the script ends.
    """
    begun: list[M] = []

    def made(model: torch.nn.Module) -> None:
        if begun:
            return  # a second model
        begun.append(begin(model))
        if not goes_on:
            model.register_forward_pre_hook(stop_when_done)

    def stop_when_done(*_: Any) -> None:
        if begun[0].done:
            raise _Measured

    try:
        ended = _run(script, arguments, made, is_module)
        if not begun and ended.startswith(_FAILED):
            raise ScriptError(f"{script}{ended}")
        if not begun:
            kinds = "DistributedDataParallel model, and trained none of fully_shard"
            raise ScriptError(f"{script}{ended} has made no {kinds}")
        try:
            return result(begun[0])
        except RuntimeError as error:
            progress = str(error).partition(";")[0].removeprefix("recording: ")
            raise ScriptError(f"{script}{ended}: {progress}") from None
    finally:
        for each in begun:
            each.close()
        begun.clear()
        gc.collect()  # DDP's model first: one that outlives its group can abort the process at its end
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _run(script: str, arguments: Sequence[str], made: Callable[[torch.nn.Module], None], is_module: bool) -> str:
    """Run the script as ``python`` does; returns how it ended, ``""`` for well."""
    before = sys.argv, list(sys.path)
    added = {} if "RANK" in os.environ else _environment()
    sys.argv = [script, *arguments]
    sys.path.insert(0, "" if is_module else os.path.dirname(os.path.abspath(script)))
    os.environ.update(added)
    try:
        with _watching(made):
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except _Measured:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            return f" ended with {error.code}"
    except Exception as error:
        traceback.print_exc()
        return f"{_FAILED}{type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        for name in added:
            os.environ.pop(name, None)
    return ""


@contextmanager
def _watching(made: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """A context in which ``made`` is called with every new DDP model, and with models of FSDP2 before their forward."""
    original = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made(self)

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, FSDPModule):  # the root comes first
            made(module)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    handle = register_module_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        handle.remove()
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]


def _environment() -> dict[str, str]:
    """The variables that torchrun sets for a single rank."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # a free one: another process may take any that is looked for first
    }
