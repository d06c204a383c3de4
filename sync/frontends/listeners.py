"""Functions that are called at the end of every synchronised step, in one order."""

from __future__ import annotations

from collections.abc import Callable


class Listeners:
    """The functions to call at the end of each synchronising backward, when gradients have been averaged.

    They are not called for backwards that only accumulate gradients, nor for evaluations. As all ranks call them at the
    same point, they may use collectives, but not in DDP's ``join()``. Backward raises an exception that one raises.

    Args:
        follow: called with whether there are listeners, whenever one comes or goes.

    Attributes:
        parts: parts of the attachment, which are called first, with whether this rank has had inputs. They are called
            as well when the rank only takes part in a step of the others, in ``join()``.
        functions: the listeners, in the order in which they are called.
    """

    def __init__(self, follow: Callable[[bool], None]) -> None:
        self._follow = follow
        self.parts: tuple[Callable[[bool], None], ...] = ()
        self.functions: tuple[Callable[[], None], ...] = ()

    def add(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` from now on, after those that are there."""
        self.functions = (*self.functions, listener)
        self._follow(True)

    def remove(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` no more; without effect if it is not called."""
        self.functions = tuple(each for each in self.functions if each != listener)
        self._follow(bool(self.functions))

    def clear(self) -> None:
        """Call nothing any more."""
        self.parts, self.functions = (), ()

    def end_step(self, has_inputs: bool) -> None:
        """Call everything that follows steps. All ranks are here together.

        Args:
            has_inputs: whether this rank has had inputs.
        """
        for part in self.parts:
            part(has_inputs)
        for listener in self.functions if has_inputs else ():
            listener()
