"""Contents: the data that a rank holds and sends between the steps of a program, for units of any size.

:mod:`.sizes` has the sizes of one unit. A planner has many units in many programs, which hold the same few contents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .layouts import Capabilities, Extent, Layout, propagate
from .sizes import WireRatio, wire_ratio
from .steps import Program
from .topology import Topology

RAW, RAW_FP32 = -2, -1
"""Data that is not encoded, in the dtype of the gradients or in fp32."""


class Content(NamedTuple):
    """The part of a unit that a rank holds, and its form.

    Attributes:
        extent: the elements of a piece.
        form: :data:`RAW`, :data:`RAW_FP32` or the round of the method that has made the payloads.
        pieces: the number of pieces.
    """

    extent: Extent
    form: int
    pieces: int

    @staticmethod
    def of(layout: Layout) -> Content:
        """The content of a layout."""
        pieces = layout.sources * layout.chunks
        if layout.flow.encoded:
            return Content(layout.payload, layout.round, pieces)
        return Content(layout.piece, RAW_FP32 if layout.is_fp32 else RAW, pieces)

    def nbytes(self, numel: int, itemsize: int, payload_nbytes: Callable[[int, int], int]) -> int:
        """The bytes for a unit.

        Args:
            numel: the elements of the unit.
            itemsize: the bytes of an element of its gradient.
            payload_nbytes: the bytes of a payload, for a number of elements and a round.
        """
        elements = self.extent.elements(numel)
        if self.form >= 0:
            return self.pieces * payload_nbytes(elements, self.form)
        return self.pieces * elements * (itemsize if self.form == RAW else 4)


class State(NamedTuple):
    """The state of a program after some of its steps.

    Attributes:
        piece: the elements of the unit that a rank holds.
        content: what it holds.
        sent: the content whose bytes, times :attr:`ratio`, it has sent in the last step.
        ratio: the bytes that it has sent per byte of that, as a mean over all ranks.
        sources: the number of payloads for the same elements.
    """

    piece: Extent
    content: Content
    sent: Content
    ratio: float
    sources: int


def states_of(program: Program, capabilities: Capabilities, topology: Topology) -> tuple[State, ...]:
    """The states before the first step and after each step.

    Args:
        program: the steps.
        capabilities: capabilities of the method of ``Encode`` and ``Decode``.
        topology: topology of the ranks.

    Raises:
        ProgramError: the program is not valid.
    """
    layouts = propagate(program, capabilities, topology)
    contents = [Content.of(layout) for layout in layouts]
    states = [State(layouts[0].piece, contents[0], contents[0], 0.0, layouts[0].sources)]
    for index, step in enumerate(program):
        ratio: WireRatio = wire_ratio(step, layouts[index].flow, topology)
        sent = contents[index + 1 if ratio.of_result else index]
        share = ratio.share * ratio.numerator / ratio.denominator
        after = layouts[index + 1]
        states.append(State(after.piece, contents[index + 1], sent, share, after.sources))
    return tuple(states)
