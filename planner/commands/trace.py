"""The verb ``trace``: steps of a training script, measured for plans."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import gckernels
from gckernels.sync.accuracy.accuracy import allowed_compressors, unfitted
from gckernels.sync.plans.numbers import duration, plural, three_digits, volume
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role
from gckernels.sync.tracing.model_tracing import ModelTracing, trace_model

from .common.console import Console
from .common.files import STANDARD, add_outputs
from .common.inputs import methods_of
from .common.outcome import BLANK, Outcome, Part, wrong_use
from .common.scripts import add_script, measured
from .common.tables import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels trace``."""
    parser.description = (
        "Run a training script and measure steps of its first DistributedDataParallel model, or model of fully_shard: "
        "tensors, when their gradients are ready and parameters are gathered, and the relative errors of compressors. "
        "Under torchrun on all of its ranks, otherwise on one. The script ends when everything is measured."
    )
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
    add_script(parser)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Run the script and measure it.

    Raises:
        CommandError: an argument is wrong, or the script has ended too early.
    """
    for option, value, least in (("--steps", given.steps, 1), ("--warmup", given.warmup, 0)):
        if value < least:
            raise wrong_use(f"{option} must be an integer from {least} up, got {value}", "leave it out")
    compressors = None if given.compressors is None else methods_of(given.compressors)
    begin = partial(trace_model, steps=given.steps, warmup=given.warmup, compressors=compressors, name=given.name)
    remedy = f"let it train {given.warmup + given.steps} steps or more, or give a smaller --steps"
    trace = measured(given, console, begin, _trace_of, remedy, goes_on=given.go_on)
    notes = []
    if given.output not in (None, STANDARD):
        notes.append(f"gckernels plan {given.output} MACHINE -o plan.json makes a plan")
    return Outcome(parts_of(trace), {given.output: trace.to_text()}, notes)


def _trace_of(recording: ModelTracing) -> ModelTrace:
    return recording.trace


def facts_of(trace: ModelTrace) -> dict[str, Part]:
    """The sizes and times of a trace, by their names for people."""
    numel, buckets, gathers = trace.numel, len(trace.buckets), len(trace.gathers)
    tensors = f"{plural(len(trace.tensors), 'tensor')}, {numel:,} elements, {volume(trace.nbytes)}"
    times = {
        "forward": ("forward_s", trace.forward_s),
        "backward": ("backward_s", trace.backward_s),
        "first gradient ready": ("first_ready_s", trace.tensors[0].ready_s),
        "last gradient ready": ("last_ready_s", trace.tensors[-1].ready_s),
        "optimizer": ("optimizer_s", trace.optimizer_s),
    }
    return {
        "tensors": Part(tensors, {"tensors": len(trace.tensors), "numel": numel}),
        **{name: Part(duration(seconds), {key: seconds}) for name, (key, seconds) in times.items()},
        "buckets": Part(plural(buckets, "bucket") if buckets else "none, not a DDP model", {"buckets": buckets}),
        "gathers of parameters": Part(str(gathers) if gathers else None, {"gathers": gathers}),
    }


def parts_of(trace: ModelTrace) -> list[Part]:
    """A trace in two tables: sizes and times; the compressors with their errors."""
    facts, errors = facts_of(trace), measured_errors(trace)
    shown = {name: part.text for name, part in facts.items() if part.text is not None}
    record = {"model": trace.model, "source": trace.source}
    parts = [Part(table(shown, {trace.model: str, "": shown.__getitem__}, left=(0, 1)), record)]
    parts += [Part(None, part.record) for part in facts.values()]
    if not errors:
        return [*parts, Part(None, {"errors": {}})]
    safe, aggressive = (_counts(trace, accuracy) for accuracy in ("safe", "aggressive"))
    columns: dict[str, Callable[[str], str]] = {
        "compressor": str,
        "error": lambda spec: three_digits(errors[spec]),
        "safe for": lambda spec: str(safe[str(gckernels.from_spec(spec))]),
        "aggressive for": lambda spec: str(aggressive[str(gckernels.from_spec(spec))]),
    }
    return [*parts, BLANK, Part(table(errors, columns), {"errors": errors})]


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
