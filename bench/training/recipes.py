"""Models and training recipes by which compressors are judged.

:func:`train_once` trains one model on all ranks, with one compressor or with plain DDP. ``convergence.py`` and
``make test-slow`` both call it, and judge the result by ``margins.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.training import fashion_mnist
from examples import bytes_lm, common, digits
from gckernels import sync

PLAIN = "none"  # DDP without a hook
SEEDS = (0, 1, 2)

# A sweep has more than a hundred runs, so each takes only seconds. digits reaches its plateau in that time,
# fashion_mnist comes within a point or two of it. bytes_lm stays far from it and compares how fast the loss falls.
DIGITS_EPOCHS = 30
FASHION_MNIST_EPOCHS = 3
LONG_FASHION_MNIST_EPOCHS = 10
BYTES_LM_STEPS = 500


# -------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """Changes to a model's training that a compressor needs, compared with plain DDP.

    Attributes:
        sgd_lr: factor on the peak learning rate of models trained by SGD (digits, fashion_mnist).
        adamw_lr: factor on the peak learning rate of models trained by AdamW (bytes_lm), which ignores the scale of
            the gradients.
        momentum: momentum of SGD.
        adamw_settings: fields of the compressor that differ from its defaults where AdamW trains.
        bare: whether SGD without momentum replaces AdamW, because the synchronised values already are the step.
        exact: share of the steps, at the start, that are sent uncompressed.
        warmup: share of the steps that the compressor's own warm-up takes.
        exempt: whether a parameter is sent uncompressed, given its name and itself.
        reason: why training differs from plain DDP.
    """

    sgd_lr: float = 1.0
    adamw_lr: float = 1.0
    momentum: float = 0.9
    adamw_settings: Mapping[str, object] = field(default_factory=dict)
    bare: bool = False
    exact: float = 0.0
    warmup: float = 0.0
    exempt: Callable[[str, nn.Parameter], bool] = sync.exempt_vectors
    reason: str = ""

    def lr_factor(self, adamw: bool) -> float:
        return self.adamw_lr if adamw else self.sgd_lr

    def compressor(self, spec: str, adamw: bool, steps: int) -> gckernels.Compressor:
        settings = dict(self.adamw_settings) if adamw else {}
        if self.warmup:
            settings["warmup_steps"] = int(self.warmup * steps)
        return dataclasses.replace(gckernels.from_spec(spec), **settings)


def _exempt_nothing(name: str, parameter: nn.Parameter) -> bool:
    return False


# By class name; compressors that are not listed train exactly like plain DDP.
_SIGN = (
    "the result is a bare sign: every step has the length of the learning rate, alike for all parameters, as with Adam"
)
_COARSE = Recipe(
    exact=0.1, reason="the first tenth of the steps is sent exactly: residuals lag when gradients change fastest"
)
SPARSIFIERS = ("TopK", "MSTopK", "GradDrop", "Threshold", "ChunkTopK", "RandomK", "DGC")
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(("OneBit", "EFSignSGD", "TBQ", "PowerSGD"), _COARSE),
    **dict.fromkeys(SPARSIFIERS, _COARSE),
    "RandomK": Recipe(
        sgd_lr=0.5,
        exact=0.1,
        reason="an element that waits four steps takes one step four times as long; otherwise like other sparsifiers",
    ),
    "DGC": Recipe(
        momentum=0.0,
        adamw_settings={"momentum": 0.0},
        warmup=0.2,
        reason="it applies the momentum itself, to the compressed gradients, so biases have none; AdamW replaces it; "
        "it starts with a warm-up",
    ),
    "SignSGD": Recipe(
        sgd_lr=1 / 30, momentum=0.0, exempt=_exempt_nothing, reason=f"{_SIGN}; where AdamW trains, its momentum helps"
    ),
    "SigNUM": Recipe(
        sgd_lr=1 / 30,
        adamw_lr=1 / 6,
        momentum=0.0,
        bare=True,
        exempt=_exempt_nothing,
        reason=f"{_SIGN}; it has its own momentum, and a second one after it would delay twice",
    ),
}


def recipe_of(spec: str) -> Recipe:
    """The recipe of a compressor's class; the default recipe for ``"none"``."""
    return RECIPES.get(class_name(spec), Recipe())


def class_name(spec: str) -> str:
    """The name of a compressor's class, or ``"none"``."""
    return PLAIN if spec == PLAIN else gckernels.from_spec(spec).name


# -------------------------------------------------------------------- models

Evaluation = tuple[float, float | None]  # accuracy, bits per byte
Prepare: TypeAlias = Callable[[torch.optim.Optimizer], None]
"""A function that is called with the optimizer of a training before its first step."""


@dataclass(frozen=True)
class Model:
    """A network, its training, and the metric by which the result is judged.

    Attributes:
        build: returns a new network, initialised from torch's global random state.
        train: trains a model on this rank's part of every batch.
        evaluate: evaluates the bare network on the test set.
        steps: number of training steps.
        adamw: whether AdamW trains it; otherwise SGD.
        metric: the field of :class:`Result` that is judged.
        higher_is_better: whether higher values of the metric are better.
        standard_error: standard error of one run's metric, as if test samples were drawn anew for every run.
    """

    build: Callable[[], nn.Module]
    train: Callable[[nn.Module, torch.device, common.StepTimer, Recipe, Prepare], None]
    evaluate: Callable[[nn.Module, torch.device], Evaluation]
    steps: int
    adamw: bool
    metric: str
    higher_is_better: bool
    standard_error: float


