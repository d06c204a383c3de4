"""Closed forms: the time of a step from a handful of numbers, without a timeline.

They are those of the Utility paper (Agarwal et al., "On the Utility of Gradient Compression in Distributed Training
Systems", MLSys 2022). Gradients without compression are averaged in buckets beside backward. Compressed gradients are
encoded after backward, sent, and decoded: nothing overlaps, because encoding beside backward was measured to be slower.

Sizes are in bytes, bandwidths in bits per second, as links are sold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BUCKET_NBYTES = 25e6
"""Bytes of a bucket of gradients; those of the paper are decimal."""
OVERLAP_SLOWDOWN = 1.07
"""How much longer backward takes beside communication; the paper has measured 1.04 to 1.1."""


@dataclass(frozen=True)
class RingLink:
    """Ranks around a ring of equal links.

    Attributes:
        ranks: their number.
        bandwidth_bit_per_s: the bandwidth of each link, in one direction.
        latency_s: seconds for each of the ``ranks - 1`` rounds of a collective.

    Raises:
        ValueError: a number is not valid.
    """

    ranks: int
    bandwidth_bit_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueError(f"Link: ranks must be an int from 1 up, got {self.ranks!r}")
        if not self.bandwidth_bit_per_s > 0:
            raise ValueError(f"Link: bandwidth_bit_per_s must be more than 0, got {self.bandwidth_bit_per_s!r}")
        if not self.latency_s >= 0:
            raise ValueError(f"Link: latency_s must be 0 or more, got {self.latency_s!r}")

    def allreduce_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce of ``nbytes`` bytes around the ring."""
        return self._rounds_s + 8 * 2 * nbytes * (self.ranks - 1) / (self.ranks * self.bandwidth_bit_per_s)

    def allgather_s(self, nbytes: float) -> float:
        """Seconds of an all-gather to which each rank gives ``nbytes`` bytes."""
        return self._rounds_s + 8 * nbytes * (self.ranks - 1) / self.bandwidth_bit_per_s

    @property
    def _rounds_s(self) -> float:
        return self.latency_s * (self.ranks - 1)


@dataclass(frozen=True)
class ClosedForm:
    """The time of backward and synchronisation of a step, in parts. All times are in seconds.

    Attributes:
        compute_s: backward, slowed down by what runs beside it.
        codec_s: encoding and decoding.
        communicate_s: all collectives, one after the other.
        hidden_s: the part of communication that overlaps with backward.
    """

    compute_s: float
    codec_s: float
    communicate_s: float
    hidden_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from the start of backward until all gradients are averaged."""
        return self.compute_s + self.codec_s + self.communicate_s - self.hidden_s


def sync_sgd(
    backward_s: float,
    nbytes: float,
    link: RingLink,
    bucket_nbytes: float = BUCKET_NBYTES,
    slowdown: float = OVERLAP_SLOWDOWN,
) -> ClosedForm:
    """The time without compression: all buckets but the last one are averaged beside backward.

    Args:
        backward_s: seconds of backward alone.
        nbytes: bytes of all gradients.
        link: the links.
        bucket_nbytes: bytes of a bucket; the last bucket has the rest.
        slowdown: the factor by which communication lengthens backward.
    """
    buckets = max(math.ceil(nbytes / bucket_nbytes), 1)
    beside_s = (buckets - 1) * link.allreduce_s(bucket_nbytes)
    last_s = link.allreduce_s(nbytes - (buckets - 1) * bucket_nbytes)
    compute_s = slowdown * backward_s
    return ClosedForm(compute_s, 0.0, beside_s + last_s, min(compute_s, beside_s))


def power_sgd(backward_s: float, codec_s: float, factors_nbytes: float, link: RingLink) -> ClosedForm:
    """The time of PowerSGD, which reduces two factors one after the other; both have ``factors_nbytes`` bytes together.

    Args:
        backward_s: seconds of backward alone.
        codec_s: seconds of encoding and decoding.
        factors_nbytes: bytes of both factors of all gradients.
        link: the links.
    """
    return ClosedForm(backward_s, codec_s, 2 * link.allreduce_s(factors_nbytes / 2))


def gathered(backward_s: float, codec_s: float, payload_nbytes: float, link: RingLink) -> ClosedForm:
    """The time of any method whose payloads are gathered; a rank's have ``payload_nbytes`` bytes together."""
    return ClosedForm(backward_s, codec_s, link.allgather_s(payload_nbytes))


def reduced(backward_s: float, codec_s: float, payload_nbytes: float, link: RingLink) -> ClosedForm:
    """The time of any method whose payloads are added; a rank's have ``payload_nbytes`` bytes together."""
    return ClosedForm(backward_s, codec_s, link.allreduce_s(payload_nbytes))
