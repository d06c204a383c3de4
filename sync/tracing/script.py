"""Model traces of training scripts that know nothing of it: the first model of DDP or FSDP2 of a script is measured."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ..traces.model_trace import ModelTrace
from .model_tracing import ModelTracing

_FAILED = " failed with "


class ScriptError(RuntimeError):
    """Raised if a script has ended before its model was recorded; the message says why."""


class _Recorded(BaseException):  # so that no "except Exception" of the script catches it
    """Raised in the script's next forward when everything is recorded."""


def trace_of_script(
    script: str,
    arguments: Sequence[str],
    begin: Callable[[torch.nn.Module], ModelTracing],
    *,
    is_module: bool = False,
    goes_on: bool = False,
) -> ModelTrace:
    """Run a training script and return the trace of its first DDP model or model of FSDP2. Every rank of torchrun calls
    it; without torchrun the script runs as the only rank.

    Args:
        script: the path of the script, or the name of a module.
        arguments: the script's own arguments.
        begin: begins to trace the model, when the script has made it, or in the first forward of a model of FSDP2.
        is_module: whether ``script`` is the name of a module.
        goes_on: whether the script runs to its end; otherwise it is ended at the first forward after the recording.

    Raises:
        ScriptError: there is no trace when the script ends.
    """
    recordings: list[ModelTracing] = []

    def made(model: torch.nn.Module) -> None:
        if recordings:
            return  # a second model
        recordings.append(begin(model))
        if not goes_on:
            model.register_forward_pre_hook(stop_when_done)

    def stop_when_done(*_: Any) -> None:
        if recordings[0].done:
            raise _Recorded

    try:
        ended = _run(script, arguments, made, is_module)
        if not recordings and ended.startswith(_FAILED):
            raise ScriptError(f"{script}{ended}")
        if not recordings:
            kinds = "DistributedDataParallel model, and trained none of fully_shard"
            raise ScriptError(f"{script}{ended} has made no {kinds}")
        if not recordings[0].done:
            raise ScriptError(f"{script}{ended}: {_progress(recordings[0])}")
        return recordings[0].trace
    finally:
        for recording in recordings:
            recording.close()
        recordings.clear()
        gc.collect()  # DDP's model first: one that outlives its group can abort the process at its end
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _progress(recording: ModelTracing) -> str:
    """How many steps are recorded, as the error of a recording without a trace says it."""
    try:
        return str(recording.trace)
    except RuntimeError as error:
        return str(error).partition(";")[0].removeprefix("recording: ")


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
    except _Recorded:
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
