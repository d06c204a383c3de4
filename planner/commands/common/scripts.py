"""The training scripts of verbs: their arguments, and what is measured in them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gckernels.sync.tracing.script import Measurement, ScriptError, measured_in_script

from .console import Console
from .files import STANDARD, reading
from .outcome import bad_data, wrong_use

M = TypeVar("M", bound=Measurement)
R = TypeVar("R")

_MISTAKEN = ("output", "json", "steps", "warmup", "compressors", "name", "go_on", "seconds")
"""The options of verbs that a script could be given by mistake."""


class _AfterScript(argparse.Action):
    """The words after the script: at first ``-o FILE`` and ``--json``, which are ours, then the script's own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        words = list(values or ())
        while words:
            if words[0] in ("-o", "--output") and len(words) > 1:
                namespace.output = words[1]
                del words[:2]
            elif words[0] == "--json":
                namespace.json = True
                del words[0]
            else:
                break
        namespace.like_ours = _like_ours(parser, namespace, words)
        namespace.arguments = words[1:] if words[:1] == ["--"] else words


def _like_ours(parser: Any, namespace: Any, words: Sequence[str]) -> list[str]:
    """The words behind a script that look like options of this verb which have not been given, each with its value."""
    found = []
    options = {name: action for action in parser._actions for name in action.option_strings if action.dest in _MISTAKEN}
    for at, word in enumerate(words):
        name, is_joined, _ = word.partition("=")
        if word[:2] in options:  # such as -oFILE
            name, is_joined = word[:2], word[2:]
        action = options.get(name)
        if action is not None and getattr(namespace, action.dest, action.default) == action.default:
            has_value = action.nargs is None and not is_joined
            found.append(" ".join(words[at : at + 1 + has_value]))
    return found


def add_script(parser: argparse.ArgumentParser, may_lack: bool = False) -> None:
    """Add the arguments of a verb that runs a training script: the script, and behind it all that is for the script.

    Args:
        parser: the parser of the verb.
        may_lack: whether the verb does something without a script.
    """
    parser.epilog = "-o and --json may also follow the script; -- ends them."
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs="?" if may_lack else None, help="training script that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, action=_AfterScript, help="arguments of the script")


def measured(
    given: argparse.Namespace,
    console: Console,
    begin: Callable[[torch.nn.Module], M],
    result: Callable[[M], R],
    remedy: str,
    goes_on: bool = False,
) -> R:
    """The result of a measurement in the script of a verb.

    Args:
        given: the arguments of the verb.
        console: notes that options are given to the script.
        begin: begins to measure the model of the script.
        result: returns what has been measured, or raises a RuntimeError that says how far the measurement is.
        remedy: what to do if the script ends too early.
        goes_on: whether the script runs to its end.

    Raises:
        CommandError: there is no such script, or it has no model, or has ended too early.
    """
    _check_script(given.script, given.module)
    if given.like_ours and "--" not in given.words:  # which some releases of Python take out of the arguments
        options, script = ", ".join(given.like_ours), given.script
        behind = "to which everything behind its first argument goes"
        console.note(f"{options} is given to {script}, {behind}; an option of this command stands before the script")
    # results alone go to stdout where a program reads it
    is_read = given.json or getattr(given, "output", None) == STANDARD
    quiet = contextlib.redirect_stdout(sys.stderr) if is_read else contextlib.nullcontext()
    try:
        with quiet:
            words = (given.script, given.arguments)
            return measured_in_script(*words, begin, result, is_module=given.module, goes_on=goes_on)
    except ScriptError as error:
        if "DistributedDataParallel" in str(error):
            remedy = "wrap its model, or call gckernels.sync.trace_model(model) in it"
        raise bad_data(error, remedy) from None


def _check_script(script: str, is_module: bool) -> None:
    """Refuse a script that is not there, before anything is imported."""
    if not is_module:
        with reading(script, "script"), open(script, "rb"):
            pass
        return
    top = script.partition(".")[0]
    sys.path.insert(0, "")  # as for python -m
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    finally:
        sys.path.remove("")
    if not found:
        raise wrong_use(f"-m {script}: there is no module {top!r} here", "run it in the folder of the module")
