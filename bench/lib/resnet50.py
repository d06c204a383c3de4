"""The shapes of ResNet-50's parameters (He et al., arXiv:1512.03385, table 1): many small units beside large ones."""

from __future__ import annotations

import math
from collections.abc import Iterator


def shapes() -> Iterator[tuple[int, ...]]:
    """The 161 shapes: a convolution's weight as a matrix, then weight and bias of the normalisation after it."""

    def convolution(inputs: int, outputs: int, width: int) -> Iterator[tuple[int, ...]]:
        yield from ((outputs, inputs * width * width), (outputs,), (outputs,))

    yield from convolution(3, 64, 7)
    inputs = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(inputs, planes, 1)
            yield from convolution(planes, planes, 3)
            yield from convolution(planes, 4 * planes, 1)
            if block == 0:
                yield from convolution(inputs, 4 * planes, 1)
            inputs = 4 * planes
    yield from ((1000, 2048), (1000,))


def sizes() -> Iterator[int]:
    """The numbers of elements of the parameters, 25.6 million in all."""
    return map(math.prod, shapes())
