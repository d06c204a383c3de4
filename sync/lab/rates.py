"""Rates of links in the notation of ``tc``, and the token buckets that keep them."""

from __future__ import annotations

import re

UNTHROTTLED = "none"
QUEUE = "50ms"
BUCKET_S, BUCKET_NBYTES = 0.001, 4096  # with smaller buckets, late timers cost throughput on busy cores


def checked_rate(text: str) -> str:
    """Return ``text`` unchanged if it is a valid rate of links.

    Raises:
        ValueError: ``text`` is not a rate.
    """
    if text != UNTHROTTLED and re.fullmatch(r"[1-9][0-9]*[kmg]bit", text) is None:
        raise ValueError(f"rate must be written like 100mbit or 1gbit, or be {UNTHROTTLED}; got {text!r}")
    return text


def bucket_nbytes(rate: str) -> int:
    """Size of the token bucket: bytes that pass without delay after a pause, on a link of this rate."""
    bits_per_s = int(rate[:-4]) * {"k": 10**3, "m": 10**6, "g": 10**9}[rate[-4]]
    return BUCKET_NBYTES + int(bits_per_s / 8 * BUCKET_S)


def token_bucket(rate: str) -> list[str]:
    """Arguments of ``tc`` for a token bucket of a rate."""
    return ["tbf", "rate", rate, "burst", str(bucket_nbytes(rate)), "latency", QUEUE]
