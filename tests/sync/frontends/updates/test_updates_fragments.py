"""Fragments of updates that are sent in turn, and arrive steps later, are those of a plain loop; nothing is lost."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import EFSignSGD, sync
from gckernels.sync.frontends.updates.schedule import Schedule
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, summed

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, after: Any = None) -> list[str]:
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(model.batch(step, dist.get_rank())).backward()
        optimizer.step()
        if after is not None:
            after()
        digests.append(digest_of(model.parameters()))
    return digests


def fragments_of(attachment: sync.Attachment) -> list[list[str]]:
    """The names of the parameters of each fragment."""
    frontend = attachment._frontend
    cut = frontend._buckets.cut(frontend.request.schedule.fragments)
    return [[slot.name for bucket in buckets for slot in bucket.slots] for buckets in cut]


class Streaming:
    """Streaming DiLoCo in plain torch: fragments that are sent in turn, and arrive after a delay."""

    def __init__(
        self, model: nn.Module, every: int, fragments: Sequence[Sequence[str]], delay: int, mixing: Any, outer: Any
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.anchors = {name: nn.Parameter(each.detach().clone()) for name, each in self.parameters.items()}
        self.outers = [outer([self.anchors[name] for name in names]) for names in fragments]
        self.ends = [-(-(i + 1) * every // len(fragments)) for i in range(len(fragments))]
        self.every, self.fragments, self.delay, self.mixing, self.steps = every, fragments, delay, mixing, 0
        self.flying: list[Any] = []

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for due, number, sent in [each for each in self.flying if each[0] == self.steps]:
            self.flying.remove((due, number, sent))
            self.arrive(number, sent)
        taken = (self.steps - 1) % self.every + 1
        if taken in self.ends:
            number = self.ends.index(taken)
            sent = {name: self.parameters[name].clone() for name in self.fragments[number]}
            for name, value in sent.items():
                self.anchors[name].grad = (self.anchors[name] - value) * (1 / dist.get_world_size())
                dist.all_reduce(self.anchors[name].grad)
            if self.delay:
                self.flying.append((self.steps + self.delay, number, sent))
            else:
                self.arrive(number, sent)

    def arrive(self, number: int, sent: dict[str, torch.Tensor]) -> None:
        self.outers[number].step()
        for name, value in sent.items():
            parameter, anchor = self.parameters[name], self.anchors[name].detach()
            if self.delay and self.mixing is None:
                parameter.copy_(anchor + (parameter - value))
            elif self.delay:
                parameter.copy_(torch.lerp(anchor, parameter, self.mixing))
            else:
                parameter.copy_(anchor)


CASES: list[tuple[int, int, int, float | None, Any]] = [
    (4, 2, 0, None, NESTEROV),
    (5, 3, 1, None, PLAIN),
    (3, 1, 2, None, NESTEROV),
    (3, 1, 3, None, PLAIN),
    (6, 2, 2, 0.5, NESTEROV),
    (4, 4, 1, 0.0, PLAIN),
]


def oracles() -> None:
    for every, number, delay, mixing, outer in CASES:
        model = build("Mlp", seed=0)
        other = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings: dict[str, Any] = {"every": every, "fragments": number, "delay": delay, "mixing": mixing}
        attachment = sync.attach(model, sync.Updates(optimizer, "Identity", outer=outer, **settings))
        fragments = fragments_of(attachment)
        assert sorted(itertools.chain(*fragments)) == sorted(dict(model.named_parameters()))
        plain = Streaming(other, every, fragments, delay, mixing, outer)
        found = trained(model, optimizer, range(20))
        assert found == trained(other, torch.optim.AdamW(other.parameters(), lr=1e-2), range(20), plain.step), (
            every,
            number,
            delay,
        )
        anchors = attachment.state_dict()["updates"]["anchors"]
        assert digest_of(anchors.values()) == digest_of(plain.anchors[name] for name in anchors)
        every_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every_rank, digest_of(anchors.values()))
        assert len(set(every_rank)) == 1
        attachment.close()


def test_fragments_of_a_plain_loop():
    """With exact averages, parameters and anchors are those of the loop in every digit."""
    values_of(run_ranks(2, oracles))


def conserved() -> None:
    """The sent updates, residuals, and changes that were not sent yet make up all changes of the parameters."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for every, number, delay in ((4, 2, 0), (4, 2, 2), (3, 1, 3)):
        model = nn.ModuleDict({name: nn.Linear(50, 40, bias=False) for name in "ab"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = {"every": every, "fragments": number, "delay": delay, "decay": 1.0}
        plan = sync.uniform_plan(model, EFSignSGD(), program="allgather")
        attachment = sync.attach(model, sync.Updates(optimizer, plan, **settings))
        weights = {name: model[name].weight for name in "ab"}
        start = {name: each.detach().double().clone() for name, each in weights.items()}
        given = {name: torch.zeros_like(each) for name, each in start.items()}
        generator = torch.Generator().manual_seed(rank)
        for step in range(22):
            for name, weight in weights.items():
                before = weight.detach().clone()
                with torch.no_grad():
                    weight.add_(torch.randn(40, 50, generator=generator))
                given[name] += weight.detach().double() - before.double()
            if step == 14:
                attachment.change_plan(sync.uniform_plan(model, "BlockQuant(bits=4)", program="allgather"))
            optimizer.step()
        state = attachment.state_dict()["updates"]
        arriving = state["arriving"] or {"means": {}, "sent": {}}
        assert bool(arriving["means"]) == bool(delay)
        for name, weight in weights.items():
            key = f"{name}.weight"
            anchor = state["anchors"][key].double()
            left = arriving["sent"].get(key)  # changes after the sending, or after the last arrival
            left = weight.detach().double() - (anchor if left is None else left.double())
            mean = arriving["means"].get(key, torch.zeros_like(weight)).double()
            held = mass_of(attachment).get(key, torch.zeros(1, 2000, dtype=torch.float64))[-1].view(40, 50)
            total = anchor - start[name] - mean - held + summed(left) / world_size
            torch.testing.assert_close(total, summed(given[name]) / world_size, rtol=0, atol=1e-4)
        assert "BlockQuant" in repr(attachment) and not attachment.is_changing
        attachment.close()


def test_nothing_is_lost():
    values_of(run_ranks(2, conserved))


def resumed() -> None:
    for every, number, delay, mixing, saved in (
        *((4, 2, 2, None, at) for at in range(5, 9)),  # with and without each fragment on its way
        *((3, 1, 2, 0.5, at) for at in (5, 7)),
        *(({0: 2, 4: 5, 10: 3}, 1, 1, None, at) for at in (6, 9)),
        (4, 4, 0, None, 6),
    ):
        settings: dict[str, Any] = {"every": every, "fragments": number, "delay": delay, "mixing": mixing}

        def setup(
            seed: int, settings: dict[str, Any] = settings
        ) -> tuple[nn.Module, torch.optim.Optimizer, sync.Attachment]:
            model = build("Mlp", seed=seed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            made = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), outer=NESTEROV, **settings))
            return model, optimizer, made

        model, optimizer, attachment = setup(0)
        trained(model, optimizer, range(saved))
        state = attachment.state_dict()
        expected = trained(model, optimizer, range(saved, 13))
        attachment.close()
        model, optimizer, attachment = setup(1)
        attachment.load_state_dict(state)
        assert trained(model, optimizer, range(saved, 13)) == expected, (settings, saved)
        attachment.close()


