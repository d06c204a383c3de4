"""Trainings of random models in random patterns, while plans are found and changed.

Every step is done twice, by the model that is tested and by a plain DDP model with the same parameters. The second says
what the mean gradients are. Many trainings, with a count of them at the end::

    PYTHONPATH=. python tests/support/fuzzed_trainings.py --seeds 0 100
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import model_uses
from gckernels import sync
from gckernels.sync.communication.collectives import CONSEQUENCES
from gckernels.sync.tuning.trials import trials
from models import SMALL_BUCKETS
from ranks import CPU, Device, ranks_on, run_ranks, values_of
from tunings import PLAIN, policy_of, scripted
from workloads import digest_of, mass_of, parked_of

SPECS = {
    "four": "BlockQuant(bits=4)",
    "eight": "BlockQuant",
    "signs": "EFSignSGD",
    "largest": "TopK(ratio=0.1)",
    "chunks": "ChunkTopK(chunk=64, k=8)",
    "low rank": "PowerSGD(rank=1)",
}
TOLERANCE = 2e-5
"""Largest error of a sum of gradients, relative to the sum of their magnitudes."""


class Net(nn.Module):
    """A network with a part for some steps only, a part that is frozen at times, and a tied weight."""

    def __init__(self, is_branched: bool, returns_parameter: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 40), nn.Linear(40, 12)
        self.tied = nn.Linear(12, 12, bias=False)
        self.again = nn.Linear(12, 12, bias=False)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.branch = nn.Linear(12, 30) if is_branched else None
        self.frozen = nn.Linear(12, 20)
        self.returns_parameter = returns_parameter
        self.recomputes = self.fails = False  # by reentrant checkpoints; in backward, after some gradients

    def forward(self, x: torch.Tensor, uses_branch: bool) -> dict[str, Any]:
        hidden = self.part(lambda inputs: torch.tanh(self.second(inputs)), torch.tanh(self.first(x)))
        hidden = _Fails.apply(hidden) if self.fails else hidden
        hidden = self.part(lambda inputs: self.again(torch.tanh(self.tied(inputs))) * self.scale, hidden)
        loss = hidden.square().mean() + self.frozen(x).square().mean()
        if self.branch is not None and uses_branch:
            loss = loss + self.part(self.branch, hidden).square().mean()
        return {"loss": loss, "parameter": self.scale if self.returns_parameter else None}

    def part(self, layers: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        """The output of some layers."""
        if not (self.recomputes and inputs.requires_grad):
            return layers(inputs)
        output: torch.Tensor = checkpoint(layers, inputs, use_reentrant=True)
        return output


class Failed(Exception):
    """Raised by a pattern in which backward fails."""


class Fuzz:
    """A training of the fuzz.

    Args:
        seed: determines everything, the same on all ranks.
        kind: the kind of model, ``"ddp"`` or ``"module"``; by default the seed determines it.
    """

    def __init__(self, seed: int, kind: str | None = None) -> None:
        self.choose = random.Random(seed)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        choose = self.choose
        self.is_ddp = choose.random() < 0.65
        self.is_ddp = self.is_ddp if kind is None else kind == "ddp"
        self.is_branched = choose.random() < 0.6
        self.freezes = self.is_branched and choose.random() < 0.4
        torch.manual_seed(seed)
        self.module = Net(self.is_branched, choose.random() < 0.2)
        self.wrapping: dict[str, Any] = {"find_unused_parameters": self.is_branched, "bucket_cap_mb": SMALL_BUCKETS}
        self.as_view = choose.random() < 0.5
        self.shadow: Any = DistributedDataParallel(copy.deepcopy(self.module), **self.wrapping)
        self.discards = choose.random() < 0.5
        self.model: Any = self.module
        if self.is_ddp:
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=self.as_view, **self.wrapping)
        self.given = {name: torch.zeros_like(each) for name, each in self.module.named_parameters()}
        self.got, self.size = copy.deepcopy(self.given), copy.deepcopy(self.given)
        self.lost: set[str] = set()  # parameters that were frozen when a state was loaded, which has nothing of them
        self.has_failed = False
        self.handle: Any = None  # the attachment of the present step
        self.stays_plain = True  # the second backward of a step has a plan that compresses nothing
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.batches = torch.Generator().manual_seed(1000 * seed + self.rank)

    # ---------------------------------------------------------------- patterns

    def attach(self) -> Any:
        """A handle that finds its plans itself."""
        options: dict[str, Any] = {"can_discard": self.discards, "start_step": self.choose.choice([0, 0, 4])}
        if self.is_ddp:
            return sync.attach(self.model, **options)
        return sync.attach(self.module, find_unused_parameters=self.is_branched, **options)

    def inputs(self) -> tuple[torch.Tensor, bool]:
        """A batch of this rank, and whether it goes through the branch: on all ranks, on one, or on none."""
        used = self.choose.random()
        one = self.choose.randrange(self.world_size)
        return torch.randn(4, 12, generator=self.batches), used < 0.5 or (used < 0.75 and self.rank == one)

    def patterns(self) -> list[str]:
        """The patterns that this training may have, the usual one most often."""
        found = ["plain"] * 6 + ["evaluation", "accumulation", "penalty", "failed forward", "failed backward"]
        found += ["kept", "no_sync between", "by hand"]
        if not self.is_ddp:
            found += ["recomputed"]
        if self.freezes:
            found += ["freeze", "thaw", "freeze between"]
        return found

    def run(self, pattern: str, model: Any, apart: Callable[[], Any], data: list[tuple[torch.Tensor, bool]]) -> None:
        """Forwards and backwards of a step of ``model``, in which ``apart`` is its ``no_sync``.

        Raises:
            Failed: the pattern fails, before any gradient is there.
        """
        if pattern == "evaluation":
            with torch.no_grad():
                model(*data[1])
        elif pattern == "accumulation":
            with apart():
                for each in data[1:]:
                    model(*each)["loss"].backward()
        elif pattern == "penalty":
            with apart():
                parameters = [each for each in model.parameters() if each.requires_grad]
                torch.autograd.grad(model(*data[1])["loss"], parameters, allow_unused=True)
        elif pattern == "failed forward":
            with contextlib.suppress(RuntimeError):
                model(torch.zeros(3, 5), False)
        elif pattern == "kept":
            model(*data[1])["loss"].backward()
            if model is self.model:
                self.stays_plain = _is_plain(self.handle)
        elif pattern == "no_sync between":
            loss = model(*data[0])["loss"]
            with apart():
                model(*data[1])
            loss.backward()
            return
        elif pattern == "by hand":
            module = getattr(model, "module", model)
            parameters = [each for each in module.parameters() if each.requires_grad]
            gradients = torch.autograd.grad(module(*data[1])["loss"], parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        elif pattern == "freeze between":
            with apart():
                model(*data[1])["loss"].backward()
            getattr(model, "module", model).frozen.requires_grad_(False)
        elif pattern == "recomputed":
            self.module.recomputes = model is self.module
        loss = model(*data[0])["loss"]
        self.module.recomputes = False
        if pattern == "failed backward":
            loss = _Fails.apply(loss)
        loss.backward()

    def use(self) -> str:
        """Use the model in a random manner after which DDP still averages its gradients; its name."""
        breaks = model_uses.BREAKS_VIEWS if self.as_view else model_uses.BREAKS_DDP
        name = self.choose.choice(sorted(model_uses.USES.keys() - (breaks if self.is_ddp else set[str]())))
        model_uses.USES[name](self.module, lambda module: module(torch.ones(4, 12), False)["loss"])
        return name

    # ---------------------------------------------------------------- steps

    def hook(self) -> None:
        """Register a hook that changes gradients of a parameter, on each rank in another way."""
        name, kind = self.choose.choice(sorted(self.given)), self.choose.randrange(3)

        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if kind:
                parameter.grad += 0.01 * (self.rank + 1)
            else:
                parameter.grad = parameter.grad + 0.01 * (self.rank + 1)

        for module in (self.module, self.shadow.module):
            parameter = module.get_parameter(name)
            if not parameter.requires_grad:
                continue
            if kind == 2:
                parameter.register_hook(lambda gradient: gradient + 0.01 * (self.rank + 1))
            else:
                parameter.register_post_accumulate_grad_hook(add)

    def fail(self, handle: Any) -> Any:
        """Fail in a backward, after some gradients, and attach again. Returns the handle that goes on."""
        state, self.module.fails = handle.state_dict(), True
        data = torch.randn(4, 12, generator=self.batches), self.choose.random() < 0.5
        for fails, expected in ((True, Failed), (False, RuntimeError)):
            self.module.fails = fails
            try:
                self.model(*data)["loss"].backward()
            except expected as error:
                assert fails or "has failed" in str(error), error
            else:
                raise AssertionError(f"nothing was raised by a backward that fails: {fails}")
        handle.close()
        self.module.zero_grad()
        handle = self.attach()
        handle.load_state_dict(state)
        return handle

    def step(self, handle: Any) -> None:
        """A step in a random pattern, and its checks."""
        pattern = self.choose.choice(self.patterns())
        if self.has_failed:  # after a backward that has failed, DDP wants one that averages
            pattern, self.has_failed = "plain", False
        if pattern in ("freeze", "thaw"):
            for each in (self.module, self.shadow.module):
                each.frozen.requires_grad_(pattern == "thaw")
        context = self.choose.random()
        data = [self.inputs() for _ in range(3)]
        if pattern == "by hand":  # each rank keeps its own gradient of a parameter that no rank uses
            data[0] = data[0][0], self.rank == 0
        self.log.append(f"{pattern} {policy_of(handle)} {'changing' if handle.is_changing else ''}")
        self.counts[pattern] += 1
        self.copy_parameters()
        apart = self.model.no_sync if self.is_ddp else handle.no_sync
        self.handle, self.stays_plain, parked = handle, True, parked_of(handle)
        compares = _is_plain(handle) and not handle.is_changing
        is_exact = context < 0.1 and not _is_plain(handle)
        try:
            self.run(pattern, self.shadow, self.shadow.no_sync, data)
            with handle.exact() if is_exact else contextlib.nullcontext():
                self.run(pattern, self.model, apart, data)
        except Failed:
            self.has_failed = True
            return
        self.compare(pattern, compares and self.stays_plain, parked)
        if is_exact or (self.discards and context > 0.9 and pattern != "kept"):
            self.counts["exact" if is_exact else "discarded"] += 1
            if not is_exact:
                handle.discard_step()
            return
        for name, parameter in self.module.named_parameters():
            mean = self.shadow.module.get_parameter(name).grad
            assert (mean is None) == (parameter.grad is None), f"{name}: gradient {parameter.grad}, mean {mean}"
            if mean is not None and parameter.grad is not None:
                self.given[name] += mean
                self.got[name] += parameter.grad
                self.size[name] += mean.abs() + parameter.grad.abs()
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad.clamp(-1, 1)

    def copy_parameters(self) -> None:
        """Give the plain model the parameters of the other one, and clear the gradients of both."""
        with torch.no_grad():
            for theirs, mine in zip(self.shadow.parameters(), self.module.parameters(), strict=True):
                theirs.copy_(mine)
        for each in (self.module, self.shadow):
            each.zero_grad()

    def compare(self, pattern: str, is_plain: bool, parked: Collection[str] = ()) -> None:
        """Gradients are the same on all ranks, and those of plain DDP where nothing is compressed or parked."""
        digest = digest_of(each.grad for each in self.module.parameters())
        digests: list[Any] = [None] * self.world_size
        dist.all_gather_object(digests, digest)
        assert len(set(digests)) == 1, f"gradients differ between ranks in {pattern}"
        if is_plain:
            named = self.module.named_parameters()
            for (name, mine), mean in zip(named, self.shadow.parameters(), strict=True):
                if mine.grad is not None and mean.grad is not None and name not in parked:
                    torch.testing.assert_close(mine.grad, mean.grad, rtol=1e-5, atol=1e-7)

    def check(self, handle: Any) -> None:
        """Everything that was given has been got, or is in residuals."""
        held = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in self.given.items()}
        for key, mass in mass_of(handle).items():
            held[key] += mass[-1]
        for name, mean in parked_of(handle).items():
            held[name] += mean
        for name in self.given.keys() - self.lost:
            rest = self.given[name].double().flatten() - self.got[name].double().flatten() - held[name]
            scale = self.size[name].double().max() + 1e-3
            assert rest.abs().max() <= TOLERANCE * scale * 10, f"{name}: {rest.abs().max() / scale:.1e} is lost"
        self.counts["checks"] += 1

    def between(self, handle: Any) -> Any:
        """Something that a training does between two steps. Returns the handle that goes on."""
        event = self.choose.choice(["check", "check", "state", "copy", "again", "change", "hook", "fail", *["use"] * 4])
        if event in ("state", "again") and self.is_ddp and not self.module.frozen.weight.requires_grad:
            return handle  # attach takes no DDP model with parameters that were frozen since it was made
        if event in ("state", "fail") and not self.module.frozen.weight.requires_grad:
            self.lost |= {name for name in self.given if name.startswith("frozen")}
        if event == "check":
            self.check(handle)
        elif event == "state":
            states: list[Any] = [None] * self.world_size
            state = handle.state_dict()
            if self.choose.random() < 0.5:
                dist.all_gather_object(states, state)
                state = states
            handle.close()
            handle = self.attach()
            handle.load_state_dict(state)
        elif event == "copy":
            copied = copy.deepcopy(self.model)
            assert digest_of(copied.parameters()) == digest_of(self.module.parameters())
            del copied
        elif event == "use":
            event = self.use()
        elif event == "hook":
            self.hook()
        elif event == "fail" and not self.is_ddp:  # after which DDP must be wrapped anew
            handle = self.fail(handle)
        elif event == "again" and _is_plain(handle) and not handle.is_changing and not parked_of(handle):
            handle.close()
            handle = self.attach()
        elif event == "change" and self.choose.random() < 0.3:
            spec = self.choose.choice(sorted(SPECS))
            handle.change_plan(sync.uniform_plan(self.model, SPECS[spec], exempt=None, world_size=self.world_size))
        else:
            return handle
        self.log.append(event)
        self.counts[event] += 1
        return handle

    def train(self) -> Counter[str]:
        """Train, and return how often each thing was done."""
        chosen = self.choose.sample(sorted(SPECS), 2)
        step_s = {name: self.choose.uniform(0.3, 1.3) for name in SPECS} | {PLAIN: 1.0}
        handles: list[Any] = []
        with scripted(self.model, {name: SPECS[name] for name in chosen}, _Either(step_s), handles):
            handle = self.attach()
            handles.append(handle)
            for _ in range(self.choose.randrange(40, 110)):
                self.step(handle)
                if self.choose.random() < 0.2:
                    handle = handles[0] = self.between(handle)
            self.check(handle)
            handle.close()
            self.use()
            if self.is_ddp:
                self.copy_parameters()
                data = [self.inputs()]
                for model in (self.shadow, self.model):
                    self.run("plain", model, model.no_sync, data)
                self.compare("plain after the end", is_plain=True)
            self.model.zero_grad()
            digests: list[Any] = [None] * self.world_size
            dist.all_gather_object(digests, digest_of(self.module.parameters()))
            assert len(set(digests)) == 1, "parameters differ between ranks"
        self.counts["steps"] = sum(self.counts[pattern] for pattern in set(self.patterns()))
        return self.counts


def _is_plain(handle: Any) -> bool:
    """Whether the plan that runs compresses nothing."""
    return all(unit.in_place for unit in handle.plan.units)


class _Either(dict[str, float]):
    """Seconds of a step by the name of its plan; a second for plans that a training has given itself."""

    def __missing__(self, name: str) -> float:
        return 1.0


class _Fails(torch.autograd.Function):
    """A function whose backward fails."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise Failed


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """A context in which noise does not prolong trials."""
    with mock.patch.object(trials, "MOST", 20):
        yield


