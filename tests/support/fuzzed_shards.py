"""Trainings of random models of FSDP2 in random patterns: gathers ahead, in vain and from some ranks, the flags of
microbatches, ignored parameters, several roots, frozen layers, states, changes of the plan.

Every step is done twice, by the model that is tested and by one of FSDP2 alone with the same parameters. Many
trainings, with a count of them at the end::

    PYTHONPATH=. python tests/support/fuzzed_shards.py --seeds 0 100
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fuzzed_trainings import main
from gckernels import sync
from gckernels.sync.frontends.sharded.shard_groups import shard_groups
from ranks import run_ranks, values_of
from sharded_models import fsdp_modules, split
from workloads import parked_of

WIDTH = 16
SPECS = ("Identity", "BlockQuant(bits=4)", "EFSignSGD", "TopK(ratio=0.1)", "ChunkTopK(chunk=64, k=8)", "Cast16")
EXACT = {"fsdp": "Identity", "hsdp": "Signal", "one shard": "Signal"}
ENCODED = {None: 0.0, "BlockQuant": 0.05, "Cast16": 0.02, "BlockQuant(bits=4)": 0.05}
"""The largest relative error of outputs, by the compressor of parameters.

Outputs have passed 12 layers at most. If each adds the relative error of its weights, which lie evenly in ±1/4, they
are off by 12 times that. The errors of different layers do not depend on each other, so they are a third of it as a
rule.

- 8 bits have steps of 1/127 of the largest weight, which is an error of 1/254 of all of them: 0.05.
- bf16 has an error of at most 2**-9, 0.1 % in the mean: 0.02.
- 4 bits are those of differences to the parameters before, which are at most 0.02 times the gradient. With steps of 1/7
  of the largest difference and gradients up to 0.4 an error of 0.4 % is left: 0.05.
"""
HAS_CURE = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Block(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        hidden = torch.tanh(self.always(inputs))
        return hidden + self.sometimes(inputs) if uses_all else hidden


class Chain(nn.Module):
    """Blocks in any order, one whose output is not always in the loss, and a parameter that FSDP may ignore."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.probe = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor, use: Use) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, probed = inputs @ (self.own.to(inputs.dtype) / WIDTH) + inputs, torch.zeros(())
        for place, index in enumerate(use.order):
            block = self.blocks[index]
            if use.recomputes:
                hidden = checkpoint(block, hidden, use.uses_all, use_reentrant=False)
            else:
                hidden = block(hidden, use.uses_all)
            if place == 0 and use.probes:
                probed = self.probe(hidden)
            if use.fails:
                raise ArithmeticError
        return hidden, probed


class Use:
    """The way of a forward, drawn at random.

    Args:
        choose: draws.
        blocks: the number of blocks.
    """

    def __init__(self, choose: random.Random, blocks: int) -> None:
        self.order = list(range(blocks))
        if choose.random() < 0.25:  # others are not used, or more than once
            self.order = [choose.randrange(blocks) for _ in range(choose.randrange(1, blocks + 2))]
        self.uses_all, self.recomputes = choose.random() < 0.75, choose.random() < 0.15
        self.probes, self.probe_counts = choose.random() < 0.7, choose.random() < 0.5
        self.fails = False


class FailsAlone(Exception):
    """FSDP alone cannot do a step. It cannot gather from some of the ranks what it began to gather from all, or the
    other way round, as when a gather in vain is kept between microbatches; nor reduce zeros of one dtype with gradients
    that were accumulated in another; nor accumulate in bf16 the gradients of a block that it never gathered."""


