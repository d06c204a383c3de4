"""Relative errors of compressors on gradients: how far the decoded values are from the encoded ones.

The error of a vector ``p`` is ``|p - decode(encode(p))| / |p|``. With error feedback ``p`` is the gradient plus the
residual, which is what a rank encodes. So feedback is warmed up on some gradients before the error is measured on the
following ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from gckernels import functional
from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.ops import PowerSGD
from gckernels.ops.powersgd import reference as powersgd

_LAST_STEP = 2**40  # compressors that begin mildly are judged by their final settings
_SEED = 0x5EED


def relative_error(method: Compressor, gradients: Sequence[torch.Tensor], shape: Sequence[int] | None) -> float | None:
    """The relative error of a method on consecutive gradients of one tensor, as a root mean square.

    A method with feedback is warmed up on the first half of the gradients. Gradients with inf or NaN are left out.

    Args:
        method: the method, whether it is fitted to the tensor or not.
        gradients: vectors of ``numel`` elements each, in memory order, on the CPU.
        shape: the sizes of the tensor's dimensions in memory order; ``None`` if they are not known.

    Returns:
        The error; 0 without elements; ``None`` if the method cannot be measured: all gradients are zero or have inf or
        NaN, the method leaves tensors of this shape or dtype alone, or it is neither a codec nor ``PowerSGD``.
    """
    fitted = method if shape is None else method.fit(shape)
    finite = [gradient for gradient in gradients if gradient.isfinite().all()]
    if not finite or fitted.name != method.name or finite[0].dtype not in GRAD_DTYPES:
        return None
    if isinstance(fitted, Codec):
        pairs = _coded(fitted, finite)
    elif isinstance(fitted, PowerSGD) and fitted.rows is not None:
        pairs = _projected(fitted, finite)
    else:
        return None
    first = len(finite) // 2 if method.traits.needs_feedback else 0
    squares = [_square(values, decoded) for values, decoded in list(pairs)[first:]]
    known = [square for square in squares if square is not None]  # zeros say nothing of the gradients that follow
    if not known:
        return None if finite[0].numel() else 0.0
    return math.sqrt(sum(known) / len(known))


def relative_errors(
    methods: Sequence[Compressor], gradients: Sequence[torch.Tensor], shape: Sequence[int] | None
) -> dict[str, float]:
    """The relative errors of those methods that can be measured, by their specs; see :func:`relative_error`."""
    errors = {str(method): relative_error(method, gradients, shape) for method in methods}
    return {spec: error for spec, error in errors.items() if error is not None}


def _square(values: torch.Tensor, decoded: torch.Tensor) -> float | None:
    before, left = values.double().square().sum().item(), (values - decoded).double().square().sum().item()
    return left / before if before else None


def _coded(compressor: Codec, gradients: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each gradient the values that are encoded, and the values that are decoded, both in fp32."""
    numel, states = gradients[0].numel(), compressor.traits.states
    final = compressor.at_step(_LAST_STEP)
    assert isinstance(final, Codec)
    residual = (
        torch.zeros(states * numel, dtype=torch.float32, device="cpu") if compressor.traits.needs_feedback else None
    )
    for step, gradient in enumerate(gradients):
        values = gradient.float()
        if residual is not None:
            values = final.accumulate(values, residual)[-numel:] if numel else values
        kept = residual if residual is None or states == 1 else residual.view(states, numel)
        payload = functional.encode(final, gradient, kept, seed=_SEED + step)
        yield values, functional.decode(final, payload, numel)


def _projected(method: PowerSGD, gradients: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same for the low-rank method, in which both factors are computed in every step."""
    numel = gradients[0].numel()
    rows, cols = method.sides(numel)
    residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
    kept = residual.new_zeros(method.rank, cols)
    for step, gradient in enumerate(gradients):
        values = powersgd.matrix(gradient, residual, rows)
        start = kept if method.warm_start else torch.zeros_like(kept)
        basis = powersgd.orthogonalise(powersgd.left_of(values, powersgd.orthogonalise(start, _SEED + step), 1.0), None)
        kept = powersgd.right_of(values, basis, 1.0)
        product, changed = powersgd.reconstruct(basis, kept, gradient, residual)
        assert changed is not None
        residual = changed
        yield values.reshape(-1), product.float()


_SHAPE = (256, 512)
_SAMPLES, _STEPS = 32, 6
_RMS = 0.01  # compressors with an absolute threshold depend on it


@functools.lru_cache(maxsize=256)
def assumed_error(method: Compressor) -> float | None:
    """The relative error of a method on synthetic gradients; ``None`` if it cannot be measured.

    Args:
        method: the method, not fitted to a shape.
    """
    return relative_error(method, synthetic_gradients(), _SHAPE)


def synthetic_gradients() -> tuple[torch.Tensor, ...]:
    """Consecutive gradients of a matrix, as vectors; always the same. They take milliseconds, and megabytes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")

    rows, cols = _SHAPE
    by_row, by_col = normal(rows, 1).mul(0.5).exp(), normal(1, cols).mul(0.3).exp()
    gradients = []
    for _ in range(_STEPS):
        by_sample = normal(_SAMPLES, 1).exp()  # few samples have most of the loss
        deltas, inputs = normal(_SAMPLES, rows) * by_sample, normal(_SAMPLES, cols).relu()
        with torch.autocast("cpu", enabled=False):  # the caller's would have products in another type
            gradient = (deltas.T @ inputs * by_row * by_col).view(-1)
        gradients.append(gradient * (_RMS / gradient.square().mean().sqrt()))
    return tuple(gradients)
