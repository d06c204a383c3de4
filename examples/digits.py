"""Image classification on scikit-learn's handwritten digits: a small CNN, data-parallel.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/digits.py \
        --compressor EFSignSGD

An ordinary DDP script. The three marked lines are all that gradient compression adds.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import common
import gckernels  # <- gckernels 1/3
from gckernels import sync  # <- gckernels 2/3

BATCH = 64  # images per step, over all ranks
TEST_IMAGES = 360  # a fifth of the 1797
PEAK_LR = 0.03


def load_data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images [1797, 1, 8, 8] in 0..1 and their labels, in one fixed shuffled order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    return images[order].to(device), labels[order].to(device)


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


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    device = common.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    images, labels = load_data(device)
    test_images, test_labels = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    images, labels = images[TEST_IMAGES:], labels[TEST_IMAGES:]
    steps_per_epoch = len(images) // BATCH

    model = DistributedDataParallel(build_model().to(device))
    handle = None
    if args.compressor != "none":
        handle = sync.attach(model, gckernels.from_spec(args.compressor))  # <- gckernels 3/3

    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4)
    steps = args.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_LR, total_steps=steps)
    timer = common.StepTimer(device)

    for _ in range(args.epochs):
        # The same permutation on every rank; each rank takes its own part of every batch.
        order = torch.randperm(len(images)).to(device)
        for step in range(steps_per_epoch):
            batch = order[step * BATCH : (step + 1) * BATCH][rank::world_size]
            with timer:
                loss = cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()

    with torch.no_grad():
        predicted = model.module(test_images).argmax(dim=1)
    accuracy = (predicted == test_labels).float().mean().item()
    common.report(
        args,
        example="digits",
        model=model,
        handle=handle,
        timer=timer,
        accuracy=accuracy,
    )
    if handle is not None:
        handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