class Fuzz:
    """A training of the fuzz.

    Args:
        seed: determines everything, the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        self.rank, self.ranks, self.seed = dist.get_rank(), dist.get_world_size(), seed
        self.form = choose.choice(["fsdp", "fsdp", "hsdp"] if self.ranks == 4 else ["fsdp", "fsdp", "one shard"])
        self.blocks, self.ignores = choose.randrange(2, 6), choose.random() < 0.3
        self.roots, self.ahead = choose.choice([1, 1, 2]), choose.choice([0, 0, 1, 2, 2])
        reshards: list[bool | int] = [True, True, False] + (
            [2, 2, 2] if self.ranks == 4 and self.form == "fsdp" else []
        )
        self.reshards, self.cures = choose.choice(reshards), HAS_CURE and choose.random() < 0.3
        halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.policy = choose.choice([MixedPrecisionPolicy()] * 4 + [halves])
        self.weights = choose.choice([None, None, *ENCODED]) if self.form == "fsdp" else None
        self.first = choose.choice(SPECS)
        self.tested, self.alone = self.model(), self.model()
        self.counts: Counter[str] = Counter()
        self.specs, self.log, self.has_frozen = [self.first], list[str](), False
        self.batches = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.given, self.got, self.size = (dict.fromkeys(self.shards(self.tested), 0.0) for _ in range(3))

    def __str__(self) -> str:
        return (
            f"{self.form}, {self.roots} roots of {self.blocks} blocks, {self.ahead} ahead, reshards {self.reshards}, "
            f"ignores {self.ignores}, cures {self.cures}, {self.policy.param_dtype}, {self.first}, {self.weights}"
        )

    def model(self) -> Any:
        """A new model; all have the same parameters."""
        torch.manual_seed(self.seed)
        roots: Any = nn.ModuleList(Chain(self.blocks) for _ in range(self.roots))
        for root in roots:
            options: dict[str, Any] = {"ignored_params": {root.own}} if self.ignores else {}
            options |= {"reshard_after_forward": self.reshards, "mp_policy": self.policy}
            split(root, (*root.blocks, root.probe, root), self.form, **options)
            for index, block in enumerate(root.blocks if self.ahead else ()):
                before, behind = root.blocks[:index], root.blocks[index + 1 :]
                block.set_modules_to_backward_prefetch(list(before)[::-1][: self.ahead])
                block.set_modules_to_forward_prefetch(list(behind)[: self.ahead])
            if self.cures:
                root.set_reduce_scatter_unused_params(True)
        return roots

    def shards(self, model: Any) -> dict[str, Any]:
        """The parameters of a model as optimizers have them, by name, whatever state FSDP has them in."""
        return {name: each for group in shard_groups(model) for name, each in group.parameters().items()}

    # ---------------------------------------------------------------- steps

    def draw(self) -> list[dict[str, Any]]:
        """The microbatches of a step, the same for both models."""
        choose = self.choose
        flags = choose.choice(["", "", "", "last", "sync", "last sync", "all"])
        micros = []
        for micro in range(choose.choice([1, 2, 3]) if flags else 1):
            uses = [Use(choose, self.blocks) for _ in range(self.roots)]
            if micros and flags == "all":  # FSDP adds up shards of microbatches, which must be those of the same layers
                uses = micros[0]["uses"]
            elif self.cures and choose.random() < 0.3:  # some ranks use a layer that others do not
                for use in uses:
                    use.uses_all = self.rank == 0
            between = choose.choice(["", "", "", "ahead", "ahead", "evaluated", "failed"])
            ahead = [(choose.randrange(self.roots), choose.randrange(self.blocks)) for _ in range(choose.randrange(3))]
            inputs = torch.randn(4, WIDTH, generator=self.batches)
            micros.append({"uses": uses, "between": between, "ahead": ahead, "inputs": inputs, "micro": micro})
            micros[-1]["joins"] = choose.random() < 0.5  # one backward for all roots
        for each in micros:
            each["flags"], each["last"] = flags, each["micro"] == len(micros) - 1
        return micros

    def run(self, model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
        """Forwards and backwards of a microbatch. Returns the outputs."""
        for root in model:
            root.set_is_last_backward(given["last"] or "last" not in given["flags"])
            root.set_requires_gradient_sync(given["last"] or "sync" not in given["flags"])
            root.set_requires_all_reduce(given["last"] or "all" not in given["flags"])
        hidden, outputs, losses, handles = given["inputs"], [], [], []
        is_ready = self.counts["microbatches"] > 0  # FSDP knows its roots
        if given["between"] == "ahead" and is_ready:
            handles = [model[root].blocks[block].unshard(async_op=True) for root, block in given["ahead"]]
        for place, (root, use) in enumerate(zip(model, given["uses"], strict=True)):
            if given["between"] == "evaluated":
                with torch.no_grad():
                    outputs.append(root(hidden, use)[0])
            if given["between"] == "failed" and is_ready and hasattr(root._get_fsdp_state(), "_reset_iter_state"):
                use.fails = True
                with contextlib.suppress(ArithmeticError):
                    root(hidden, use)
                use.fails = False
                root._get_fsdp_state()._reset_iter_state()
            hidden, probed = root(hidden, use)
            loss = hidden.float().square().mean() + (probed.float().square().mean() if use.probe_counts else 0)
            outputs += [hidden.detach(), probed.detach()]
            losses.append(loss)
            if not given["joins"]:
                hidden = hidden.detach()
                if given["between"] == "ahead" and is_ready and place + 1 < self.roots:
                    handles.append(model[place + 1].blocks[0].unshard(async_op=True))
                loss.backward()
        if given["joins"]:
            torch.stack(losses).sum().backward()
        for handle in handles[::2]:
            handle.wait()
        return [each.float() for each in outputs]

    def step(self, handle: Any) -> None:
        """A step of both models, and its checks."""
        kind = self.choose.choice([""] * 7 + ["kept", "exact"])
        compares = all(unit.compressor.name == "Identity" for unit in handle.plan.units) and not handle.is_changing
        compares = (compares or kind == "exact") and not self.has_frozen
        self.counts[kind or "usual"] += 1
        parked = {} if kind == "exact" else parked_of(handle)
        with handle.exact() if kind == "exact" else contextlib.nullcontext():
            for _ in range(1 + (kind == "kept")):  # gradients of two steps are added up
                self.backwards(kind)
        self.compare(compares and self.weights is None, parked)
        self.go_on()

    def backwards(self, kind: str) -> None:
        """The microbatches of a step of both models."""
        for given in self.draw():
            orders = [use.order for use in given["uses"]]
            self.log.append(f"{kind} {given['flags']} {given['between']} {given['joins']} {orders}")
            self.counts[given["flags"] or "plain"] += 1
            self.counts[given["between"] or "nothing between"] += 1
            try:
                expected = self.run(self.alone, given)
            except (RuntimeError, AssertionError, AttributeError) as error:
                raise FailsAlone from error
            outputs = self.run(self.tested, given)
            self.counts["microbatches"] += 1
            for mine, theirs in zip(outputs, expected, strict=True):
                error = float((mine - theirs).norm() / (theirs.norm() + 1e-6))
                assert error <= ENCODED[self.weights], f"outputs are off by {error:.1e}"

    def compare(self, is_exact: bool, parked: Collection[str] = ()) -> None:
        """Gradients are there where those of FSDP alone are, and are the same where nothing is compressed or parked."""
        theirs = self.shards(self.alone)
        for name, mine in self.shards(self.tested).items():
            assert (mine.grad is None) == (theirs[name].grad is None), f"{name}: {mine.grad}, alone {theirs[name].grad}"
            if mine.grad is None:
                continue
            got, given = mine.grad.to_local(), theirs[name].grad.to_local()
            assert got.isfinite().all(), name
            if is_exact and name not in parked:
                close = {"rtol": 1e-4, "atol": 1e-6} if self.ranks > 2 else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(got, given, **close, msg=lambda text, name=name: f"{name}: {text}")
            self.given[name] = self.given[name] + given.double()
            self.got[name] = self.got[name] + got.double()
            self.size[name] = self.size[name] + given.double().abs() + got.double().abs()

    def go_on(self) -> None:
        """A step of SGD, after which both models have the same parameters and no gradients."""
        theirs = self.shards(self.alone)
        with torch.no_grad():
            for name, mine in self.shards(self.tested).items():
                if mine.grad is not None:
                    mine.to_local().sub_(mine.grad.to_local().clamp(-1, 1), alpha=0.02)
                theirs[name].to_local().copy_(mine.to_local())
                mine.grad = theirs[name].grad = None
        for model in (self.alone, self.tested):
            for part in fsdp_modules(model):
                part.reshard()

    def check(self) -> None:
        """Everything that was given has been got, when nothing is in residuals.

        Residuals are in fp32: with values 20 times as large as a gradient, which few methods reach, a step rounds by
        ``20 * 2**-24`` of it, 1e-6. ``Cast16`` has no residual and rounds what a rank sends to bf16, by at most
        ``2**-9`` of it. So it is ``2**-9`` of what is given and got together: of four gradients that do not depend on
        each other the mean is half as large as they are.
        """
        most = 2.0**-9 if "Cast16" in self.specs else 1e-5
        for name in self.given if self.weights is None else ():
            if isinstance(self.size[name], float):
                continue
            rest, scale = (self.given[name] - self.got[name]).abs(), self.size[name]
            is_kept = not rest.numel() or rest.max() <= most * scale.max() + 1e-6
            assert is_kept, f"{name}: {rest.max():.1e} of {scale.max():.1e} is lost after {self.specs}"
        self.counts["checks"] += 1

    def attach(self, what: Any) -> Any:
        """The attachment of a plan or a compressor."""
        options: dict[str, Any] = {} if self.weights is None else {"weights": self.weights}
        return sync.attach(self.tested, what, **options)

    def freeze(self, freezes: bool) -> None:
        """Freeze the second layer of the first block, or thaw it."""
        self.has_frozen = freezes
        for model in (self.alone, self.tested):
            model[0].blocks[0].sometimes.requires_grad_(not freezes)

    def between(self, handle: Any) -> Any:
        """Something that a training does between two steps. Returns the handle that goes on."""
        event = self.choose.choice(["change", "change", "state", "freeze", "thaw"])
        self.log.append(event)
        self.counts[event] += 1
        if event == "change":
            spec = self.choose.choice(SPECS)
            handle.change_plan(sync.uniform_plan(self.tested, spec))
            self.specs.append(spec)
            self.log[-1] += f" to {spec}"
        elif event == "state":
            state, plan, states = handle.state_dict(), handle.plan, [None] * self.ranks
            if self.choose.random() < 0.5:
                dist.all_gather_object(states, state)
                state = states
            handle.close()
            handle = self.attach(plan)
            handle.load_state_dict(state)
        else:
            self.freeze(event == "freeze")
        return handle

    def train(self) -> Counter[str]:
        """Train, and return how often each thing was done."""
        handle = self.attach(self.first)
        for _ in range(self.choose.randrange(8, 20)):
            self.step(handle)
            if self.choose.random() < 0.3:
                handle = self.between(handle)
        self.freeze(False)
        handle.change_plan(sync.uniform_plan(self.tested, "Identity"))
        for _ in range(3):
            self.whole_step()
        self.check()
        handle.close()
        self.step_alone()
        return self.counts

    def whole_step(self) -> None:
        """A step that uses everything, so that all parameters get what residuals hold."""
        self._use_all(False)
        self.go_on()

    def step_alone(self) -> None:
        """After the end, gradients are those of FSDP alone."""
        self._use_all(True)

    def _use_all(self, is_exact: bool) -> None:
        given = {"flags": "", "between": "", "ahead": [], "joins": True, "last": True}
        given["uses"], given["inputs"] = self._whole_uses(), torch.randn(4, WIDTH, generator=self.batches)
        for model in (self.alone, self.tested):
            self.run(model, given)
        self.compare(is_exact)

    def _whole_uses(self) -> list[Use]:
        uses = [Use(random.Random(0), self.blocks) for _ in range(self.roots)]
        for use in uses:
            use.order, use.uses_all = list(range(self.blocks)), True
            use.probes = use.probe_counts = True
        return uses


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which warnings say nothing: they are of what is tried on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fuzzed(seed: int) -> dict[str, int]:
    """Counts of what a training has done until its end, or until FSDP alone fails. Runs in every rank.

    Raises:
        AssertionError: something was wrong; the message has the last steps.
    """
    with _quiet():
        fuzz = Fuzz(seed)
        try:
            return dict(fuzz.train())
        except FailsAlone:
            return dict(fuzz.counts + Counter(["fails alone"]))
        except BaseException as error:
            raise AssertionError(f"seed {seed} ({fuzz}): {error!r} after {fuzz.log[-6:]}") from error


def run(seed: int) -> dict[str, int]:
    """Train on two ranks, or with every third seed on four."""
    return values_of(run_ranks(4 if seed % 3 == 2 else 2, fuzzed, seed))[0]


if __name__ == "__main__":
    import fuzzed_shards  # ranks import it by its name

    sys.exit(main(fuzzed_shards.run))
