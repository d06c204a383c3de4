"""Inputs of the verbs that plan: traces, machines and plans by path or name, and the problem that they pose."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

import gckernels
from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...accuracy.accuracy import allowed_compressors, fitted, start_step
from ...planner.choice import policy_of
from ...planner.drafts.problem import Problem, ProblemError
from ...planner.machines.files import load_machine, machine_names
from ...planner.machines.machine import Machine, MachineError, has_prices
from ...planner.machines.profile import Profile
from ...planner.timeline.pricing import Pricer
from ...plans.arguments import as_method
from ...plans.names import short_spec
from ...plans.plan import Frontend, Plan, PlanError
from ...programs.steps import Place
from ...traces.model_trace import ModelTrace
from ...traces.shipped_traces import trace_names
from .caveats import Caveats
from .files import STANDARD, source
from .kinds import MAKE_MACHINE, MAKE_TRACE, reading_kind
from .outcome import CommandError, bad_data, wrong_use

ACCURACIES = ("exact", "safe", "aggressive")


def add_trace_and_machine(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments ``TRACE`` and ``MACHINE``."""
    names = "or the name of a shipped one"
    shipped = f"shipped traces: {', '.join(trace_names())}; shipped machines: {', '.join(machine_names())}"
    parser.epilog = f"{parser.epilog or ''}; {shipped}".removeprefix("; ")
    parser.add_argument("trace", metavar="TRACE", help=f"file of gckernels trace, {names}; - is stdin")
    parser.add_argument("machine", metavar="MACHINE", help=f"file of gckernels profile, a description, {names}")


def add_trace_and_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--trace`` and ``--machine``, for verbs whose input is a plan."""
    names = "or the name of a shipped one"
    parser.add_argument("--trace", metavar="TRACE", required=True, help=f"the trace of the model, {names}")
    parser.add_argument("--machine", metavar="MACHINE", required=True, help=f"the machine, {names}")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add ``--policy``."""
    help_ = "the policy that chooses the plan, or all:SPEC for one compressor everywhere (default: auto)"
    parser.add_argument("--policy", default="auto", metavar="NAME", help=help_)


def check_policy(name: str) -> None:
    """Refuse a policy that does not exist.

    Raises:
        CommandError: it does not.
    """
    try:
        policy_of(name)
    except ProblemError as error:
        raise wrong_use(f"--{error}", "leave it out for auto") from None


def no_plan(policy: str, error: ProblemError, trace: ModelTrace) -> CommandError:
    """The error for a policy that has no plan for a trace."""
    spec = policy.removeprefix("all:")
    if spec != policy:
        (method,) = methods_of([spec])
        if (why := why_unusable(method, trace)) is not None:
            return wrong_use(f"--policy {policy}: no gradient of {trace.model} may use it: {why}", "choose another one")
        return wrong_use(f"--{error}", f"--compressors {shlex.quote(spec)} allows it, whatever its error is")
    return wrong_use(f"--policy {error}", "choose another one, or leave it out for auto")


@contextmanager
def planning(given: argparse.Namespace, trace: ModelTrace) -> Iterator[None]:
    """A context in which errors of policies, traces and machines become those of the command, with a remedy."""
    try:
        yield
    except ProblemError as error:
        raise no_plan(given.policy, error, trace) from None
    except PlanError as error:
        raise bad_data(f"{given.trace}: {error}", MAKE_TRACE) from None
    except MachineError as error:
        raise bad_data(f"{given.machine}: {error}", MAKE_MACHINE) from None


def start_step_of(given: argparse.Namespace) -> int:
    """The first step that is compressed under the rule of accuracy of parsed arguments.

    Raises:
        CommandError: ``--steps`` is missing or not valid.
    """
    try:
        return start_step(accuracy_of(given.accuracy, given.compressors), given.steps)
    except ValueError as error:
        raise wrong_use(f"--steps: {error}", "give the steps of the whole training, as in --steps 10000") from None


