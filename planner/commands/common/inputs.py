"""Inputs of the verbs that plan: traces, machines and plans by path or name, and the problem that they pose."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import replace

import torch

import gckernels
from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.accuracy.accuracy import allowed_compressors, fitted
from gckernels.sync.plans.arguments import as_method, as_weights
from gckernels.sync.plans.names import short_spec
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.programs.steps import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.trace_files import trace_names

from ...drafts.problem import Problem, shards_of
from ...drafts.rounds import UpdateRounds, is_mean
from ...machines.files import load_machine, machine_names
from ...machines.machine import BAD_ERROR, Machine, Replicas, Sharding, price_error
from ...machines.profile import Profile
from ...timeline.pricing import Pricer
from .caveats import Caveats
from .files import MAKE, reading, source
from .outcome import bad_data, wrong_use

ACCURACIES = ("exact", "safe", "aggressive")


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add ``TRACE``, ``MACHINE`` and the arguments that limit which plans may be chosen."""
    names = "or the name of a shipped one"
    shipped = f"shipped traces: {', '.join(trace_names())}; shipped machines: {', '.join(machine_names())}"
    parser.epilog = f"{parser.epilog or ''}; {shipped}".removeprefix("; ")
    parser.add_argument("trace", metavar="TRACE", help=f"file of gckernels trace, {names}; - is stdin")
    parser.add_argument("machine", metavar="MACHINE", help=f"file of gckernels profile, a description, {names}")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--accuracy",
        default="safe",
        metavar="RULE",
        help="exact, safe, aggressive, or the largest relative error of a gradient, such as 0.1 (default: safe)",
    )
    choice.add_argument(
        "--compressors",
        nargs="+",
        metavar="SPEC",
        help="allow these compressors whatever their error, such as 'BlockQuant(bits=4)' TopK",
    )
    parser.add_argument("--host", action="store_true", help="encode and decode on the CPU of the machine, too")
    parser.add_argument(
        "--frontend",
        choices=[frontend.value for frontend in Frontend],
        help="plan for a DDP model with its buckets, for a bare module, which launches what the plan says, or for a "
        "model of fully_shard over all ranks (fsdp), or with shards inside the machines and replicas between them "
        "(hsdp) (default: fsdp if the trace has gathers of parameters, ddp if it has DDP's buckets)",
    )


def trace_of(path: str) -> ModelTrace:
    """The trace in a file, on stdin, or shipped with a name."""
    with reading(path, "trace"):
        return ModelTrace.load(path)


def machine_of(path: str) -> Machine:
    """The machine in a file, on stdin, or shipped with a name.

    Raises:
        CommandError: it cannot be read, or another release of gckernels has measured it.
    """
    with reading(path, "machine"):
        machine = load_machine(source(path))
    if isinstance(machine, Profile) and machine.stamp.gckernels != gckernels.__version__:
        versions = f"gckernels {machine.stamp.gckernels} has measured it, and this is {gckernels.__version__}"
        raise bad_data(f"{path}: {versions}, whose compressors may take another time", MAKE["machine"])
    return machine


def plan_of(path: str) -> Plan:
    """The plan in a file or on stdin."""
    with reading(path, "plan"):
        return Plan.load(source(path))


def with_sizes_of(trace: ModelTrace, plan: Plan) -> Plan:
    """The plan for the sizes of the tensors of a trace: those of shards, or of whole parameters."""
    shapes = {tensor.name: tensor.shape or (tensor.numel,) for tensor in trace.tensors}
    return replace(plan.with_shapes(shapes), prediction=plan.prediction)


def check_pictures(path: str | None) -> None:
    """Refuse ``--png`` where matplotlib is not installed, before anything is computed.

    Raises:
        CommandError: it is given, and matplotlib is not installed.
    """
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise wrong_use("--png needs matplotlib, which is not installed", "pip install matplotlib")


