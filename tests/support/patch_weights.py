"""Weights for the tests of patches: tensors of every kind, and changes like those of training."""

from __future__ import annotations

import torch

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    *(torch.float32, torch.int64, torch.bool),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor of any patterns: NaNs, infinities, -0 and denormals among them."""
    nbytes = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    drawn = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), generator=generator).to(torch.uint8)
    return drawn.view(dtype).view(shape)


def changed(tensors: dict[str, torch.Tensor], share: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Copies of tensors, in which a share of the elements has other bits; in each case one bit is another one."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in copies.values():
        flat = bits(tensor)
        flips = (torch.rand(flat.numel(), generator=generator) < share).to(torch.uint8)
        flat ^= flips  # the lowest bit, so that a bool stays one
    return copies


def trained(numel: int, rate: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights like those of a language model, before and after a step of Adam with this rate."""
    masters = torch.randn(numel, generator=generator) * 0.02
    return masters.bfloat16(), (masters + rate / 2 * torch.randn(numel, generator=generator)).bfloat16()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether tensors have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)
