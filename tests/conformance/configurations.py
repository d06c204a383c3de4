"""The configurations of the conformance tests: every registered compressor, and facts about some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

from cases import cases
from gckernels import CODECS, Codec
from gckernels.codec import Decoding, Encoding
from gckernels.testing.agreement import assert_payloads_equal as assert_payloads_equal
from gckernels.testing.agreement import expected_residual as expected_residual
from gckernels.testing.agreement import has_sums as has_sums
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.testing.configurations import DEFAULTS as DEFAULTS  # the tests import both from here
from gckernels.toolkit.kernels.launch import Launch, record_launches
from helpers import interpreted

OURS = {name for name, cls in CODECS.items() if cls.__module__.startswith("gckernels.")}
"""The package's own compressors; only their docstrings are tested for the required statements."""


def parametrize(
    wanted: Callable[[Codec], bool] = lambda compressor: True,
    among: dict[str, Codec] = CONFIGURATIONS,
    quick: Collection[str] | None = None,
) -> pytest.MarkDecorator:
    """Run a test with every configuration that is ``wanted``, passed as ``compressor``. Configurations that are not
    ``quick`` are marked slow.

    Tests of properties of the class, such as its ops, pass ``among=DEFAULTS``.
    """
    chosen = [
        pytest.param(compressor, id=spec, marks=[] if quick is None or spec in quick else [pytest.mark.slow])
        for spec, compressor in among.items()
        if wanted(compressor)
    ]
    return pytest.mark.parametrize("compressor", chosen)


def for_each(
    wanted: Callable[[Codec], bool] = lambda compressor: True, among: dict[str, Codec] = CONFIGURATIONS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test that takes an instant with every configuration that is ``wanted``, in one item. The arguments are
    those of :func:`parametrize`."""
    return cases("compressor", [pytest.param(each, id=spec) for spec, each in among.items() if wanted(each)])


# -------------------------------------------------------------------- configurations that `make test` interprets


def _launches(compressor: Codec) -> list[Launch]:
    """The launches of encoding with feedback, and of decoding."""
    numel = 4096
    payload = torch.empty(1, 1, compressor.payload_nbytes(numel), dtype=torch.uint8)
    grad, residual = torch.empty(numel), torch.empty(compressor.traits.states * numel)
    with record_launches() as recorded:
        compressor.triton.encode(Encoding(compressor, grad, residual, payload[0], 0, numel))
        compressor.triton.decode(Decoding(compressor, payload, grad, numel))
    return recorded


def _first_with(part: Callable[[Launch], object]) -> dict[str, Codec]:
    """All configurations with a launch whose ``part`` occurs in no launch of the configurations before them."""
    found, seen = {}, set()
    for spec, compressor in CONFIGURATIONS.items():
        parts = {part(launch) for launch in _launches(compressor)}
        if not parts <= seen:
            found[spec] = compressor
        seen |= parts
    return found


def _kernel(launch: Launch) -> tuple[object, ...]:
    dtypes = tuple(value.dtype for value in launch.args if isinstance(value, torch.Tensor))
    return launch.kernel, dtypes, *sorted(launch.constexprs.items(), key=str)


DIFFERENT = _first_with(_kernel)
"""One configuration for every kernel that differs from the others in its text or in its compile-time arguments."""

KINDS = _first_with(lambda launch: launch.kernel)
"""One configuration for every kernel's text. The text handles sizes, chunks, strides and dtypes; the functions that a
compressor applies to values are compile-time arguments."""


QUICK = (*DEFAULTS, *(spec for spec in KINDS if spec not in DEFAULTS), "TopK(ratio=0.25, value_bits=4)")
"""Configurations of the tests of what one text of a host path or a kernel does for all of them, in ``make test``: the
default of every class, one for every kernel's text, and one with entries of 4 bits. ``make test-slow`` has all."""


ONE_OF_EACH_KIND = {spec: compressor for spec, compressor in DEFAULTS.items() if spec in KINDS}

INTERPRETED_IN_ALL = interpreted(DIFFERENT.values())
INTERPRETED_IN_KINDS = interpreted(KINDS.values())


# -------------------------------------------------------------------- exceptions from equality

SHOWN_ELSEWHERE = {"RandomK": "what is not sent cannot show where it is: everything that is sent shows it"}
"""Compressors whose inf or NaN shows in other elements than the one that was not finite, with the reason."""
