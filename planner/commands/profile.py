"""The verb ``profile``: measures collectives, codecs and overheads of the ranks of torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from gckernels.sync.plans.numbers import duration, percent, three_digits

from ..machines.curves import CodecModel, CollectiveCurve
from ..machines.profile import Profile
from ..profiling import measure
from .common.console import Console
from .common.files import add_outputs
from .common.inputs import methods_of
from .common.outcome import Outcome, Part, wrong_use
from .common.tables import table

_AGAIN = "measure again, with nothing else running"
_START = "torchrun --nproc-per-node 2 -m gckernels profile -o machine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels profile``."""
    parser.description = (
        "Measure what collectives, compressors and the engine cost on the ranks of torchrun, for gckernels plan. "
        f"For example: {_START}"
    )
    parser.epilog = (
        "What every plan needs is measured even if the time is over. Measurements with errors above 10 % are named, "
        "and predictions say how wrong they may be."
    )
    add_outputs(parser, "the profile")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that it may take (default: 60)")
    parser.add_argument(
        "--compressors", nargs="+", metavar="SPEC", help="compressors such as EFSignSGD or 'BlockQuant(bits=4)'"
    )
    parser.add_argument(
        "--machines", type=int, help="number of machines, if ranks share some (default: every rank is a machine)"
    )


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Measure a profile.

    Raises:
        CommandError: the arguments are wrong, or this is no rank of torchrun.
    """
    if "RANK" not in os.environ:
        raise wrong_use("profile measures several ranks", f"start them with {_START}")
    methods = None if given.compressors is None else methods_of(given.compressors)
    import torch
    import torch.distributed as dist

    from gckernels.devices import device_here

    backend = dist.get_default_backend_for_device(device_here())
    if not dist.is_backend_available(backend):
        backend = "gloo"
    if backend != "gloo":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)

    def progress(share: float, name: str) -> None:
        if sys.stderr.isatty():
            console.progress(share, name)
        else:
            console.note(f"{share:.0%} {name}")

    try:
        topology = _topology(given.machines, dist.get_world_size())
        profile = measure.profile(given.seconds, methods, topology=topology, progress=progress)
    except (TypeError, ValueError) as error:
        raise wrong_use(error, "gckernels profile --help lists the arguments") from None
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    notes = [f"doubtful: {each}" for each in profile.doubtful]
    if profile.bad:
        uses = "plans use them only where they must, and say how wrong predictions may be then"
        notes.append(f"disturbed: {', '.join(profile.bad)}; {uses}; {_AGAIN} or with more --seconds")
    return Outcome([Part(summary(profile), profile.to_json())], {given.output: profile.to_text()}, notes)


def _topology(machines: int | None, world_size: int) -> tuple[int, int] | None:
    if machines is None:
        return None
    if machines < 1 or world_size % machines:
        raise ValueError(f"--machines must divide the number of ranks, {world_size}, got {machines}")
    return machines, world_size // machines


def summary(profile: Profile) -> str:
    """The tables of a profile, for people."""
    stamp, overheads = profile.stamp, profile.overheads
    collectives: dict[str, Callable[[CollectiveCurve], str]] = {
        "collective": str,
        "latency": lambda each: duration(each.curve.latency_s),
        "large": lambda each: f"{three_digits(each.curve.nbytes[-1] / each.curve.wall_s[-1] / 1e6)} MB/s",
        "error": lambda each: _error(each.error),
    }
    codecs: dict[str, Callable[[CodecModel], str]] = {
        "codec": str,
        "elements": lambda each: f"{three_digits(4e-9 / max(each.coefficients.element_s, 1e-15))} GB/s",
        "per unit": lambda each: f"{three_digits(each.coefficients.unit_s * 1e6)} us",
        "error": lambda each: _error(each.error),
    }
    sharing = [
        f"one {level.value} collective can use {percent(share)} of its link" for level, share in profile.sharing.items()
    ]
    lines = [
        f"{profile.name}; {stamp.device}; {three_digits(profile.cores)} cores per rank; {stamp.seconds:.0f} s",
        "",
        table(profile.collectives, collectives),
        "",
        table(profile.codecs, codecs),
        "",
        *sharing,
        f"a stage takes {three_digits(overheads.stage_s * 1e6)} us, a hook {three_digits(overheads.hook_s * 1e6)} us",
    ]
    if profile.collectives and profile.codecs:
        lines.append(f"predictions are expected to be off by {percent(profile.margin)}")
    left_out: dict[str, list[str]] = {}  # by the reason
    for part in profile.left_out:
        name, _, reason = part.rpartition(": ")
        left_out.setdefault(reason, []).append(name)
    return "\n".join([*lines, *(f"not measured, {reason}: {'; '.join(each)}" for reason, each in left_out.items())])


def _error(error: float | None) -> str:
    return "unknown" if error is None else percent(error)
