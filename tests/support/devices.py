"""Tests of several ranks on the simulated device, too; a plugin of pytest.

Every test in ``tests/sync`` that starts ranks runs on the CPU and on the simulated device, unless a mark
``host_only(reason)`` says why it has no meaning there. ``make test`` runs one in ten of them there, ``make test-slow``
all.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.simulated_device import build
from ranks import CPU, Device, ranks_on

_FOLDER = Path(__file__).parents[1] / "sync"
_STARTS = {"run_ranks", "values_of"}
_ONE_IN = 10


def starts_ranks(function: Any) -> bool:
    """Whether a test starts ranks, itself or by a function of its file."""
    seen, waiting = set(), [function]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, types.FunctionType) or each in seen or each.__module__ != function.__module__:
            continue
        seen.add(each)
        names = {name for code in _codes(each.__code__) for name in code.co_names}
        if names & _STARTS:
            return True
        waiting += [each.__globals__.get(name) for name in names]
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", type=int, metavar="SEED", help="let the simulated device work late, by this seed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host_only(reason): a test of ranks that has no meaning on a device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    definition = metafunc.definition
    if _FOLDER not in definition.path.parents or not starts_ranks(metafunc.function):
        return
    if definition.get_closest_marker("host_only") is not None:
        return
    marks = [] if zlib.crc32(definition.nodeid.encode()) % _ONE_IN == 0 else [pytest.mark.slow]
    simulated = Device("sim", metafunc.config.getoption("--late"))
    metafunc.parametrize(
        "_device", [CPU, pytest.param(simulated, marks=marks)], indirect=True, ids=[pytest.HIDDEN_PARAM, "sim"]
    )


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let ranks be on a device."""
    device = getattr(request, "param", CPU)
    if device != CPU and (reason := build.reason_against()) is not None:
        pytest.skip(reason)
    with ranks_on(device):
        yield
