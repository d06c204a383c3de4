"""The steps of the optimizers of a training, counted in the same way on all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..checks.hooks import weakly
from ..checks.optimizer_checks import calling_scaler
from ..members import Members, listed


class OptimizerSteps:
    """Watches the optimizers of a model, and gradient scalers that skip steps of them on this rank alone.

    A step of the training ends when each optimizer has made one, in any order. A skipped one counts.

    Args:
        optimizers: all that step parameters of the model. Nothing else of them is changed.
        scalers: the scalers that call their steps. Their methods ``step`` are wrapped.
        members: the parameters of the model, which no other optimizer may step.
        before: called before each step of an optimizer, with its number.
        after: called after each one, also after one that a scaler has skipped, with its number and whether a step of
            the training ends with it.

    Attributes:
        begun: the numbers of the optimizers that have made their part of the step that runs.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[GradScaler],
        members: Members,
        before: Callable[[int], None],
        after: Callable[[int, bool], None],
    ) -> None:
        self.begun = set[int]()
        self._before, self._after, self._members = weakly(before), weakly(after), members
        self._optimizers = [weakref.ref(each) for each in optimizers]  # which have the hooks
        self._names = [type(each).__name__ for each in optimizers]
        self._numbers = [0] * len(optimizers)  # how many steps were not skipped
        self._scalers, self._counting = scalers, list[CountedSteps]()
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin the watch."""
        self._handles.append(register_optimizer_step_pre_hook(weakly(self._refuse_others)))
        for number, weak in enumerate(self._optimizers):
            begins, ends = (functools.partial(weakly(each), number) for each in (self._on_begin, self._on_end))
            optimizer = weak()
            assert optimizer is not None  # the caller has it
            self._handles.append(optimizer.register_step_pre_hook(begins))
            self._handles.append(optimizer.register_step_post_hook(ends))
        self._counting += [CountedSteps(scaler, self) for scaler in self._scalers]

    def remove(self) -> None:
        """End the watch."""
        for handle in (*self._handles, *self._counting):
            handle.remove()

    def _on_begin(self, number: int, *_: Any) -> None:
        scaler = None if self._numbers[number] else calling_scaler()
        if scaler is not None and all(each.scaler is not scaler for each in self._counting):
            raise RuntimeError(
                "gckernels: a GradScaler makes the steps of the optimizer, and may skip one on one rank; give it to "
                "sync.attach as grad_scaler, so that a skipped step counts"
            )
        self._refuse_twice(number)
        self._before(number)

    def _on_end(self, number: int, *_: Any) -> None:
        self._numbers[number] += 1
        self._count(number)

    def _count(self, number: int) -> None:
        self.begun.add(number)
        ends = len(self.begun) == len(self._numbers)
        if ends:
            self.begun.clear()
        self._after(number, ends)

    def count_skipped(self, stepped: Any, call: Callable[[], Any]) -> Any:
        """The result of a scaler's step of an optimizer. If that has skipped it, count it."""
        optimizers = [each() for each in self._optimizers]
        number = next((number for number, each in enumerate(optimizers) if each is stepped), None)
        if number is None:
            return call()
        made = self._numbers[number]
        result = call()
        if self._numbers[number] == made:
            self._refuse_twice(number)
            self._count(number)
        return result

    def _refuse_twice(self, number: int) -> None:
        """Raise a RuntimeError if an optimizer makes a second step before others have made one: then it cannot be told
        where a step of the training ends."""
        if number in self.begun:
            missing = next(each for each in range(len(self._names)) if each not in self.begun)
            raise RuntimeError(
                f"gckernels: optimizer {number} ({self._names[number]}) makes a second step, and optimizer {missing} "
                f"({self._names[missing]}) has made none meanwhile; all optimizers that Updates was given make one "
                "in each step of the training, in any order, because ranks meet behind the last one"
            )

    def _refuse_others(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise a RuntimeError if an optimizer steps parameters of the model that was not given: ranks would differ
        after rounds, and its moments would not be in states."""
        given = {id(each()) for each in self._optimizers}
        inside = getattr(optimizer, "optimizers", None)  # a container of optimizers steps them, as in torchtitan
        if id(optimizer) in given or (isinstance(inside, list) and inside and {*map(id, inside)} <= given):
            return
        stepped = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        if names := self._members.names_of(stepped):
            raise RuntimeError(
                f"gckernels: {type(optimizer).__name__} steps {listed(names)}, and Updates was not given it; "
                "give it a list of all optimizers that step the model, or name what it steps in exclude"
            )


class CountedSteps:
    """The method ``step`` of a gradient scaler, which counts steps that it skips. Several can be around each other.

    Args:
        scaler: the scaler, whose method is replaced until :meth:`remove`.
        steps: counts them. It is not kept.

    Attributes:
        scaler: as given.
    """

    def __init__(self, scaler: GradScaler, steps: OptimizerSteps) -> None:
        self.scaler = scaler
        self._own = vars(scaler).get("step")  # another one's, or that of a user
        self._step: Callable[..., Any] = scaler.step
        self._steps: Callable[[], OptimizerSteps | None] = weakref.ref(steps)
        scaler.step = self  # type: ignore[method-assign]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        call = functools.partial(self._step, *arguments, **named)
        steps = self._steps()
        if steps is None:
            return call()
        return steps.count_skipped(arguments[0] if arguments else named.get("optimizer"), call)

    def remove(self) -> None:
        """Count nothing any more, and give the scaler its method back, unless another one is around this."""
        self._steps = lambda: None
        own = vars(self.scaler)
        while isinstance(outer := own.get("step"), CountedSteps) and outer._steps() is None:
            own.pop("step")
            own |= {} if outer._own is None else {"step": outer._own}
