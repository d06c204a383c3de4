"""The verb ``advise``: what a training script would gain on these ranks, measured."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from gckernels.sync.plans.numbers import duration, plural, rate, three_digits, volume

from .advising.averagings import Averaging
from .advising.links import LinkError, measured_links
from .advising.measuring import Advising, Measured, ScriptAdvice
from .common.console import Console
from .common.files import add_outputs
from .common.outcome import BLANK, Exit, Outcome, Part, bad_data, wrong_use
from .common.scripts import add_script, measured
from .common.tables import table

_TEN_MILLION = 10_000_000
ENOUGH = 0.05
"""The part of a step that a way must save to be worth its line, and by which a more exact way may be slower."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels advise``."""
    parser.description = (
        "Run a training script for some steps on these ranks and links, average its first DistributedDataParallel "
        "model, or model of fully_shard, in one way after the other, and say what each takes and which line to add. "
        "The script ends when everything is measured; what it has trained means nothing."
    )
    add_outputs(parser)
    parser.add_argument("--seconds", type=float, default=90.0, help="about how long the steps may take (default: 90)")
    parser.add_argument(
        "--link", action="store_true", help="measure only the links between the ranks, without a script"
    )
    add_script(parser, may_lack=True)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Measure the ways in the script, and advise.

    Raises:
        CommandError: an argument is wrong, or the script has ended too early.
    """
    if not 1 <= given.seconds < float("inf"):
        raise wrong_use(f"--seconds must be a number from 1 up, got {given.seconds}", "leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        start = "torchrun --nproc-per-node 2 -m gckernels advise ..., or gckernels lab -m gckernels advise ..."
        raise wrong_use("one rank averages with nobody", f"start several: {start}")
    if given.link:
        if given.script is not None:
            raise wrong_use(f"--link takes no script, got {given.script}", "leave one of them out")
        return _of_links(console)
    if given.script is None:
        raise wrong_use("a script is missing", "name it, or measure the links alone with --link")
    begin = partial(Advising, seconds=given.seconds, progress=console.progress)
    advice = measured(given, console, begin, _advice_of, "let it train 100 steps or more")
    pays = first_choice(advice) is not advice.plain
    return Outcome(parts_of(advice), code=Exit.OK if pays else Exit.DOES_NOT_PAY)


def _of_links(console: Console) -> Outcome:
    try:
        found = measured_links()
    except LinkError as error:
        console.speaks = os.environ.get("LOCAL_RANK") == "0"  # on every machine
        raise bad_data(error) from None
    columns = {
        "from": lambda each: str(each.source),
        "to": lambda each: f"{each.target} at {each.target.address}",
        "round trip": lambda each: duration(each.round_trip_s),
        "rate": lambda each: rate(each.bit_per_s),
    }
    slowest = min(found, key=lambda each: each.bit_per_s)
    seconds = duration(8 * _TEN_MILLION * 4 / slowest.bit_per_s)
    note = f"At {rate(slowest.bit_per_s)} the gradients of 10 million parameters take {seconds} in 32 bits."
    rows = [
        {
            "from": each.source.rank,
            "to": each.target.rank,
            "round_trip_s": each.round_trip_s,
            "bit_per_s": each.bit_per_s,
        }
        for each in found
    ]
    return Outcome([Part(table(found, columns, left=(0, 1)), {"links": rows}), BLANK, Part(note)])


def _advice_of(advising: Advising) -> ScriptAdvice:
    return advising.advice


def first_choice(advice: ScriptAdvice) -> Measured:
    """The most exact of the ways that are about as fast as the fastest; plain averaging if none saves enough."""
    usable = [each for each in advice.averagings if not each.problem]
    fastest_s = min(each.step_s for each in usable)
    if fastest_s > (1 - ENOUGH) * advice.plain.step_s:
        return advice.plain
    return next(each for each in usable if each.step_s <= (1 + ENOUGH) * fastest_s)


def parts_of(advice: ScriptAdvice) -> list[Part]:
    """The advice: what limits, a table of the ways, and the first choice."""
    plain_s = advice.plain.step_s
    columns = {
        "averaged": lambda each: each.averaging.name,
        "step": lambda each: (each.problem and "-") or duration(each.step_s),
        "times as fast": lambda each: (each.problem and "-") or three_digits(plain_s / each.step_s),
        "sent per step": lambda each: (each.problem and "-") or volume(each.sent_nbytes),
        "more memory": lambda each: (each.problem and "-") or volume(each.memory_nbytes),
        "accuracy": lambda each: _accuracy(each.averaging),
    }
    size = f"{advice.numel:,} parameters ({volume(advice.nbytes)} of gradients)"
    sizes = {"model": advice.model, "ranks": advice.ranks, "numel": advice.numel, "nbytes": advice.nbytes}
    limit = f"{advice.model}, {size}, on {plural(advice.ranks, 'rank')}: {_limit(advice)}"
    rows = [_record(each) for each in advice.averagings]
    refused = [Part(f"{each.averaging.name}: {each.problem}") for each in advice.averagings if each.problem]
    return [
        Part(limit, sizes | {"local_s": advice.local_s}),
        BLANK,
        Part(table(advice.averagings, columns, left=(0, 5)), {"averagings": rows}),
        *refused,
        BLANK,
        Part("\n".join(_choice(advice)), {"first_choice": first_choice(advice).averaging.name}),
    ]


def _record(each: Measured) -> dict[str, Any]:
    averaging = each.averaging
    return {
        "name": averaging.name,
        "line": averaging.line,
        "step_s": None if each.problem else each.step_s,
        "sent_nbytes": each.sent_nbytes,
        "memory_nbytes": each.memory_nbytes,
        "accuracy": averaging.accuracy,
        "page": averaging.page,
        "problem": each.problem,
    }


def _accuracy(averaging: Averaging) -> str:
    return f"{averaging.accuracy} (see {averaging.page})" if averaging.page else averaging.accuracy


def _limit(advice: ScriptAdvice) -> str:
    plain_s, local_s = advice.plain.step_s, advice.local_s
    if local_s is None:
        return f"a step takes {duration(plain_s)}."
    waits_s = max(plain_s - local_s, 0.0)
    return f"you wait {duration(waits_s)} of the {duration(plain_s)} of a step for the network."


def _choice(advice: ScriptAdvice) -> list[str]:
    choice = first_choice(advice)
    if choice is advice.plain:
        return ["Nothing to gain here: no way saves a twentieth of a step."]
    faster = three_digits(advice.plain.step_s / choice.step_s)
    lines = [f"First choice: {choice.averaging.name}, {faster} times as fast:", f"    {choice.averaging.line}"]
    if choice.averaging.every:
        gradients = [each for each in advice.averagings[1:] if not each.problem and not each.averaging.every]
        best = min(gradients, key=lambda each: each.step_s, default=None)
        if best is not None and best.step_s < (1 - ENOUGH) * advice.plain.step_s:
            faster = three_digits(advice.plain.step_s / best.step_s)
            lines += [f"With gradients averaged in every step, {best.averaging.name}, {faster} times as fast:"]
            lines += [f"    {best.averaging.line}"]
    by_itself = "sync.attach(model) finds a compressor of gradients by itself, and keeps plain averaging if it wins."
    return [*lines, by_itself]
