"""The verb ``trace``: steps of a training script, measured for plans."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gckernels
from gckernels.sync.accuracy.accuracy import allowed_compressors, unfitted
from gckernels.sync.plans.numbers import duration, plural, three_digits, volume
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role
from gckernels.sync.tracing.model_tracing import trace_model
from gckernels.sync.tracing.script import ScriptError, trace_of_script

from .common.console import Console
from .common.files import STANDARD, add_outputs, reading
from .common.inputs import methods_of
from .common.outcome import Outcome, bad_data, wrong_use
from .common.tables import table

_MISTAKEN = ("output", "json", "steps", "warmup", "compressors", "name", "go_on")
"""The options that a script could be given by mistake."""


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels trace``."""
    parser.description = (
        "Run a training script and measure steps of its first DistributedDataParallel model, or model of fully_shard: "
        "tensors, when their gradients are ready and parameters are gathered, and the relative errors of compressors. "
        "Under torchrun on all of its ranks, otherwise on one. The script ends when everything is measured."
    )
    parser.epilog = "-o and --json may also follow the script; -- ends them."
    add_outputs(parser, "the trace")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default: 3)")
    parser.add_argument(
        "--compressors",
        action="append",
        metavar="SPEC",
        help="measure the errors of this compressor; can be repeated (default: all that may be chosen)",
    )
    parser.add_argument("--name", help="name of the model in the trace (default: that of its class)")
    parser.add_argument("--go-on", action="store_true", help="let the script run to its end")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="training script that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, action=_AfterScript, help="arguments of the script")


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Run the script and measure it.

    Raises:
        CommandError: an argument is wrong, or the script has ended too early.
    """
    for option, value, least in (("--steps", given.steps, 1), ("--warmup", given.warmup, 0)):
        if value < least:
            raise wrong_use(f"{option} must be an integer from {least} up, got {value}", "leave it out")
    compressors = None if given.compressors is None else methods_of(given.compressors)
    _check_script(given.script, given.module)
    if given.like_ours and "--" not in given.words:  # which some releases of Python take out of the arguments
        options, script = ", ".join(given.like_ours), given.script
        behind = "to which everything behind its first argument goes"
        console.note(f"{options} is given to {script}, {behind}; an option of this command stands before the script")
    begin = partial(trace_model, steps=given.steps, warmup=given.warmup, compressors=compressors, name=given.name)
    # results alone go to stdout where a program reads it
    quiet = contextlib.redirect_stdout(sys.stderr) if given.json or given.output == STANDARD else None
    try:
        with quiet or contextlib.nullcontext():
            trace = trace_of_script(given.script, given.arguments, begin, is_module=given.module, goes_on=given.go_on)
    except ScriptError as error:
        remedy = f"let it train {given.warmup + given.steps} steps or more, or give a smaller --steps"
        if "DistributedDataParallel" in str(error):
            remedy = "wrap its model, or call gckernels.sync.trace_model(model) in it"
        raise bad_data(error, remedy) from None
    notes = []
    if given.output not in (None, STANDARD):
        notes.append(f"gckernels plan {given.output} MACHINE -o plan.json makes a plan")
    return Outcome(summary(trace), as_record(trace), {given.output: trace.to_text()}, notes)


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


def summary(trace: ModelTrace) -> str:
    """Tables of a trace for people: sizes and times; the compressors with their errors."""
    rows = {
        "tensors": f"{plural(len(trace.tensors), 'tensor')}, {trace.numel:,} elements, {volume(trace.nbytes)}",
        "forward": duration(trace.forward_s),
        "backward": duration(trace.backward_s),
        "first gradient ready": duration(trace.tensors[0].ready_s),
        "last gradient ready": duration(trace.tensors[-1].ready_s),
        "optimizer": duration(trace.optimizer_s),
        "buckets": plural(len(trace.buckets), "bucket") if trace.buckets else "none, not a DDP model",
        **({"gathers of parameters": str(len(trace.gathers))} if trace.gathers else {}),
    }
    text = table(rows, {trace.model: str, "": rows.__getitem__}, left=(0, 1))
    errors = measured_errors(trace)
    if errors:
        safe, aggressive = (_counts(trace, accuracy) for accuracy in ("safe", "aggressive"))
        columns: dict[str, Callable[[str], str]] = {
            "compressor": str,
            "error": lambda spec: three_digits(errors[spec]),
            "safe for": lambda spec: str(safe[str(gckernels.from_spec(spec))]),
            "aggressive for": lambda spec: str(aggressive[str(gckernels.from_spec(spec))]),
        }
        text += "\n\n" + table(errors, columns)
    return text


def as_record(trace: ModelTrace) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "model": trace.model,
        "tensors": len(trace.tensors),
        "numel": trace.numel,
        "forward_s": trace.forward_s,
        "backward_s": trace.backward_s,
        "last_ready_s": trace.tensors[-1].ready_s,
        "optimizer_s": trace.optimizer_s,
        "buckets": len(trace.buckets),
        "gathers": len(trace.gathers),
        "errors": measured_errors(trace),
        "source": trace.source,
    }


def measured_errors(trace: ModelTrace) -> dict[str, float]:
    """The relative error of each compressor on all matrices together, the smallest first."""
    squares: dict[str, tuple[float, float]] = {}
    for tensor in trace.tensors:
        for spec, error in tensor.errors.items() if tensor.role is not Role.VECTOR else ():
            weight = (tensor.norm or 0.0) ** 2
            left, total = squares.get(spec, (0.0, 0.0))
            squares[spec] = left + weight * error**2, total + weight
    errors = {spec: math.sqrt(left / total) if total else 0.0 for spec, (left, total) in squares.items()}
    return dict(sorted(errors.items(), key=lambda item: item[1]))


def _counts(trace: ModelTrace, accuracy: str) -> Counter[str]:
    """How many tensors may use each compressor, by its spec."""
    allowed = allowed_compressors(trace, accuracy).values()
    return Counter(str(unfitted(method)) for methods in allowed for method in methods)