def nothing(optimizer: torch.optim.Optimizer) -> None:
    """Prepare nothing."""


def _prepared(make: Callable[..., torch.optim.Optimizer], prepare: Prepare) -> Callable[..., torch.optim.Optimizer]:
    """A function that makes an optimizer of parameters, and prepares it."""

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        prepare(optimizer)
        return optimizer

    return made


def _image_model(source: ModuleType, epochs: int, missed: float) -> Model:
    """An image classifier from the data, network and constants of a module such as ``fashion_mnist``.

    ``missed`` is the share of the test images that plain DDP gets wrong.
    """
    load = functools.cache(source.load_data)

    def train(
        model: nn.Module, device: torch.device, timer: common.StepTimer, recipe: Recipe, prepare: Prepare
    ) -> None:
        lr, make_sgd = source.PEAK_LR * recipe.sgd_lr, functools.partial(digits.make_sgd, momentum=recipe.momentum)
        images, classes = load(device)[:2]
        settings = {"epochs": epochs, "peak_lr": lr, "batch_size": source.BATCH}
        digits.train(model, images, classes, timer, **settings, make_optimizer=_prepared(make_sgd, prepare))

    def evaluate(network: nn.Module, device: torch.device) -> Evaluation:
        return digits.evaluate(network, *load(device)[2:]), None

    return Model(
        build=source.build_model,
        train=train,
        evaluate=evaluate,
        steps=epochs * (source.TRAIN_IMAGES // source.BATCH),
        adamw=False,
        metric="accuracy",
        higher_is_better=True,
        standard_error=math.sqrt(missed * (1 - missed) / source.TEST_IMAGES),
    )


_text = functools.cache(bytes_lm.load_text)


def _train_bytes_lm(
    model: nn.Module, device: torch.device, timer: common.StepTimer, recipe: Recipe, prepare: Prepare
) -> None:
    lr, make_optimizer = bytes_lm.PEAK_LR * recipe.adamw_lr, bytes_lm.make_adamw
    if recipe.bare:  # the same weight decay as AdamW's, which is added to the step, not to the gradient
        make_optimizer = functools.partial(torch.optim.SGD, lr=lr, weight_decay=0.01)
    make_optimizer = _prepared(make_optimizer, prepare)
    bytes_lm.train(model, _text()[0], timer, steps=BYTES_LM_STEPS, peak_lr=lr, make_optimizer=make_optimizer)


MODELS = {
    "digits": _image_model(digits, DIGITS_EPOCHS, missed=0.015),
    "fashion_mnist": _image_model(fashion_mnist, FASHION_MNIST_EPOCHS, missed=0.1),
    "fashion_mnist_long": _image_model(fashion_mnist, LONG_FASHION_MNIST_EPOCHS, missed=0.1),
    "bytes_lm": Model(
        build=bytes_lm.ByteTransformer,
        train=_train_bytes_lm,
        evaluate=lambda network, device: bytes_lm.evaluate(network, _text()[1], device),
        steps=BYTES_LM_STEPS,
        adamw=True,
        metric="bits_per_byte",
        higher_is_better=False,
        # The bytes of a window depend on each other, so windows are the samples. The standard deviation of their bits
        # per byte is 0.67.
        standard_error=0.67 / math.sqrt(bytes_lm.VALID_WINDOWS),
    ),
}


SHORT = tuple(name for name in MODELS if name != "fashion_mnist_long")
"""Default models of a sweep. The other one shows whether compressors that are slow in three epochs catch up in ten."""


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Result:
    """Results of one run; accuracy and bits per byte are the same on all ranks, and NaN if the training diverged."""

    accuracy: float
    bits_per_byte: float | None
    sent_nbytes_per_step: float
    mean_step_s: float
    steps: int
    lr_factor: float
    start_step: int


def train_once(model_name: str, spec: str, seed: int, device: torch.device) -> Result:
    """Train and evaluate a new network; all ranks of the default group call it with the same arguments but the device.

    Args:
        model_name: a key of :data:`MODELS`.
        spec: a compressor as :func:`gckernels.from_spec` takes it, or ``"none"`` for plain DDP.
        seed: seed of the weights, the order of the data and stochastic compressors.
        device: device of this rank.
    """
    model, recipe = MODELS[model_name], recipe_of(spec)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(model.build().to(device))
    handle, start_step = None, int(recipe.exact * model.steps)
    if spec != PLAIN:
        compressor = recipe.compressor(spec, model.adamw, model.steps)
        handle = sync.attach(
            ddp, sync.uniform_plan(ddp, compressor, exempt=recipe.exempt), seed=seed, start_step=start_step
        )
    timer = common.StepTimer(device)
    try:
        model.train(ddp, device, timer, recipe, nothing)
        accuracy, bits_per_byte = model.evaluate(ddp.module, device)
        if not all(bool(parameter.isfinite().all()) for parameter in ddp.parameters()):
            # the argmax of NaN is a class too, and right for some samples
            accuracy, bits_per_byte = math.nan, None if bits_per_byte is None else math.nan
        return Result(
            accuracy=accuracy,
            bits_per_byte=bits_per_byte,
            sent_nbytes_per_step=common.sent_nbytes_per_step(ddp, handle, spec),
            mean_step_s=statistics.fmean(timer.measured_s),
            steps=common.WARMUP_STEPS + len(timer.measured_s),
            lr_factor=recipe.lr_factor(model.adamw),
            start_step=start_step,
        )
    finally:
        if handle is not None:
            handle.close()
        del ddp
        gc.collect()  # DDP is part of a reference cycle that would keep its buckets during the next run