def problem_of(
    given: argparse.Namespace,
    trace: ModelTrace,
    machine: Machine,
    weights: str | None = None,
    rounds: UpdateRounds | None = None,
) -> tuple[Problem, Caveats]:
    """The problem of parsed arguments, and its caveats.

    Args:
        given: the arguments of :func:`add_problem`.
        trace: the trace of a training step.
        weights: the spec of the compressor of gathered parameters; ``None`` if they are sent as they are.
        rounds: the rounds of these steps whose updates are averaged; ``None`` if gradients are.

    Raises:
        CommandError: an argument is wrong, or the inputs do not fit it.
    """
    accuracy = accuracy_of(given)
    if rounds is not None:
        trace = rounds.trace
    frontend = Frontend.named(given.frontend or ("fsdp" if trace.gathers else "ddp" if trace.buckets else "module"))
    if rounds is not None and frontend.traits.is_wrapped:
        raise wrong_use(f"--every is for bare modules, not --frontend {frontend.value}", "leave --frontend out")
    pricer = _pricer_of(machine, frontend)
    if (sharding := pricer.sharding) is not None and sharding.inside is not None:
        trace = shards_of(trace, sharding.inside)
    places = (Place.DEVICE, Place.HOST) if given.host else (Place.DEVICE,)
    with reading(given.trace, "trace", (ValueError,)):
        allowed = allowed_compressors(trace, accuracy)
        if any(allowed.values()) and math.isinf(price_error(machine, Identity())):
            lacking = "it has no price of Identity, which all plans that compress need for small tensors"
            raise bad_data(f"{given.machine}: {lacking}", MAKE["machine"])
        errors = {method: price_error(machine, method) for methods in allowed.values() for method in methods}
        most = max(BAD_ERROR, min(errors.values(), default=0.0))  # a bad price is better than none
        priced = {method: math.isfinite(error) and error <= most for method, error in errors.items()}
        allowed = {name: tuple(filter(priced.get, methods)) for name, methods in allowed.items()}
        if rounds is not None:
            allowed = {name: tuple(filter(is_mean, methods)) for name, methods in allowed.items()}
        problem = Problem(trace, pricer, frontend, allowed, places, _weights_of(weights, frontend), rounds)
    unpriced = dict.fromkeys(short_spec(method) for method, is_priced in priced.items() if not is_priced)
    named = accuracy if isinstance(accuracy, list) else []
    reasons = {short_spec(method): why_unusable(method, problem) for method in named}
    unusable = {spec: why for spec, why in reasons.items() if why is not None}
    return problem, Caveats(problem, tuple(dict.fromkeys(map(short_spec, priced))), tuple(unpriced), unusable)


def problem_of_rounds(given: argparse.Namespace, trace: ModelTrace, machine: Machine, rounds: UpdateRounds) -> Problem:
    """The problem of rounds of updates with the same arguments, which may be for gradients."""
    return problem_of(argparse.Namespace(**vars(given) | {"frontend": None}), trace, machine, None, rounds)[0]


def _pricer_of(machine: Machine, frontend: Frontend) -> Pricer:
    """The prices for a kind of model.

    Raises:
        CommandError: the machine has no replicas.
    """
    if frontend.replicates:
        if machine.topology.machines == 1:
            raise wrong_use("--frontend hsdp needs replicas on several machines", "give a machine with several")
        return Pricer(Replicas(machine), Sharding(machine.topology.devices))
    return Pricer(machine, Sharding() if frontend.gathers else None)


def _weights_of(spec: str | None, frontend: Frontend) -> Codec | None:
    """The compressor of gathered parameters.

    Raises:
        CommandError: ``--weights`` is not valid.
    """
    if spec is None:
        return None
    if not frontend.gathers:
        raise wrong_use(f"--weights is for models of --frontend fsdp, not {frontend.value}", "leave it out")
    try:
        return as_weights("--weights", spec)
    except ValueError as error:
        raise wrong_use(error, "leave it out for parameters that are sent as they are") from None


def methods_of(specs: Iterable[str]) -> list[Compressor]:
    """The compressors of ``--compressors``.

    Raises:
        CommandError: one of the specs is not valid.
    """
    try:
        return [as_method("--compressors", spec) for spec in specs]
    except ValueError as error:
        raise wrong_use(error, "gckernels compressors lists all compressors") from None


def accuracy_of(given: argparse.Namespace) -> str | float | list[Compressor]:
    """The rule of accuracy that the arguments ``--accuracy`` and ``--compressors`` say.

    Raises:
        CommandError: one of them is not valid.
    """
    accuracy: str = given.accuracy
    if given.compressors is not None:
        return methods_of(given.compressors)
    if accuracy in ACCURACIES:
        return accuracy
    try:
        number = float(accuracy)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        allowed = f"{', '.join(ACCURACIES)} or a number from 0 to 1"
        raise wrong_use(f"--accuracy must be {allowed}, got {accuracy!r}", "gckernels plan --help explains them")
    return number


def why_unusable(method: Compressor, problem: Problem) -> str | None:
    """Why no gradient of a problem may use a method even if it is named; ``None`` if one may."""
    trace = problem.trace
    if method == Identity():
        return "it compresses nothing"
    if problem.rounds is not None and not is_mean(method):
        return "its results are not the mean of updates"
    if any(allowed_compressors(trace, [method]).values()):
        return None
    tensors = [tensor for tensor in trace.tensors if tensor.dtype in GRAD_DTYPES]
    if not tensors:
        return f"gradients are of {_names(tensor.dtype for tensor in trace.tensors)}, it takes {_names(GRAD_DTYPES)}"
    if any(fitted(method, tensor) for tensor in tensors):
        return "it is for matrices, and all gradients are vectors"
    if not isinstance(method, Codec) and all(tensor.shape is None for tensor in tensors):
        return "it needs the shapes of matrices, which the trace does not have"
    return "no gradient has a shape for it"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
