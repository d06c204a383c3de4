"""A byte-level language model of Python source: a small transformer, data-parallel.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m examples.bytes_lm \
        --compressor "BlockQuant(bits=4)"

The text is the source of the running Python's own standard library, so nothing is downloaded;
another Python version means slightly different text and slightly different figures. This is an
ordinary DDP script; gradient compression adds only the two marked lines.
"""

import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from examples import common
from gckernels import sync  # <- gckernels 1/2

MAX_TEXT_NBYTES = 4_000_000
MIN_TEXT_NBYTES = 1_000_000  # with less text, the model memorises it
VALID_EVERY = 20  # every 20th source file is kept for validation
VALID_WINDOWS = 1024

CONTEXT = 64  # bytes of input
BATCH = 16  # windows per step, over all ranks
WIDTH, DEPTH, HEADS = 128, 2, 4
PEAK_LR = 3e-3
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"


def load_text() -> list[torch.Tensor]:
    """Return the training and the validation text as uint8 vectors."""
    folder = Path(sysconfig.get_path("stdlib"))
    train, valid, nbytes = bytearray(), bytearray(), 0
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        if nbytes >= MAX_TEXT_NBYTES:
            break
        source = path.read_bytes()
        (valid if index % VALID_EVERY == 0 else train).extend(source)
        nbytes += len(source)
    if nbytes < MIN_TEXT_NBYTES:
        raise SystemExit(
            f"This example trains on the source of Python's standard library, but {folder} has only "
            f"{nbytes} bytes of .py files. Some distributions ship Python without that source; use a "
            "Python that has it."
        )
    return [torch.frombuffer(part, dtype=torch.uint8) for part in (train, valid)]


def windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [len(starts), CONTEXT]; each target is the next byte."""
    chunk = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return chunk[:, :-1], chunk[:, 1:]


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, length, width / heads]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class ByteTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.bytes(x) + self.positions(positions)))


def make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)


def train(
    model: nn.Module,
    text: torch.Tensor,
    timer: common.StepTimer,
    *,
    steps: int,
    peak_lr: float = PEAK_LR,
    log_every: int = 0,
    make_optimizer: Callable[..., torch.optim.Optimizer] = make_adamw,
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=peak_lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(steps):
        # Every rank draws the same starts and takes its own part of them.
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))[rank::world_size]
        inputs, targets = (t.to(device) for t in windows(text, starts))
        with timer:
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if log_every and rank == 0 and (step + 1) % log_every == 0:
            bits = loss.item() / math.log(2)
            common.show_progress(step + 1, steps, f"training loss {bits:.2f} bits per byte")


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Return the share of correctly predicted bytes and the bits per byte, on evenly spaced windows."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, VALID_WINDOWS).long()
    correct_and_nats = torch.zeros(2, device=device)
    # Each rank evaluates its share of the windows; the allreduce adds up the sums.
    for part in starts[dist.get_rank() :: dist.get_world_size()].split(64):
        inputs, targets = (t.to(device) for t in windows(text, part))
        logits, targets = model(inputs).flatten(0, 1), targets.flatten()
        correct_and_nats[0] += (logits.argmax(dim=-1) == targets).sum()
        correct_and_nats[1] += cross_entropy(logits, targets, reduction="sum")
    dist.all_reduce(correct_and_nats)
    accuracy, nats_per_byte = (correct_and_nats / (VALID_WINDOWS * CONTEXT)).tolist()
    return accuracy, nats_per_byte / math.log(2)


def wrapped(network: nn.Module, compressor: str) -> tuple[nn.Module, sync.Attachment | None]:
    """Return the model in DDP, and what compresses its gradients."""
    model, handle = DistributedDataParallel(network), None
    if compressor == "auto":
        handle = sync.attach(model)  # <- gckernels 2/2
    elif compressor == common.FP16_HOOK:  # for comparison
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif compressor != "none":
        handle = sync.attach(model, compressor)
    return model, handle


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    train_text, valid_text = load_text()
    device = common.init_process_group()
    torch.manual_seed(args.seed)

    network = ByteTransformer().to(device)
    optimizer = make_adamw(network.parameters())
    if args.compressor == common.UPDATES:  # no wrapper, which would send gradients
        model: nn.Module = network
        handle: sync.Attachment | None = sync.attach(network, sync.Updates(optimizer, SIGNS, every=common.ROUND_STEPS))
    else:
        model, handle = wrapped(network, args.compressor)

    timer = common.StepTimer(device)
    train(model, train_text, timer, steps=args.steps, log_every=25, make_optimizer=lambda _: optimizer)

    accuracy, bits_per_byte = evaluate(network, valid_text, device)
    common.report(
        args,
        example="bytes_lm",
        model=model,
        handle=handle,
        timer=timer,
        accuracy=accuracy,
        bits_per_byte=bits_per_byte,
    )
    if handle is not None:
        handle.close()


if __name__ == "__main__":
    main()
    common.destroy_process_group()
