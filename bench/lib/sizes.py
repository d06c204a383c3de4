"""Numbers on command lines: sizes such as ``16Ki`` (16384 elements) and ``4Mi``, and counts of at least two."""

from __future__ import annotations

import argparse


def format_numel(numel: int) -> str:
    """``numel`` with a binary unit if it divides evenly: 16384 becomes ``"16Ki"``."""
    for unit, factor in (("Mi", 2**20), ("Ki", 2**10)):
        if numel % factor == 0:
            return f"{numel // factor}{unit}"
    return str(numel)


def parse_numel(text: str) -> int:
    """The number of elements written as ``16Ki``, ``32Mi`` or a plain number.

    Raises:
        ValueError: ``text`` is anything else, or less than 1.
    """
    factor = {"Ki": 2**10, "Mi": 2**20}.get(text[-2:], 1)
    numel = int(text[:-2] if factor > 1 else text) * factor
    if numel < 1:
        raise ValueError(f"a size must be at least 1 element, got {text!r}")
    return numel


def two_or_more(text: str) -> int:
    """The number written in ``text``, at least 2: a number of rounds or of ranks.

    Raises:
        ArgumentTypeError: ``text`` is anything else.
    """
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 2, got {text!r}")
    return int(text)
