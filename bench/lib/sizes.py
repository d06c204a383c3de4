"""Numbers as people write them on a command line: of elements, ``16Ki`` is 16384, ``4Mi`` is 4194304; and of things of
which one is none."""

from __future__ import annotations

import argparse


def format_numel(numel: int) -> str:
    """``16384`` as ``16Ki``."""
    for unit, factor in (("Mi", 2**20), ("Ki", 2**10)):
        if numel % factor == 0:
            return f"{numel // factor}{unit}"
    return str(numel)


def parse_numel(text: str) -> int:
    """``16Ki``, ``32Mi`` or a plain number of elements.

    Raises:
        ValueError: anything else, and numbers below 1.
    """
    factor = {"Ki": 2**10, "Mi": 2**20}.get(text[-2:], 1)
    numel = int(text[:-2] if factor > 1 else text) * factor
    if numel < 1:
        raise ValueError(f"a size must be at least 1 element, got {text!r}")
    return numel


def two_or_more(text: str) -> int:
    """A number of rounds, or of ranks.

    Raises:
        ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a whole number from 2 up, got {text!r}")
    return int(text)