def test_resumed_while_a_fragment_is_on_its_way():
    values_of(run_ranks(2, resumed))


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (7, 3, 2), (10, 4, 2), (5, 5, 1), (500, 7, 71)])
def test_each_fragment_is_sent_once_in_a_round(every: int, fragments: int, delay: int):
    one = Schedule(every, fragments, delay).round_at(0)
    one.check()
    sent = {taken: one.sent_after(taken) for taken in range(1, every + 1)}
    steps = [taken for taken, number in sent.items() if number is not None]
    assert [sent[taken] for taken in steps] == list(range(fragments)) and steps[-1] == every
    gaps = [after - before for before, after in zip([steps[-1] - every, *steps], steps, strict=False)]
    assert min(gaps) >= delay


def test_rounds_grow_and_end_where_others_begin():
    schedule = Schedule({0: 2, 3: 4, 9: 3, 1000: 1})
    schedule.check()
    begins = [0]
    while begins[-1] < 15:
        begins.append(begins[-1] + schedule.round_at(begins[-1]).every)
    assert begins == [0, 2, 3, 7, 9, 12, 15]
    assert schedule.round_at(999).every == schedule.round_at(10**6).every == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (({}, 1, 0), "every must have rounds by the number of steps made before, in order from 0 on"),
        (({5: 2}, 1, 0), "from 0 on"),
        (({0: 2, 9: 3, 5: 2}, 1, 0), "in order from 0 on"),
        (({0: 2, 1.5: 3}, 1, 0), "from 0 on"),
        (({0: 2, 4: 0}, 1, 0), "every must be an int from 1 up, or have such ints by steps, got 0"),
        (({0: 2, 4: None}, 1, 0), "got None"),
        (({0: 4, 10: 4}, 3, 0), "fragments must be an int from 1 to every, 2, got 3"),
        ((0, 1, 0), "every must be an int from 1 up, or have .* got 0"),
        ((2, 3, 0), "fragments must be an int from 1 to every, 2, got 3"),
        ((2, True, 0), "fragments must be"),
        ((10, 3, 4), "delay must be an int from 0 to every // fragments, 3, .* got 4"),
        ((10, 3, -1), "delay must be"),
    ],
)
def test_refused_schedules(arguments: tuple[Any, ...], text: str):
    with pytest.raises(ValueError, match=text):
        Schedule(*arguments).check()


