"""Trainings of random models by averaged updates, in random patterns, beside local SGD in plain torch.

Rounds that are exact, whole and without a delay must have the parameters and buffers of the plain loop; all others must
be the same on all ranks where they promise it, and go on from a state in the same way whenever it is loaded. Many
trainings, with a count of them at the end::

    PYTHONPATH=. python tests/support/fuzzed_updates.py --seeds 0 100
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fuzzed_trainings
from gckernels import sync
from ranks import run_ranks, values_of
from workloads import digest_of

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)


class Net(nn.Module):
    """A network with a batch norm, a part that is frozen at times, and an expert of each rank."""

    def __init__(self, seed: int, has_expert: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)
        self.part = nn.Linear(6, 6)
        self.empty = nn.Parameter(torch.empty(0, 2))
        torch.manual_seed(1000 * seed + dist.get_rank())
        self.expert = nn.Linear(6, 6) if has_expert else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(torch.tanh(self.norm(self.first(x))))
        hidden = hidden + self.part(x)
        return (hidden if self.expert is None else self.expert(hidden)).square().mean()

    def own(self) -> list[torch.Tensor]:
        """The parameters that each rank has alone."""
        return [] if self.expert is None else list(self.expert.parameters())

    def shared(self) -> list[torch.Tensor]:
        """The parameters and buffers that are the same on all ranks behind a round."""
        own = {id(each) for each in self.own()}
        named = [each for each in self.parameters() if id(each) not in own and each.numel()]
        return [*named, self.norm.running_mean, self.norm.running_var]


class Loop:
    """Local SGD, or DiLoCo, in plain torch."""

    def __init__(self, model: Net, optimizers: list[torch.optim.Optimizer], outer: Any) -> None:
        self.model, self.optimizers = model, optimizers
        own = {id(each) for each in model.own()}
        self.parameters = [each for each in model.parameters() if id(each) not in own and each.numel()]
        self.anchors = [nn.Parameter(each.detach().clone()) for each in self.parameters]
        self.outer = outer(self.anchors)

    @torch.no_grad()
    def average(self) -> None:
        ranks = dist.get_world_size()
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            update = anchor - parameter
            differs = update.any().float()
            dist.all_reduce(differs)
            anchor.grad = None
            if parameter.requires_grad or differs:
                anchor.grad = update * (1 / ranks)
                dist.all_reduce(anchor.grad)
        self.outer.step()
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            parameter.copy_(anchor)
        for buffer in (self.model.norm.running_mean, self.model.norm.running_var):
            dist.all_reduce(buffer)
            buffer /= ranks


class Side:
    """One model of a training, with its attachment and the plain loop beside it."""

    def __init__(self, fuzz: Fuzz, seed: int) -> None:
        choose = fuzz.choose
        self.fuzz, self.model = fuzz, Net(seed, choose.random() < 0.4)
        self.split = choose.random() < 0.6
        self.adam = choose.random() < 0.5
        self.every = choose.choice([1, 2, 2, 3, 4])
        self.fragments = 2 if self.every > 1 and choose.random() < 0.2 else 1
        self.delay = choose.randint(0, self.every // self.fragments) if choose.random() < 0.4 else 0
        self.mixing = 0.5 if self.delay and choose.random() < 0.3 else None
        self.outer = NESTEROV if choose.random() < 0.4 else None
        self.spec = choose.choice(["Identity", "Identity", "EFSignSGD", "BlockQuant(bits=4)", "PowerSGD(rank=1)"])
        self.is_listed = choose.random() < 0.5  # in the list that DDP has, and not in exclude
        self.optimizers = self.made_for(self.model)
        self.handle = self.attach()
        model = copy.deepcopy(self.model)
        self.loop = Loop(model, self.made_for(model), self.outer or PLAIN)
        self.taken = 0
        self.follows_loop = self.spec == "Identity" and self.fragments == 1 and not self.delay

    def made_for(self, model: Net) -> list[torch.optim.Optimizer]:
        """Its optimizers, one or two."""
        parameters = list(model.parameters())
        parts = [parameters[::2], parameters[1::2]] if self.split else [parameters]
        kinds = [torch.optim.AdamW if self.adam else torch.optim.SGD, torch.optim.SGD]
        return [kind(part, lr=0.02, weight_decay=0.01) for kind, part in zip(kinds, parts, strict=False)]

    def attach(self, plan: Any = None) -> Any:
        names = [] if self.model.expert is None else ["expert.weight", "expert.bias"]
        self.model._ddp_params_and_buffers_to_ignore = names if self.is_listed else []
        settings = {"every": self.every, "fragments": self.fragments, "delay": self.delay, "mixing": self.mixing}
        optimizers = self.optimizers if self.split else self.optimizers[0]
        return sync.attach(
            self.model,
            sync.Updates(
                optimizers,
                plan or self.spec,
                outer=self.outer,
                scale_steps=False if self.spec == "Identity" else None,
                **settings,
            ),
            grad_scaler=self.fuzz.scaler,
            exclude=[] if self.is_listed else names,
        )

    def check(self, name: str) -> None:
        """Compare with other ranks and with the plain loop."""
        if not self.taken and self.fragments == 1 and not self.delay:
            digests: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(digests, digest_of(self.model.shared()))
            assert len(set(digests)) == 1, f"ranks differ behind a round of {self.spec} {name}"
            self.fuzz.counts["rounds"] += 1
        if self.follows_loop:
            pairs = ((self.model.shared(), self.loop.model.shared()), (self.model.own(), self.loop.model.own()))
            for mine, plain in pairs:
                for one, other in zip(mine, plain, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Fuzz:
    """A training of the fuzz.

    Args:
        seed: determines everything, the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.choose, self.seed = random.Random(seed), seed
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.scaler = (
            torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
            if self.choose.random() < 0.5
            else None
        )
        self.sides = [Side(self, 10 * seed + number) for number in range(2 if self.choose.random() < 0.3 else 1)]
        self.step_number = 0

    # ---------------------------------------------------------------- steps

    def step(self, choose: random.Random) -> None:
        """A step of all models, in which a scaler may skip one optimizer on one rank."""
        rank, number = dist.get_rank(), self.step_number
        overflow = None
        if self.scaler is not None and choose.random() < 0.15:
            overflow = choose.randrange(len(self.sides)), choose.randrange(2), choose.randrange(dist.get_world_size())
            self.counts["skipped"] += 1
        to_none, calls = choose.random() < 0.7, []
        for index, side in enumerate(self.sides):
            generator = torch.Generator().manual_seed(1000 * number + 10 * index + rank)
            inputs = torch.randn(5, 6, generator=generator) + rank
            loss = side.model(inputs)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            side.loop.model(inputs).backward()
            for each, (optimizer, plain) in enumerate(zip(side.optimizers, side.loop.optimizers, strict=True)):
                skips = overflow == (index, each % 2, rank)
                grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                if skips and (grads := [grad for grad in grads if grad.numel()]):
                    grads[0].fill_(torch.inf)
                    calls.append((optimizer, None))
                else:
                    calls.append((optimizer, plain))
        choose.shuffle(calls)
        for optimizer, plain in calls:
            if self.scaler is None:
                optimizer.step()
            elif choose.random() < 0.5:
                self.scaler.step(optimizer)
            else:
                self.scaler.step(optimizer=optimizer)
            if plain is not None:
                plain.step()
        if self.scaler is not None:
            self.scaler.update()
        for side in self.sides:
            for each in (*side.optimizers, *side.loop.optimizers):
                each.zero_grad(set_to_none=to_none)
            side.taken = (side.taken + 1) % side.every
            if not side.taken and side.follows_loop:
                side.loop.average()
        self.step_number += 1
        self.counts["steps"] += 1

    # ---------------------------------------------------------------- between steps

    def freeze(self, side: Side) -> None:
        trains = not side.model.part.weight.requires_grad
        for model in (side.model, side.loop.model):
            model.part.requires_grad_(trains)
            model.part.zero_grad(set_to_none=side.fuzz.choose.random() < 1.0)

    def freeze_with_gradients(self, side: Side) -> None:
        trains = not side.model.part.weight.requires_grad
        for model in (side.model, side.loop.model):
            model.part.requires_grad_(trains)

    def roll_back(self, side: Side) -> None:
        """Train on from a state in memory three times, the same steps each time."""
        if any(each.handle.is_changing for each in self.sides):
            return  # other plans may run when it is loaded
        states = [each.handle.state_dict() for each in self.sides]
        loops = copy.deepcopy([each.loop for each in self.sides])
        before, scale = digest_of(_tensors(states)), None if self.scaler is None else self.scaler.state_dict()
        taken, number, follows = [each.taken for each in self.sides], self.step_number, self.choose.getrandbits(32)
        frozen = [each.model.part.weight.requires_grad for each in self.sides]
        experts = [[tensor.detach().clone() for tensor in each.model.own()] for each in self.sides]  # not in states
        steps, found = self.choose.randrange(1, 6), list[dict[str, str]]()
        for turn in range(3):
            again = random.Random(follows)
            for _ in range(steps):
                self.step(again)
            found.append({name: each for side in self.sides for name, each in _named(side.handle.state_dict())})
            assert digest_of(_tensors(states)) == before, "a state in memory has changed"
            if turn < 2:
                for each, state, loop, count, trains in zip(self.sides, states, loops, taken, frozen, strict=True):
                    each.handle.load_state_dict(state)
                    each.loop, each.taken = copy.deepcopy(loop), count
                    for model in (each.model, each.loop.model):
                        model.part.requires_grad_(trains)
                    each.model.zero_grad()
                    each.loop.model.zero_grad()
                for each, saved in zip(self.sides, experts, strict=True):
                    for tensor, values in zip(each.model.own(), saved, strict=True):
                        tensor.data.copy_(values)
                self.step_number = number
                if self.scaler is not None:
                    self.scaler.load_state_dict(scale)
            if turn == 0:
                found.clear()  # gradients that were kept are gone in the others
        differ = [name for name in found[0].keys() | found[1].keys() if found[0].get(name) != found[1].get(name)]
        assert not differ, f"a state goes on in another way when it is loaded again: {sorted(differ)}"

    def change(self, side: Side) -> None:
        if side.spec != "Identity":
            spec = self.choose.choice(["EFSignSGD", "BlockQuant(bits=4)", "Identity"])
            side.handle.change_plan(sync.uniform_plan(side.model, spec))

    def regroup(self, side: Side) -> None:
        if not side.taken:
            side.handle.regroup(range(dist.get_world_size()))

    def again(self, side: Side) -> None:
        """Close, and go on from the state with another attachment."""
        if side.handle.is_changing:
            return
        state, plan = side.handle.state_dict(), side.handle.plan
        side.handle.close()
        side.handle = side.attach(plan)
        side.handle.load_state_dict(state)

    def train(self) -> Counter[str]:
        """Train, and return how often each thing was done."""
        events = [self.freeze, self.freeze_with_gradients, self.roll_back, self.change, self.regroup, self.again]
        for _ in range(self.choose.randrange(15, 30)):
            if self.choose.random() < 0.35:
                event, side = self.choose.choice(events), self.choose.choice(self.sides)
                self.log.append(event.__name__)
                self.counts[event.__name__] += 1
                event(side)
            self.step(self.choose)
            self.log.append("step")
            for side in self.sides:
                side.check(self.log[-2] if len(self.log) > 1 else "")
        for side in self.sides:
            self.counts["models"] += 1
            self.counts["optimizers"] += len(side.optimizers)
            self.counts["experts"] += bool(side.model.own())
            self.counts["delayed"] += bool(side.delay)
            self.counts["compared with plain torch"] += side.follows_loop
        for index in self.choose.sample(range(len(self.sides)), len(self.sides)):
            self.sides[index].handle.close()
        assert self.scaler is None or "step" not in vars(self.scaler)
        return self.counts


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state.reshape(-1)
    elif isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _tensors(each)


