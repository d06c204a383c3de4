"""Models whose training steps are measured, with random data: the same parameters and kinds of data at every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import cross_entropy, gelu, mse_loss, relu, scaled_dot_product_attention

from bench.training import fashion_mnist

WIDTH, DEPTH, ROWS = 1024, 7, 32
VOCABULARY, CONTEXT, SEQUENCES = 256, 32, 4
IMAGES, PIXELS, CLASSES = 4, 32, 10
DIGIT_PIXELS, FASHION_PIXELS = 8, 28
ROWS_OF_TABLE, ROW_WIDTH, ENTRIES = 16384, 256, 16

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and the way in which it is trained.

    Attributes:
        model: makes the model, with the same values at every call.
        batch: draws inputs and answers from a generator.
        loss: the loss of outputs, given the answers.
        bucket_cap_mb: size of DDP's buckets in MiB, a seventh of the gradients or less; a larger parameter has a bucket
            of its own.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    bucket_cap_mb: float


# -------------------------------------------------------------------- matrices one after the other


def mlp() -> torch.nn.Module:
    """Seven matrices of 1024 x 1024 with biases: 7.3 million parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(DEPTH)]
    return torch.nn.Sequential(*layers)


def _vectors(generator: torch.Generator) -> Batch:
    inputs, answers = torch.randn(2, ROWS, WIDTH, generator=generator)
    return inputs, answers


# -------------------------------------------------------------------- transformer


class Block(torch.nn.Module):
    """A block of a transformer: causal attention and two layers, each after a norm and beside an identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.projection = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], 3, self.heads, -1)  # sequences, positions, q k v, heads, width of a head
        q, k, v = self.qkv(self.attention_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.projection(attended)
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class Transformer(torch.nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(CONTEXT, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, ``[sequences, positions, vocabulary]``."""
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))


def transformer_1m() -> torch.nn.Module:
    """Five blocks of width 128: 1.07 million parameters."""
    torch.manual_seed(0)
    return Transformer(128, 4, 5)


def transformer_10m() -> torch.nn.Module:
    """Eight blocks of width 320: 10.0 million parameters."""
    torch.manual_seed(0)
    return Transformer(320, 5, 8)


def bytes_lm() -> torch.nn.Module:
    """The network of ``examples/bytes_lm.py``, two blocks of width 128: 470 thousand parameters."""
    from examples import bytes_lm as example  # late, as other examples are

    torch.manual_seed(0)
    return example.ByteTransformer()


def _windows(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (8, 65), generator=generator)  # half of its batch
    return tokens[:, :-1], tokens[:, 1:]


def _texts(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (SEQUENCES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _token_loss(scores: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores.flatten(0, 1), answers.flatten())


# -------------------------------------------------------------------- convolutions


class Residual(torch.nn.Module):
    """Two convolutions with norms, beside an identity or a projection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = torch.nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = torch.nn.GroupNorm(8, after), torch.nn.GroupNorm(8, after)
        same = before == after and stride == 1
        self.beside = torch.nn.Identity() if same else torch.nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(inner)) + self.beside(x))


def convnet() -> torch.nn.Module:
    """Six residual blocks of 64 to 256 channels: 2.8 million parameters."""
    torch.manual_seed(0)
    stem = torch.nn.Conv2d(3, 64, 3, 2, padding=1, bias=False)
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Residual(*size) for size in sizes]
    ending = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, CLASSES)]
    return torch.nn.Sequential(stem, torch.nn.GroupNorm(8, 64), torch.nn.ReLU(), *blocks, *ending)


def _images(generator: torch.Generator) -> Batch:
    images = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=generator)
    return images, torch.randint(CLASSES, (IMAGES,), generator=generator)


# -------------------------------------------------------------------- small networks for real data


def digits() -> torch.nn.Module:
    """The network of ``examples/digits.py``, two convolutions and two layers: 151 thousand parameters."""
    from examples import digits as example  # late, because it needs scikit-learn

    torch.manual_seed(0)
    return example.build_model()


def fashion() -> torch.nn.Module:
    """The network for Fashion-MNIST, two convolutions and two layers: 207 thousand parameters."""
    torch.manual_seed(0)
    return fashion_mnist.build_model()


def _grey_images(count: int, pixels: int, generator: torch.Generator) -> Batch:
    images = torch.randn(count, 1, pixels, pixels, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


# -------------------------------------------------------------------- a wide embedding


def embedding() -> torch.nn.Module:
    """A table of 16384 rows of 256 numbers, whose means go through three layers: 4.3 million parameters.

    The table is almost all of the model. Its gradient is the last one, and most of its rows are zero.
    """
    torch.manual_seed(0)
    table = torch.nn.EmbeddingBag(ROWS_OF_TABLE, ROW_WIDTH, mode="mean")
    layers = [torch.nn.Sequential(torch.nn.Linear(ROW_WIDTH, ROW_WIDTH), torch.nn.ReLU()) for _ in range(2)]
    return torch.nn.Sequential(table, *layers, torch.nn.Linear(ROW_WIDTH, CLASSES))


def _bags(generator: torch.Generator) -> Batch:
    rows = torch.randint(ROWS_OF_TABLE, (ROWS, ENTRIES), generator=generator)
    return rows, torch.randint(CLASSES, (ROWS,), generator=generator)


WORKLOADS = {
    "mlp": Workload(mlp, _vectors, mse_loss, bucket_cap_mb=4),
    "bytes_lm": Workload(bytes_lm, _windows, _token_loss, bucket_cap_mb=0.25),
    "transformer_1m": Workload(transformer_1m, _texts, _token_loss, bucket_cap_mb=0.5),
    "transformer_10m": Workload(transformer_10m, _texts, _token_loss, bucket_cap_mb=4),
    "convnet": Workload(convnet, _images, cross_entropy, bucket_cap_mb=1),
    "digits": Workload(digits, partial(_grey_images, 32, DIGIT_PIXELS), cross_entropy, bucket_cap_mb=0.08),
    "fashion_mnist": Workload(fashion, partial(_grey_images, 64, FASHION_PIXELS), cross_entropy, bucket_cap_mb=0.1),
    "embedding": Workload(embedding, _bags, cross_entropy, bucket_cap_mb=0.25),
}
"""The workloads by the name of their model."""
