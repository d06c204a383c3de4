"""A pytest plugin that ends a worker whose connection to the GPU is broken; pytest-xdist then starts another one.

After an illegal access every call of CUDA fails in that process, and so would every later test.
"""

from __future__ import annotations

import os
import sys

import pytest

from bench.lib.faults import is_broken


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    report = yield
    if "PYTEST_XDIST_WORKER" in os.environ and call.excinfo is not None and is_broken(str(call.excinfo.value)):
        print(f"{item.nodeid}: {call.excinfo.exconly()}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report
