"""A sample of the cases of every test; a plugin of pytest, for the option ``--sample``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest


def sampled(names: Iterable[str], one_in: int) -> set[str]:
    """One in ``one_in`` of the names of cases, and at least one of every test; the same ones in every run."""
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    by_test = [sorted(each, key=_number) for each in cases.values()]
    return {name for each in by_test for place, name in enumerate(each) if place == 0 or _number(name) % one_in == 0}


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="N", help="one in N of the cases, at least one of every test")


@pytest.hookimpl(trylast=True)  # after markers have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in = config.getoption("--sample")
    if one_in is None:
        return
    kept = sampled((item.nodeid for item in items), one_in)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