def _named(state: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """The names and digests of all tensors of a state that are not zeros: a residual of zeros may be missing."""
    if isinstance(state, torch.Tensor):
        if bool(state.any()):
            yield name, digest_of([state.reshape(-1)])
    elif isinstance(state, dict | list | tuple):
        for key, each in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _named(each, f"{name}.{key}")


def fuzzed(seed: int) -> dict[str, int]:
    """Counts of what a training has done. Runs in every rank.

    Raises:
        AssertionError: something was wrong; the message has the last events.
    """
    fuzz = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzz = Fuzz(seed)
            return dict(fuzz.train())
    except BaseException as error:
        kind = "" if fuzz is None else [{key: vars(s)[key] for key in _SETTINGS} for s in fuzz.sides]
        raise AssertionError(f"seed {seed} ({kind}): {error!r} after {fuzz and fuzz.log[-12:]}") from error


_SETTINGS = ("split", "adam", "every", "fragments", "delay", "mixing", "outer", "spec", "is_listed")


def run(seed: int) -> dict[str, int]:
    """Train on two ranks."""
    return values_of(run_ranks(2, fuzzed, seed, timeout_s=600.0))[0]


if __name__ == "__main__":
    import fuzzed_updates  # ranks import it by its name

    sys.exit(fuzzed_trainings.main(fuzzed_updates.run))
