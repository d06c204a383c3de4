"""Policies: functions that choose the plan for a problem, by name. Each has a module."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import Policy
from .none import none

STARTS: Mapping[str, Policy] = {
    "none": none,
}
"""The policies from whose plans ``auto`` starts."""

POLICIES: Mapping[str, Policy] = {
    **STARTS,
}
"""All policies."""
