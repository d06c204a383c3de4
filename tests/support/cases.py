"""Cases of a test that run in one item: collecting and reporting an item costs more than most cases take."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

# without a GPU, torch.manual_seed formats the caller's stack once for each kind of device that is missing
_seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def seed_everything() -> None:
    """Let every case begin with the same random numbers."""
    random.seed(0)
    np.random.seed(0)
    _seed_torch(0)


def cases(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with every value, as ``pytest.mark.parametrize`` does, but those with the same marks in one item.

    All of them run, also if some fail. Then the item fails with an error for each, which names its case. Otherwise, if
    some were skipped, the item is shown as skipped, with their number and the last reason.

    Args:
        names: the argument of the test that gets the value, or the arguments that get the entries of it.
        values: the values; ``pytest.param`` gives one marks and a name.
    """
    arguments = (names,) if isinstance(names, str) else tuple(names)
    groups: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
    marks: dict[str, Collection[Any]] = {}
    for value in values:
        given = value if hasattr(value, "marks") else pytest.param(*([value] if len(arguments) == 1 else value))
        key = repr(given.marks)
        marks[key] = given.marks
        groups.setdefault(key, []).append((given.id or "-".join(map(str, given.values)), given.values))
    together = f"{'_'.join(arguments)}_cases"
    params = [
        pytest.param(each, id=each[0][0] if len(each) == 1 else f"{len(each)} from {each[0][0]}", marks=marks[key])
        for key, each in groups.items()
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*fixtures: Any, **more: Any) -> None:
            errors, reasons = [], []
            group = more.pop(together)
            for name, each in group:
                seed_everything()
                try:
                    test(*fixtures, **more, **dict(zip(arguments, each, strict=True)))
                except pytest.skip.Exception as skipped:
                    reasons.append(skipped.msg)
                except Exception as error:
                    error.add_note(f"case {name}")
                    errors.append(error)
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise ExceptionGroup(f"{len(errors)} cases failed", errors)
            if reasons:
                pytest.skip(f"{len(reasons)} of {len(group)} cases: {reasons[-1]}")

        signature = inspect.signature(test)
        kept = [each for each in signature.parameters.values() if each.name not in arguments]
        added = inspect.Parameter(together, inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*kept, added])  # type: ignore[attr-defined]
        return pytest.mark.parametrize(together, params)(run)

    return decorate
