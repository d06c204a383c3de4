"""Uniform candidates: plans with one compressor for the whole model, which need no measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..accuracy.accuracy import fitted, is_safe, unfitted
from ..communication.agreement import Failure, together
from ..plans.builders import plan_of_compressors, plan_of_parameters
from ..plans.plan import Plan
from ..plans.units import takes_shards
from ..programs.named import default_program
from ..programs.spans import MEAN, Span
from ..traces.model_trace import ModelTrace
from ..traces.traced_tensors import TracedTensor
from .trials.rules import Phase
from .trials.training import Steps, TunedTraining

MOST = 8
"""The largest number of plans, for rules that are long lists."""
_SIDE = 1 << 10


def uniform_plans(training: TunedTraining, stage: Phase, trace: ModelTrace) -> Steps[tuple[Plan, ...] | Failure]:
    """A plan for each compressor of a rule, and the same with encoded parameters if the training allows it. Collective.

    Args:
        stage: the rule of accuracy.
        trace: the model, with the errors that are known of compressors.
    """
    frontend = training.frontend

    def made() -> tuple[Plan, ...]:
        weights, world_size = frontend.request.gathered_by, frontend.runtime.world_size
        most = MOST if weights is None else MOST // 2
        sent, span, otherwise = frontend.sent_parameters(), frontend.kind.span(), frontend.request.for_vectors
        found = candidates(sent, stage, trace, world_size, span, most, otherwise)
        if weights is not None:
            found = (*(replace(plan, weights=weights) for plan in found), *found)
        return tuple(plan for plan in map(training.checked, found) if plan.compresses)

    return together(frontend.group, frontend.device, made)
    yield


def candidates(
    parameters: Mapping[str, torch.nn.Parameter],
    stage: Phase,
    trace: ModelTrace,
    world_size: int,
    span: Span = MEAN,
    most: int = MOST,
    otherwise: Callable[[Compressor], Compressor] = lambda method: Identity(),
) -> tuple[Plan, ...]:
    """A plan for each compressor of a rule, the one first that sends least, at most ``most``.

    Where the rule does not allow the compressor, as with signs for an embedding, the plan has the next one that sends
    more and goes through the same program. A compressor with a program of its own, such as one of low rank, leaves
    matrices that it may not take to the next one that loses nothing, with its program. If there is none, as for
    vectors, the plan is exact there. Where the mean ends in shards, one more plan sends everything exactly: FSDP2 on
    Gloo overlaps nothing, and sends twice as much.

    Args:
        parameters: the parameters by name.
        stage: the rule of accuracy.
        trace: the model, with the errors that are known of compressors.
        world_size: the number of ranks.
        span: the states between which the programs of the plans go.
        most: the largest number of plans.
        otherwise: returns what sends a parameter beside a compressor, if the rule allows none for it.
    """
    usable = (each for each in stage.methods if each != Identity() and (span == MEAN or takes_shards(each)))
    ordered = sorted(usable, key=_payload_nbytes)
    tensors = trace.by_name
    plans: dict[str, Plan] = {}
    for at, method in enumerate(ordered):
        program = default_program(method, world_size, span)
        others = [each for each in ordered[at:] if default_program(each, world_size, span) == program]
        apart = [each for each in ordered[at:] if is_safe(each)] if others == [method] else []
        chosen, programs = {}, {}
        for name, parameter in parameters.items():
            choices = [*others, *apart] if parameter.dim() > 1 else others
            found = next((each for each in choices if _may_use(stage, each, tensors[name])), None)
            chosen[name] = otherwise(method) if found is None else found
            programs[name] = default_program(found, world_size, span) if found in apart else program
        plan = plan_of_compressors(parameters, chosen, programs, world_size, span=span)
        if any(unfitted(unit.compressor) == method for unit in plan.units):
            plans.setdefault(plan.fingerprint(), plan)
    exact = () if span == MEAN else (plan_of_parameters(parameters, Identity(), world_size, span=span),)
    return (*tuple(plans.values())[: most - len(exact)], *exact)


def _may_use(stage: Phase, method: Compressor, tensor: TracedTensor) -> bool:
    return fitted(method, tensor) is not None and stage.accuracy.allows(method, tensor)


def _payload_nbytes(method: Compressor) -> int:
    """The bytes of all payloads of a large square matrix."""
    of_matrix = method.fit((_SIDE, _SIDE))
    return sum(of_matrix.round_nbytes(_SIDE * _SIDE, number) for number in range(of_matrix.rounds))