def add_constraints(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that limit which plans may be chosen."""
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
        choices=[each.value for each in Frontend],
        help="plan for a DDP model with its buckets, or for a bare module, which launches what the plan says "
        "(default: ddp if the trace has DDP's buckets)",
    )


def trace_of(path: str) -> ModelTrace:
    """The trace in a file, on stdin, or shipped with a name."""
    with reading_kind(path, "trace"):
        return ModelTrace.load(path)


def machine_of(path: str) -> Machine:
    """The machine in a file, on stdin, or shipped with a name.

    Raises:
        CommandError: it cannot be read, or another release of gckernels has measured it.
    """
    with reading_kind(path, "machine"):
        machine = load_machine(source(path))
    if isinstance(machine, Profile) and machine.stamp.gckernels != gckernels.__version__:
        versions = f"gckernels {machine.stamp.gckernels} has measured it, and this is {gckernels.__version__}"
        raise bad_data(f"{path}: {versions}, whose compressors may take another time", MAKE_MACHINE)
    return machine


def plan_of(path: str) -> Plan:
    """The plan in a file or on stdin."""
    with reading_kind(path, "plan"):
        return Plan.load(source(path))


def check_one_stdin(*paths: str) -> None:
    """Refuse two inputs that would both be read from stdin."""
    if sum(path == STANDARD for path in paths) > 1:
        raise wrong_use(f"only one input can be {STANDARD}, which is stdin", "name files")


def check_pictures(path: str | None) -> None:
    """Refuse ``--png`` where matplotlib is not installed, before anything is computed.

    Raises:
        CommandError: it is given, and matplotlib is not installed.
    """
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise wrong_use("--png needs matplotlib, which is not installed", "pip install matplotlib")


def frontend_of(given: str | None, trace: ModelTrace) -> Frontend:
    """The way to attach the plan: the given one, or else DDP if the trace has its buckets."""
    if given is None:
        return Frontend.DDP if trace.buckets else Frontend.MODULE
    return Frontend(given)


def posed(given: argparse.Namespace) -> tuple[Problem, Caveats]:
    """The problem that ``TRACE`` and ``MACHINE`` pose, and its caveats, for a verb with a policy.

    Raises:
        CommandError: as for :func:`problem_of`, or the machine lacks prices.
    """
    problem, caveats = problem_of(given, trace_of(given.trace), machine_of(given.machine))
    caveats.check(given.machine)
    return problem, caveats


def problem_of(given: argparse.Namespace, trace: ModelTrace, machine: Machine) -> tuple[Problem, Caveats]:
    """The problem of parsed arguments, and its caveats.

    Args:
        given: the arguments of :func:`add_constraints`.
        trace: the trace.
        machine: the machine.

    Raises:
        CommandError: an argument is wrong, or the inputs do not fit it.
    """
    try:
        accuracy = accuracy_of(given.accuracy, given.compressors)
        allowed = allowed_compressors(trace, accuracy)
        places = (Place.DEVICE, Place.HOST) if given.host else (Place.DEVICE,)
        if any(allowed.values()) and not has_prices(machine, Identity()):
            lacking = "it has no good price of Identity, which all plans that compress need for small tensors"
            raise bad_data(f"{given.machine}: {lacking}", f"{MAKE_MACHINE}, with nothing else running")
        priced = {method: has_prices(machine, method) for methods in allowed.values() for method in methods}
        allowed = {name: tuple(filter(priced.get, methods)) for name, methods in allowed.items()}
        problem = Problem(trace, Pricer(machine), frontend_of(given.frontend, trace), allowed, places)
        unpriced = (short_spec(method) for method, is_priced in priced.items() if not is_priced)
        specs = tuple(dict.fromkeys(map(short_spec, priced)))
        named = accuracy if isinstance(accuracy, list) else []
        reasons = {short_spec(method): why_unusable(method, trace) for method in named}
        unusable = {spec: why for spec, why in reasons.items() if why is not None}
        return problem, Caveats(trace, machine, specs, tuple(dict.fromkeys(unpriced)), unusable)
    except ValueError as error:
        raise bad_data(f"{given.trace}: {error}", MAKE_TRACE) from None


def methods_of(specs: Iterable[str]) -> list[Compressor]:
    """The compressors of ``--compressors``.

    Raises:
        CommandError: one of the specs is not valid.
    """
    try:
        return [as_method("--compressors", spec) for spec in specs]
    except ValueError as error:
        raise wrong_use(error, "gckernels compressors lists all compressors") from None


def accuracy_of(accuracy: str, compressors: list[str] | None) -> str | float | list[Compressor]:
    """The rule of accuracy that the arguments ``--accuracy`` and ``--compressors`` say.

    Raises:
        CommandError: one of them is not valid.
    """
    if compressors is not None:
        return methods_of(compressors)
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


def why_unusable(method: Compressor, trace: ModelTrace) -> str | None:
    """Why no gradient of a trace may use a method even if it is named; ``None`` if one may."""
    if method == Identity():
        return "it compresses nothing"
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
