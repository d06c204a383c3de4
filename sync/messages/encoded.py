"""Messages whose units are encoded: a program tied to its buffers.

:class:`EncodedMessage` takes its units through the program once, when it is built: every step allocates what it writes
and becomes a stage. What a rank has at a point is raw data or payloads, or nothing, where a root has it. The sizes are
those of :func:`~gckernels.sync.programs.sizes.sizes_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gckernels.batch import bind_recodes
from gckernels.compressor import Decoding, Encoding, Recoding

from ..programs.sizes import Data, sent_nbytes
from ..programs.steps import AllReduce, Broadcast, Collective, Decode, Encode, Hop, Program, ReduceScatter, describe
from ..resources.communicators import Communicators
from ..resources.feedback import ENCODINGS, Feedback
from .binder import Binder, Held, Payloads, Raw, decode_all
from .collectives import columns, cut, join, of_payloads, of_raw
from .message import Message, Unit, one_shot, step_seed
from .ring import bind_hop, bind_start


class EncodedMessage(Message):
    """Units that go through a program together.

    Args:
        program: of all units.
        units: of one dtype and root; with the same payload dtype where payloads are added.
        communicators: a process group for every collective of the program.
        feedback: where the residuals are kept.
        seed: of the stochastic compressors.
        keep_unused: a unit whose gradient is all zero takes nothing out of its residual. For models with parameters
            that a step may not use: DDP throws the result of a parameter away that no rank has used, and what the
            residuals gave to it would be lost. Costs one more pass over the gradient.
        channel: of the communicators.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seed: int,
        keep_unused: bool,
        channel: int = 0,
    ) -> None:
        binder = Binder(program, units, communicators, feedback, seed, keep_unused, channel)
        self.keys, self.channel = tuple(unit.plan.key for unit in units), channel
        self.sent_nbytes = sum(
            sent_nbytes(step, states[index], states[index + 1], binder.topology)
            for states in binder.states
            for index, step in enumerate(program)
        )
        held: Held = binder.gradients()
        kinds, kind, index = iter(ENCODINGS), "", 0
        while index < len(program):
            step = program[index]
            held = binder.moved(held, binder.at(index), binder.place(index))
            if _recodes(binder, index):
                kind = next(kinds)
                held = _recode(binder, index, kind, held)
                index += 1
            elif isinstance(step, Encode):
                kind = next(kinds)
                held = _encode(binder, index, kind, held)
            elif isinstance(step, Decode):
                held = _decode(binder, index, held)
            else:
                held = _communicate(binder, index, step, kind, held)
            index += 1
        binder.moved(held, binder.at(index), binder.place(index))
        self.stages = binder.stages


# -------------------------------------------------------------------- encode and decode


def _encode(binder: Binder, index: int, kind: str, held: Held) -> Held:
    if not isinstance(held, Raw):
        return None
    data, following = binder.at(index + 1), binder.program[index + 1]
    if isinstance(following, Hop):
        return bind_start(binder, data, following, kind, held)
    scale = 1.0
    if isinstance(following, AllReduce):  # scaled before they are added, so that 16-bit sums stay in range
        scale /= binder.topology.size(following.level)
    payloads, own = binder.payloads(data, held.place)
    encodings = []
    for unit, piece, payload, each in zip(binder.units, held.pieces, own, data, strict=True):
        kept, seed = binder.residual(kind, unit, piece.numel(), held.place), binder.seed(kind, unit, each.flow)
        encodings.append((Encoding(one_shot(unit, kind), piece, kept, payload[0], seed, each.size), piece))
    binder.compute(describe((binder.program[index],)), binder.encode(encodings, scale), held.place)
    return payloads


def _decode(binder: Binder, index: int, held: Held) -> Held:
    if not isinstance(held, Payloads):
        return None
    before, target, scale = binder.at(index), binder.target(binder.at(index + 1), held.place), held.factor
    decodings = [
        Decoding(one_shot(unit), payload, piece, data.size)
        for unit, payload, piece, data in zip(
            binder.units, binder.unit_payloads(held.buffer, before), target.pieces, before, strict=True
        )
    ]
    binder.compute(describe((binder.program[index],)), decode_all(decodings, scale), held.place)
    return target


def may_recode(program: Program, index: int, keep_unused: bool) -> bool:
    """Whether step ``index`` may decode what the step after it encodes as a whole, as far as the program tells. Not
    where an unused unit must be found out, for which the decoded values are needed."""
    steps = program[index : index + 3]
    decoded = not keep_unused and [type(step) for step in steps[:2]] == [Decode, Encode]
    return decoded and not isinstance(steps[2], Hop | AllReduce)


