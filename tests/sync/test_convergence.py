"""Training a small network on real data with every compressor at its default setting, against no compression."""

from __future__ import annotations

import statistics

import pytest
import torch
from ranks import run_ranks, values_of
from torch.nn.functional import cross_entropy

import gckernels
from gckernels import sync

SEEDS = (0, 1, 2)
EPOCHS, BATCH, PEAK_LR = 30, 64, 0.03
TEST_IMAGES = 360

# Of 3 x 360 test images about 1.5 % are missed, so the difference of two such means has a standard error of
# sqrt(2 * 0.015 * 0.985 / 1080) = 0.5 points. Three of them:
MARGIN = 0.015


def train(spec: str, seed: int) -> float:
    """Accuracy on the test images after training on two ranks; ``"none"`` is plain DDP."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order]
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    test_images, test_labels = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    images, labels = images[TEST_IMAGES:], labels[TEST_IMAGES:]

    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    model = torch.nn.parallel.DistributedDataParallel(network)
    attachment = None if spec == "none" else sync.attach(model, gckernels.from_spec(spec))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4)
    steps = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_LR, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        shuffled = torch.randperm(len(images))
        for step in range(steps):
            batch = shuffled[step * BATCH : (step + 1) * BATCH][rank::world_size]
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    if attachment is not None:
        attachment.close()
    with torch.no_grad():
        return (network(test_images).argmax(1) == test_labels).float().mean().item()


def accuracies(specs: list[str], seed: int) -> dict[str, float]:
    return {spec: train(spec, seed) for spec in specs}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_compressor_reaches_the_accuracy_of_no_compression():
    specs = ["none", *sorted(gckernels.COMPRESSORS)]
    by_seed = []
    for seed in SEEDS:
        first, second = values_of(run_ranks(2, accuracies, specs, seed, timeout_s=900))
        assert first == second  # the ranks have the same network
        by_seed.append(first)
    means = {spec: statistics.fmean(found[spec] for found in by_seed) for spec in specs}
    print("accuracy:", {spec: round(mean, 4) for spec, mean in means.items()})
    assert means["none"] > 0.97
    assert {spec: mean for spec, mean in means.items() if mean < means["none"] - MARGIN} == {}
