"""Options of the benchmarks, and memory as torch gives it."""

from __future__ import annotations

import pytest

from bench.lib.sizes import parse_numel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compressors", nargs="+", metavar="SPEC", help='such as "EFSignSGD(block=1024)"')
    parser.addoption("--sizes", nargs="+", type=parse_numel, metavar="NUMEL", help="elements, such as 16Ki or 4Mi")


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory() -> None:
    """Poison no memory, which would be measured."""