def _recodes(binder: Binder, index: int) -> bool:
    """Whether step ``index`` and the one after it are done in one call."""
    if not may_recode(binder.program, index, binder.keep_unused) or binder.place(index) != binder.place(index + 1):
        return False
    before, after = binder.states[0][index], binder.states[0][index + 2]
    return before.chunks == after.chunks == 1


def _recode(binder: Binder, index: int, kind: str, held: Held) -> Held:
    if not isinstance(held, Payloads):
        return None
    before, after, scale = binder.at(index), binder.at(index + 2), held.factor
    payloads, own = binder.payloads(after, held.place)
    sources = binder.unit_payloads(held.buffer, before)
    recodings = []
    for unit, source, payload, data in zip(binder.units, sources, own, after, strict=True):
        numel = binder.length(unit, data.flow)
        kept, seed = binder.residual(kind, unit, numel, held.place), binder.seed(kind, unit, data.flow)
        recodings.append(Recoding(one_shot(unit), source[:, 0], kept, payload[0, 0], numel, seed, data.size))
    recode = bind_recodes(recodings, scale)

    def work(step: int) -> None:
        recode(step_seed(0, step))

    binder.compute("Recode", work, held.place)
    return payloads


# -------------------------------------------------------------------- collectives


def _communicate(binder: Binder, index: int, step: Collective, kind: str, held: Held) -> Held:
    before, after = binder.at(index), binder.at(index + 1)
    receives = isinstance(step, Broadcast) and binder.has_part(after[0].flow)
    if held is None and not receives:
        pass
    elif isinstance(step, Hop):
        held = bind_hop(binder, before, after, step, kind, held)
    elif before[0].flow.encoded:
        payloads = held if isinstance(held, Payloads) else binder.payloads(before, binder.place(index))[0]
        held = _communicate_payloads(binder, step, before, after, payloads)
    else:
        held = _communicate_raw(binder, step, before, after, held)
    binder.phase += 1
    return held if binder.has_part(after[0].flow) else None


def _communicate_payloads(
    binder: Binder, step: Collective, before: Sequence[Data], after: Sequence[Data], payloads: Payloads
) -> Payloads:
    ranks = binder.topology.size(step.level)
    index, root = (binder.topology.index(step.level, rank) for rank in (binder.rank, binder.root))
    closes = len(after[0].flow.opened) < len(before[0].flow.opened)
    number = binder.units[0].plan.compressor.payload_dtype
    group = binder.group(step.level, payloads.place)
    received, call = of_payloads(step, payloads.buffer, group, ranks, index, root, closes, number)
    binder.send(step, before, after, call, payloads.place)
    return replace(payloads, buffer=received)


def _communicate_raw(
    binder: Binder, step: Collective, before: Sequence[Data], after: Sequence[Data], held: Held
) -> Held:
    ranks, root = binder.topology.size(step.level), binder.topology.index(step.level, binder.root)
    raw = held if isinstance(held, Raw) else binder.raw(before)
    merges = len(after[0].flow.merged) > len(before[0].flow.merged)
    vector = _staged(binder, step, raw, after, ranks) if merges else raw.vector
    assert vector is not None
    received, call = of_raw(step, vector, binder.group(step.level), ranks, root)
    binder.send(step, before, after, call)
    if merges and after[0].flow.opened:
        return binder.raw(after, received)
    binder.phase += 1
    target = _put_back(binder, received, before, after)
    binder.phase -= 1
    return target


def _staged(binder: Binder, step: Collective, raw: Raw, after: Sequence[Data], ranks: int) -> torch.Tensor:
    """What is sent to be added up: this rank's share of the mean, in a vector, ``[ranks, numel]`` where it is split."""
    places = columns([data.numel for data in after])
    rows = ranks if isinstance(step, ReduceScatter) else 1
    first = raw.pieces[0]
    staged = first.new_zeros(rows, places[-1].stop)

    def work(step: int) -> None:
        for piece, place in zip(raw.pieces, places, strict=True):
            cut(piece, staged[:, place], 1.0 / ranks)

    binder.compute("Cut", work)
    return staged if isinstance(step, ReduceScatter) else staged[0]


def _put_back(binder: Binder, received: torch.Tensor, before: Sequence[Data], after: Sequence[Data]) -> Raw:
    """What came to every rank, shards side by side or as it is, to where it goes."""
    target = binder.target(after)
    shards = received.view(-1, received.shape[-1])
    places = columns([data.numel for data in before])

    def work(step: int) -> None:
        for piece, place in zip(target.pieces, places, strict=True):
            join(shards[:, place], piece)

    binder.compute("Join", work)
    return target