# -------------------------------------------------------------------- rounds that grow


def test_rounds_grow_with_the_square_of_the_rate():
    rates = [0.5, 0.75, *[1.0] * 4, *[0.5] * 9, *[0.25] * 40, 0.0, 0.0]
    for every, alpha, expected in (
        (2, None, {0: 2, 6: 5, 16: 23, 39: 18, 57: 2}),
        (1, 1.0, {0: 1, 6: 4, 18: 16, 50: 7, 57: 1}),
        (100, None, {0: 100, 57: 100}),
    ):
        rounds = sync.quadratic_rounds(rates, every, alpha)
        assert rounds == expected
        schedule, step = Schedule(rounds), 0
        schedule.check()
        while step < len(rates):
            step += schedule.round_at(step).every
        assert step == len(rates)


def test_rounds_follow_the_rate_on_both_sides_of_its_highest_value():
    rates = [0.0, 0.1, *[0.5] * 20, *[1.0] * 4, *[0.5] * 20, *[0.25] * 40]
    assert sync.quadratic_rounds(rates, both=True) == {0: 8, 8: 7, 22: 2, 26: 7, 47: 31, 78: 8, 86: 2}
    assert sync.quadratic_rounds(rates, both=True, every=10) == {0: 10, 50: 31, 81: 10, 86: 10}
    lengths = sync.quadratic_rounds([0.25] * 32 + [1.0] * 8, both=True, alpha=1.0)
    assert lengths == {0: 8, 32: 2, 40: 2}  # at most 8 before the highest rate, where the rule says 16
    steps = 400
    cosine = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0), 1.0, steps, 0.3, cycle_momentum=False
    )
    rates = []
    for _ in range(steps):
        rates.append(cosine.get_last_lr()[0])
        cosine.optimizer.step()
        cosine.step()
    schedule, rounds, step = Schedule(sync.quadratic_rounds(rates, both=True)), 0, 0
    while step < steps:
        step, rounds = step + schedule.round_at(step).every, rounds + 1
    assert rounds < steps / 4  # fewer bits than rounds of four steps


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([],), "rates must be finite numbers from 0 up"),
        (([1.0, -1.0],), "rates must be finite"),
        (([float("nan")],), "rates must be finite"),
        (([0.0],), "rates must have one above 0"),
        (([1.0], 0), "every must be an int from 1 up, got 0"),
        (([1.0], 2, 0.0), "alpha must be a number above 0, got 0.0"),
        (([1.0], 2, None, 1), "both must be True or False, got 1"),
    ],
)
def test_refused_rates(arguments: tuple[Any, ...], text: str):
    with pytest.raises((TypeError, ValueError), match=text):
        sync.quadratic_rounds(*arguments)
