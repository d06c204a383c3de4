"""Fashion-MNIST from its Debian package, and a small network for it; ``examples/digits.py`` has the training loop.

Xiao et al., arXiv:1708.07747: 60,000 training and 10,000 test images of clothes in ten classes, 28 x 28 in grey. The
package ``dataset-fashion-mnist`` installs the original files.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import nn

FOLDER = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
TRAIN_IMAGES, TEST_IMAGES = 60_000, 10_000
BATCH = 128  # images per step, over all ranks
PEAK_LR = 0.1
MEAN, DEVIATION = 72.9, 90.0  # mean and standard deviation of the training images' bytes


def is_installed() -> bool:
    return FOLDER.is_dir()


def load_data(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Training images ``[60000, 1, 28, 28]``, standardised, and their labels; then both of the test set."""
    loaded = []
    for part in ("train", "t10k"):
        images = read_idx(FOLDER / f"{part}-images-idx3-ubyte.gz").float().unsqueeze(1)
        labels = read_idx(FOLDER / f"{part}-labels-idx1-ubyte.gz").long()
        loaded += [images.sub_(MEAN).div_(DEVIATION).to(device), labels.to(device)]
    return tuple(loaded)


def read_idx(path: Path) -> torch.Tensor:
    """The array in a compressed idx file of bytes: 0, 0, type 8, number of dimensions; big-endian sizes; data."""
    raw = bytearray(gzip.decompress(path.read_bytes()))
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: not an idx file of bytes")
    first = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, first, 4)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=first).view(shape)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
