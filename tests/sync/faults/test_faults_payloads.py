"""A payload damaged in transit has the same effect on all ranks, within its own unit, and enters no residual."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gckernels
from ddp_models import attached
from gckernels import sync
from gckernels.codec import Codec
from gckernels.sync.communication.links import RankConnections
from gckernels.sync.messages import collectives
from gckernels.sync.programs import ALLGATHER, ALLTOALL, PARAMETER_SERVER, Program, ring
from gckernels.sync.resources.stage import Issue, Wait
from gckernels.toolkit.payload import ALIGN_NBYTES, STATUS_OK
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

FAULTY = 1  # the rank whose payloads are damaged

COMPRESSORS = sorted(
    name for name, method in gckernels.COMPRESSORS.items() if issubclass(method, Codec) and not method().traits.summable
)
FEW = ("BlockQuant", "EFSignSGD", "DGC", "TopK", "TernGrad")


def programs(compressor: str, world_size: int) -> dict[str, Program]:
    found = {"allgather": ALLGATHER, "alltoall": ALLTOALL, "parameter server": PARAMETER_SERVER}
    method = gckernels.from_spec(compressor)
    if not method.traits.applies_momentum and method.traits.averages:
        found["ring"] = ring(world_size)
    return found


CALLS = {
    # the first and the last collective that sends payloads
    "allgather": ("all_gather", "all_gather"),
    "alltoall": ("all_to_all", "all_gather"),
    "parameter server": ("gather", "broadcast"),
    "ring": ("hop", "all_gather"),
}


# -------------------------------------------------------------------- damage


def _status(payload: torch.Tensor) -> None:
    payload[0] ^= 1


def _ones(payload: torch.Tensor) -> None:
    payload.fill_(0xFF)


def _half(payload: torch.Tensor) -> None:
    payload[payload.numel() // 2 :] = 0


def _random(payload: torch.Tensor) -> None:
    """Fill the payload with random bytes except for its status word, so that no decoder can detect the damage."""
    generator = torch.Generator().manual_seed(payload.numel())
    payload[4:] = torch.randint(0, 256, payload[4:].shape, dtype=torch.uint8, generator=generator)


DAMAGES: dict[str, Callable[[torch.Tensor], None]] = {
    "status": _status,
    "ones": _ones,
    "half": _half,
    "random": _random,
}
SHOWN = ("status", "ones")  # the damages that show, because the status word is wrong


class Wire:
    """Damages the first payload of the next collective of a kind, between encoding and sending."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.armed: tuple[str, Callable[[torch.Tensor], None]] | None = None
        self.damaged = 0
        for name, found in (
            ("all_gather", "bind_all_gather"),
            ("all_to_all", "bind_all_to_all"),
            ("hop", "_bind_hop"),
        ):
            patch.setattr(collectives, found, self._exchanging(name, getattr(collectives, found)))
        for name in ("gather", "broadcast"):
            patch.setattr(dist, name, self._sending(name, getattr(dist, name)))

    def _exchanging(self, name: str, bind: Callable[..., Issue]) -> Callable[..., Issue]:
        def bound(link: RankConnections, sent: torch.Tensor, received: torch.Tensor) -> Issue:
            return self._damaging(name, bind(link, sent, received), sent)

        return bound

    def _damaging(self, name: str, exchange: Issue, sent: torch.Tensor) -> Issue:
        def damaging() -> Wait:
            self._damage(name, sent)
            return exchange()

        return damaging

    def _sending(self, name: str, send: Callable[..., Any]) -> Callable[..., Any]:
        def sending(*args: Any, group: dist.ProcessGroup, **where: Any) -> Any:
            if where.get("group_src") in (None, dist.get_rank(group)):
                self._damage(name, args[0])
            return send(*args, group=group, **where)

        return sending

    def _damage(self, name: str, sent: torch.Tensor) -> None:
        if self.armed is None or self.armed[0] != name or sent.dtype != torch.uint8:
            return
        sent = sent.view(-1)
        words = sent[: sent.numel() // ALIGN_NBYTES * ALIGN_NBYTES].view(torch.int32)[:: ALIGN_NBYTES // 4]
        starts = (words == STATUS_OK).nonzero().flatten().tolist()
        stop = starts[1] * ALIGN_NBYTES if len(starts) > 1 else sent.numel()
        self.armed[1](sent[starts[0] * ALIGN_NBYTES : stop])
        self.armed = None
        self.damaged += 1


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    with pytest.MonkeyPatch.context() as patch:
        yield Wire(patch)


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Seen:
    """The state after a step.

    Attributes:
        digest: digest of the bits of all gradients.
        gradients: digests of the gradients by parameter.
        not_finite: parameters whose gradients are not finite.
        residuals: whether all residuals are finite.
        damaged: number of payloads that this rank has damaged.
    """

    digest: str
    gradients: dict[str, str]
    not_finite: list[str]
    residuals: bool
    damaged: int


Faults = list[tuple[str, str] | None]


def faults_of(program: str, clean: bool = False) -> Faults:
    """The collective and the damage of every step: each damage to each collective, followed by a good step.

    The worst damage comes last, because residuals after it are finite but otherwise arbitrary.
    """
    first, last = CALLS[program]
    found: Faults = [None, None]
    for damage in DAMAGES:
        for call in dict.fromkeys((first, last)):
            found += [(call, damage), None]
    return [None] * 4 if clean else found


def train(compressor: str, program: Program, faults: Faults, front: str, unused: bool) -> list[Seen]:
    """Train with constant parameters, because a NaN in a parameter would remain, and return the state after every
    step."""
    rank = dist.get_rank()
    module = build("Backwards")  # every rank has a part of every parameter
    plan = sync.uniform_plan(module, compressor, program=program, exempt=None)
    finds = {"find_unused_parameters": unused}
    model, taken = attached(front, module, plan, finds, **finds if front == "module" else {})
    steps = []
    with wire() as sent:
        for step, fault in enumerate(faults):
            if fault is not None and rank == FAULTY:
                sent.armed = fault[0], DAMAGES[fault[1]]
            module.zero_grad()
            model(module.batch(step, rank)).backward()
            sent.armed = None
            gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
            kept = [tensor for kind in taken.state_dict()["feedback"].values() for tensor in kind.values()]
            steps.append(
                Seen(
                    digest_of(gradients.values()),
                    {name: digest_of([grad]) for name, grad in gradients.items()},
                    [name for name, grad in gradients.items() if not grad.isfinite().all()],
                    all(bool(tensor.isfinite().all()) for tensor in kept),
                    sent.damaged,
                )
            )
    taken.close()
    return steps


def trained(settings: list[tuple[str, str, str, bool]]) -> list[tuple[list[Seen], list[Seen]]]:
    """For every setting: the states after the steps with faults, and after its first steps without faults."""
    found = []
    for compressor, name, front, unused in settings:
        program = programs(compressor, dist.get_world_size())[name]
        with_faults, without = (
            train(compressor, program, faults_of(name, clean), front, unused) for clean in (False, True)
        )
        found.append((with_faults, without))
    return found


def check(world_size: int, settings: list[tuple[str, str, str, bool]]) -> None:
    ranks = values_of(run_ranks(world_size, trained, settings, group_timeout_s=30))
    for setting, *found in zip(settings, *ranks, strict=True):
        faults = faults_of(setting[1])
        for step, fault in enumerate(faults):
            where = (setting, step, fault)
            seen = [steps[step] for steps, _ in found]
            assert len({each.digest for each in seen}) == 1, f"{where}: ranks differ"
            assert all(each.residuals for each in seen), f"{where}: a residual is not finite"
            if fault is None:
                before_random = not any(each is not None and each[1] == "random" for each in faults[:step])
                assert not (seen[0].not_finite and before_random), f"{where}: a good step is not"
            elif fault[1] in SHOWN:
                # a payload belongs to one parameter, and the memory of the others is untouched
                assert len(seen[0].not_finite) == 1, f"{where}: {seen[0].not_finite}"
        armed = sum(fault is not None for fault in faults)
        assert found[FAULTY][0][-1].damaged == armed, f"{setting}: not all was damaged"
        for steps, clean in found:
            assert [each.digest for each in steps[:2]] == [each.digest for each in clean[:2]]
            differing = [name for name in clean[2].gradients if steps[2].gradients[name] != clean[2].gradients[name]]
            assert differing == steps[2].not_finite, f"{setting}: more than the damaged unit has changed"
            if setting[1] == "allgather":  # no rank encodes the damaged values again, so the next step is normal
                assert steps[3].digest == clean[3].digest, setting


# `make test` takes the programs of the compressors in turn
@pytest.mark.parametrize(
    ("compressor", "program"),
    [
        pytest.param(compressor, program, marks=[] if number == index % len(found) else [pytest.mark.slow])
        for index, compressor in enumerate(COMPRESSORS)
        for found in [list(programs(compressor, 2))]
        for number, program in enumerate(found)
    ],
)
def test_two_ranks(compressor, program):
    check(2, [(compressor, program, "module", False)])


# `make test` takes one program of every compressor, and every program at least once
@pytest.mark.parametrize(
    ("compressor", "program", "unused"),
    [
        pytest.param(compressor, program, unused, marks=[] if is_quick else [pytest.mark.slow])
        for index, compressor in enumerate(FEW)
        for found in [list(programs(compressor, 4))]
        for number, program in enumerate(found)
        for unused in (False, True)
        for is_quick in [number == index % len(found) and unused == bool(index % 2)]
    ],
)
def test_four_ranks(compressor, program, unused):
    """Where parameters may be unused, decoding and the next encoding are two calls."""
    check(4, [(compressor, program, "module", unused)])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_hook(world_size):
    check(world_size, [("EFSignSGD", program, "hook", False) for program in CALLS])
