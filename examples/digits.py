"""Image classification on scikit-learn's handwritten digits: a small CNN, data-parallel.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m examples.digits \
        --compressor EFSignSGD

This is an ordinary DDP script; gradient compression adds only the two marked lines.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from examples import common
from gckernels import sync  # <- gckernels 1/2

BATCH = 64  # images per step, over all ranks
TRAIN_IMAGES, TEST_IMAGES = 1437, 360  # 1797 in total
PEAK_LR = 0.03


def load_data(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images [1437, 1, 8, 8] in 0..1 and their labels, then both of the test set.

    The order is shuffled with a fixed seed, so the test set is always the same.
    """
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order].to(device)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order].to(device)
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def make_sgd(parameters: Iterable[nn.Parameter], momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=momentum, weight_decay=5e-4)


def train(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    timer: common.StepTimer,
    *,
    epochs: int,
    peak_lr: float = PEAK_LR,
    batch_size: int = BATCH,
    make_optimizer: Callable[..., torch.optim.Optimizer] = make_sgd,
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps_per_epoch = len(images) // batch_size
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=peak_lr,
        total_steps=epochs * steps_per_epoch,
        cycle_momentum=optimizer.defaults.get("momentum", 0) > 0,
    )
    for _ in range(epochs):
        # Every rank draws the same permutation and takes its own part of every batch.
        order = torch.randperm(len(images)).to(images.device)
        for step in range(steps_per_epoch):
            batch = order[step * batch_size : (step + 1) * batch_size][rank::world_size]
            with timer:
                loss = cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of correctly classified images."""
    parts = zip(images.split(1000), labels.split(1000), strict=True)
    correct = sum((model(part).argmax(dim=1) == truth).sum().item() for part, truth in parts)
    return correct / len(labels)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    device = common.init_process_group()
    images, labels, test_images, test_labels = load_data(device)
    torch.manual_seed(args.seed)

    model = DistributedDataParallel(build_model().to(device))
    handle = None
    if args.compressor != "none":
        handle = sync.attach(model, args.compressor)  # <- gckernels 2/2

    timer = common.StepTimer(device)
    train(model, images, labels, timer, epochs=args.epochs)

    common.report(
        args,
        example="digits",
        model=model,
        handle=handle,
        timer=timer,
        accuracy=evaluate(model.module, test_images, test_labels),
    )
    if handle is not None:
        handle.close()


if __name__ == "__main__":
    main()
    common.destroy_process_group()
