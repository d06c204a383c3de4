"""All policies by name: those of the planner, and their rivals."""

from __future__ import annotations

from collections.abc import Mapping

from bench.rivals.cupcake import cupcake
from bench.rivals.limits import bound, exhaustive
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.problem import Policy

RIVALS: Mapping[str, Policy] = {"cupcake": cupcake, "bound": bound, "exhaustive": exhaustive}
EVERY_POLICY: Mapping[str, Policy] = {**POLICIES, **RIVALS}
