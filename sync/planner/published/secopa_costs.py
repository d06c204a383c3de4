"""SeCoPa's cost model: whether to compress a gradient, and into how many parts to cut it.

SeCoPa is the planner of HiPress (Bai et al., SOSP 2021, section 3.3). It decides for each gradient alone, from the time
of five primitives. Counts and constants are those of its published code, which differ a little from the paper: a
parameter server's serial work is ``K`` encodings and ``N + K - 2`` decodings for ``K < N`` parts and ``N`` nodes, the
code has one more of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..machines.machine import Floats


class Exchange(Enum):
    """How the nodes of HiPress exchange a gradient."""

    SERVER = "server"  # parts go to the nodes that own them, and back
    RING = "ring"


@dataclass(frozen=True)
class Primitive:
    """The time of a primitive as a function of a number of fp32 elements.

    Attributes:
        fixed_s: seconds for none.
        each_s: seconds for each element.
        least_s: seconds for sizes at which the line is below it, if it is more than ``fixed_s``.
    """

    fixed_s: float
    each_s: float
    least_s: float = 0.0

    def seconds(self, numel: Floats) -> Floats:
        """The time for each number of elements."""
        return np.maximum(self.fixed_s + self.each_s * numel, self.least_s)


@dataclass(frozen=True)
class SecopaCosts:
    """The primitives of a cluster. Encodings take raw elements, everything else what is sent, counted in fp32.

    Attributes:
        nodes: number of nodes, at least 2.
        encode, decode, gather, broadcast, hop: the primitives.
        ratio: bytes of a payload over bytes of the gradient.
    """

    nodes: int
    encode: Primitive
    decode: Primitive
    gather: Primitive
    broadcast: Primitive
    hop: Primitive
    ratio: float

    def exact_s(self, numel: int, exchange: Exchange) -> Floats:
        """Seconds without compression in 1 to ``nodes`` parts."""
        return self._send_s(numel / self._parts, exchange)

    def compressed_s(self, numel: int, exchange: Exchange) -> Floats:
        """Seconds with compression in 1 to ``nodes`` parts."""
        parts, nodes = self._parts, self.nodes
        raw, sent = numel / parts, numel * self.ratio / parts
        if exchange == Exchange.SERVER:
            encodings, decodings = np.minimum(parts + 1, nodes), np.minimum(nodes - 1 + parts, 2 * (nodes - 1))
        else:
            encodings = decodings = np.full(nodes, float(nodes))
        codec_s = encodings * self.encode.seconds(raw) + decodings * self.decode.seconds(sent)
        return self._send_s(sent, exchange) + codec_s

    def _send_s(self, numel: Floats, exchange: Exchange) -> Floats:
        if exchange == Exchange.SERVER:
            return self.gather.seconds(numel) + self.broadcast.seconds(numel)
        return 2 * (self.nodes - 1) * self.hop.seconds(numel)

    @property
    def _parts(self) -> Floats:
        return np.arange(1.0, self.nodes + 1)


@dataclass(frozen=True)
class SecopaDecision:
    """SeCoPa's decision about a gradient.

    Attributes:
        compress: whether to compress it.
        parts: number of parts.
    """

    compress: bool
    parts: int


def decide(numel: int, costs: SecopaCosts, exchange: Exchange) -> SecopaDecision:
    """The decision for a gradient of ``numel`` elements. Between equal numbers of parts it takes the smaller one."""
    exact_s, compressed_s = costs.exact_s(numel, exchange), costs.compressed_s(numel, exchange)
    compress = bool(exact_s.min() > compressed_s.min())
    return SecopaDecision(compress, 1 + int((compressed_s if compress else exact_s).argmin()))
