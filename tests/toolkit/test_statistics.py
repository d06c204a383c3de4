"""The Euclidean norm of a block, and its shortcut."""

from __future__ import annotations

import pytest
import torch

from cases import cases
from gckernels.toolkit.constants import Constants
from gckernels.toolkit.quantizer.statistics import NORM

NONE = Constants()


def norm_of(values: torch.Tensor) -> torch.Tensor:
    partials = tuple(term.sum() for term in NORM.terms(values, NONE))
    return NORM.finish(partials, torch.tensor(float(values.numel())), NONE)[0]


@cases("exponent", range(-149, 128, 6))
@cases("numel", [1, 128, 16384])
def test_shortcut_gives_the_norm_where_it_holds(exponent, numel):
    shortcut = NORM.shortcut
    assert shortcut is not None
    values = torch.rand(numel, generator=torch.Generator().manual_seed(numel)).add(0.5) * 2.0**exponent
    partials = (shortcut.statistic.terms(values, NONE)[0].sum(),)
    exact = values.double().norm().item()
    holds = bool(shortcut.holds(partials, NONE))
    assert holds or not 2.0**-49 < exact < 2.0**62, "the shortcut should hold for usual values"
    if holds:
        (found,) = shortcut.statistic.finish(partials, torch.tensor(float(numel)), NONE)
        assert found.item() == pytest.approx(exact, rel=1e-5)
    if exact < 2.0**127:
        assert norm_of(values).item() == pytest.approx(exact, rel=1e-5, abs=2.0**-148)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0])
def test_shortcut_does_not_hold_for_blocks_without_a_usual_norm(value):
    shortcut = NORM.shortcut
    assert shortcut is not None
    (term,) = shortcut.statistic.terms(torch.full((128,), value), NONE)
    assert not shortcut.holds((term.sum(),), NONE)