def fuzzed(seed: int, kind: str | None = None) -> dict[str, int]:
    """Counts of what a training has done. Runs in every rank.

    Raises:
        AssertionError: something was wrong; the message has the last steps.
    """
    fuzz = Fuzz(seed, kind)
    try:
        with _quick():
            return dict(fuzz.train())
    except BaseException as error:
        what = f"DDP {fuzz.is_ddp}, branch {fuzz.is_branched}, freezes {fuzz.freezes}, discards {fuzz.discards}"
        raise AssertionError(f"seed {seed} ({what}): {error!r} after {fuzz.log[-12:]}") from error


def run(seed: int, kind: str | None = None) -> dict[str, int]:
    """Train on two ranks, or with every fourth seed on three; with a ``kind`` of model, ``"ddp"`` or ``"module"``."""
    return values_of(run_ranks(3 if seed % 4 == 3 else 2, fuzzed, seed, kind, timeout_s=600))[0]


def main(run: Callable[..., dict[str, int]] = run, kinds: Sequence[str] = ()) -> int:
    """Train with many seeds and print what was done; the exit code is 1 if any training was wrong.

    Args:
        run: trains with a seed, and with a kind if there are ``kinds``.
        kinds: the kinds of trainings.
    """
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    if kinds:
        parser.add_argument("--kind", choices=kinds, help="by default each seed has its own")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), metavar=("FIRST", "STOP"))
    where = "by default the CPU; on the simulated device work is late by the seed, or races are looked for"
    parser.add_argument("--device", choices=("cpu", "late", "races"), default="cpu", help=where)
    given = vars(parser.parse_args())
    device = given.pop("device")
    counts: Counter[str] = Counter()
    wrong, began = 0, time.monotonic()
    for seed in range(*given.pop("seeds")):
        simulated = Device("sim", seed if device == "late" else None)
        try:
            with ranks_on(CPU if device == "cpu" else simulated):
                counts.update(run(seed, **given))
            counts["trainings"] += 1
        except AssertionError as error:
            wrong += 1
            found = re.findall(r"^AssertionError: (seed .*)$", str(error), re.M) or [str(error)]
            found.sort(key=lambda text: any(words in text for words in CONSEQUENCES))  # the cause is in front
            print("WRONG:", found[0], flush=True)
    print(f"{time.monotonic() - began:.0f} s, {wrong} wrong:", dict(sorted(counts.items())))
    return int(wrong > 0)


if __name__ == "__main__":
    import fuzzed_trainings  # ranks import it by its name

    sys.exit(fuzzed_trainings.main(fuzzed_trainings.run, ("ddp", "module")))
