"""The verb ``predict``: where compression pays, over bandwidths, machines, batch sizes and speeds of codecs."""

from __future__ import annotations

import argparse
import json

from .common.console import Console
from .common.files import write
from .common.inputs import (
    add_constraints,
    add_policy,
    add_trace_and_machine,
    check_one_stdin,
    check_pictures,
    check_policy,
    planning,
    posed,
)
from .common.outcome import Exit, wrong_use
from .studies.prediction import predict
from .studies.sweeps import sweep_from
from .texts.pictures import draw_sweeps, png_of
from .texts.prediction_text import record, text
from .verbs import add_json_argument, add_output_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels predict``."""
    parser.description = (
        "Predict a step with and without compression: here and over sweeps, up to which bandwidth compression pays, "
        "and which ratio of compression would be enough. The closed forms of Agarwal et al. (MLSys 2022) stand beside "
        "the timeline. Exit code 1 says that compression does not pay on this machine."
    )
    parser.epilog = "example: gckernels predict bert espresso-nvlink --sweep bandwidth=1gbit:100gbit machines=2,4,8"
    add_trace_and_machine(parser)
    parser.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="bandwidth=100mbit:100gbit, machines=2,4,8, batch=0.5,1,2 (times that of the trace), encode=1,2,4 (times "
        "the speed of codecs); LOW:HIGH is a range of values",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the sweeps; needs matplotlib")
    add_policy(parser)
    add_constraints(parser)
    add_output_argument(parser, "the results as JSON")
    add_json_argument(parser)


def run(given: argparse.Namespace, console: Console) -> Exit:
    """Predict."""
    check_one_stdin(given.trace, given.machine)
    check_policy(given.policy)
    sweeps = [sweep_from(text) for text in given.sweep]
    if given.png is not None and not sweeps:
        raise wrong_use("--png draws sweeps, and there are none", "add --sweep bandwidth=100mbit:100gbit")
    check_pictures(given.png)
    problem, caveats = posed(given)
    with planning(given, problem.trace):
        found = predict(problem, given.policy, sweeps, console.progress)
    results = record(problem, found) | caveats.record()
    contents: dict[str, str | bytes] = {}
    if given.png is not None:
        contents[given.png] = png_of(draw_sweeps(found.sweeps))
    if given.output is not None:
        contents[given.output] = json.dumps(results, indent=1, allow_nan=False) + "\n"
    for path, content in contents.items():
        write(path, content)
        console.note(f"{path} is written")
    console.show(text(problem, found, caveats))
    for line in caveats.lines():
        console.note(line)
    console.record(results)
    return Exit.OK if found.here.pays else Exit.DOES_NOT_PAY
