"""Policies: functions that choose the plan for a problem, by name. Each has a module."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import Policy
from .auto import auto
from .bound import bound
from .exhaustive import exhaustive
from .starts import STARTS

POLICIES: Mapping[str, Policy] = {**STARTS, "bound": bound, "exhaustive": exhaustive, "auto": auto}
"""All policies."""
