"""The trainings that compressors are judged by: models, recipes and margins.

:func:`train_once` trains one model on all ranks, with one compressor or with plain DDP. ``convergence.py`` and
``make test-slow`` both call it and both judge by :func:`margin_of`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.training import fashion_mnist
from examples import bytes_lm, common, digits
from gckernels import sync

PLAIN = "none"  # DDP without a hook
SEEDS = (0, 1, 2)

# A sweep has more than a hundred runs, so each has a budget of seconds. With it digits is at its plateau, fashion_mnist
# within a point or two of it. bytes_lm is far from it: what is compared there is how fast the loss falls.
DIGITS_EPOCHS = 30
FASHION_MNIST_EPOCHS = 3
LONG_FASHION_MNIST_EPOCHS = 10
BYTES_LM_STEPS = 500


# -------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """What a compressor changes in a training, other than the gradients.

    Attributes:
        sgd_lr: factor on the peak learning rate of models that SGD trains (digits, fashion_mnist).
        adamw_lr: the same where AdamW trains (bytes_lm), which does not see the scale of the gradients.
        momentum: of SGD.
        adamw_settings: of the compressor, where AdamW trains, instead of its defaults.
        bare: what was synchronised is the step, and goes to SGD without momentum instead of AdamW.
        exact: the share of the steps, the first ones, that are sent uncompressed.
        warmup: the share of the steps that the warm-up of the compressor itself takes.
        exempt: the parameters that are sent exactly.
        reason: why it is not as for plain DDP.
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

    def compressor(self, spec: str, adamw: bool, steps: int) -> gckernels.Method:
        settings = dict(self.adamw_settings) if adamw else {}
        if self.warmup:
            settings["warmup_steps"] = int(self.warmup * steps)
        return dataclasses.replace(gckernels.from_spec(spec), **settings)


def _nothing(name: str, parameter: nn.Parameter) -> bool:
    return False


# By class name; whoever is not named trains exactly as plain DDP does.
_SIGN = (
    "the result is a bare sign: every step has the length of the learning rate, for every parameter alike, as with Adam"
)
_COARSE = Recipe(
    exact=0.1, reason="the first tenth of the steps is sent exactly: residuals lag where gradients change fastest"
)
_SPARSIFIERS = ("TopK", "MSTopK", "GradDrop", "Threshold", "ChunkTopK", "RandomK", "DGC")
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(("OneBit", "EFSignSGD", "TBQ", "PowerSGD"), _COARSE),
    **dict.fromkeys(_SPARSIFIERS, _COARSE),
    "RandomK": Recipe(
        sgd_lr=0.5,
        exact=0.1,
        reason="what waits four steps comes as one step four times as long; and as for the other sparsifiers",
    ),
    "DGC": Recipe(
        momentum=0.0,
        adamw_settings={"momentum": 0.0},
        warmup=0.2,
        reason="it applies the momentum itself, to what is compressed, biases do without, and none where AdamW has its "
        "own; it starts with a warm-up",
    ),
    "SignSGD": Recipe(
        sgd_lr=1 / 30, momentum=0.0, exempt=_nothing, reason=f"{_SIGN}; where AdamW trains, its momentum helps"
    ),
    "SigNUM": Recipe(
        sgd_lr=1 / 30,
        adamw_lr=1 / 6,
        momentum=0.0,
        bare=True,
        exempt=_nothing,
        reason=f"{_SIGN}; it has a momentum of its own, and another one after it would wait twice",
    ),
}


def recipe_of(spec: str) -> Recipe:
    """The recipe of a compressor, by its class; the plain one for ``"none"``."""
    return RECIPES.get(_class_name(spec), Recipe())


def _class_name(spec: str) -> str:
    return PLAIN if spec == PLAIN else gckernels.from_spec(spec).name


# -------------------------------------------------------------------- models

Evaluation = tuple[float, float | None]  # accuracy, bits per byte


@dataclass(frozen=True)
class Model:
    """A network, its training, and what the result is judged by.

    Attributes:
        build: makes the network, from torch's global random state.
        train: of a DDP model, on this rank's part of every batch.
        evaluate: of the bare network, on the test set.
        steps: of the training.
        adamw: trained by AdamW; by SGD otherwise.
        metric: the judged field of :class:`Result`.
        higher_is_better: of that field.
        standard_error: of that field for one run, as if every test sample were drawn anew for it.
    """

    build: Callable[[], nn.Module]
    train: Callable[[nn.Module, torch.device, common.StepTimer, Recipe], None]
    evaluate: Callable[[nn.Module, torch.device], Evaluation]
    steps: int
    adamw: bool
    metric: str
    higher_is_better: bool
    standard_error: float


def _image_model(source: ModuleType, epochs: int, missed: float) -> Model:
    """A classifier from a module such as ``fashion_mnist``: data, network and the numbers that go with them.

    ``missed`` is the share of the test images that plain DDP gets wrong.
    """
    load = functools.cache(source.load_data)

    def train(model: nn.Module, device: torch.device, timer: common.StepTimer, recipe: Recipe) -> None:
        lr, momentum = source.PEAK_LR * recipe.sgd_lr, recipe.momentum
        digits.train(
            model, *load(device)[:2], timer, epochs=epochs, peak_lr=lr, momentum=momentum, batch_size=source.BATCH
        )

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


def _train_bytes_lm(model: nn.Module, device: torch.device, timer: common.StepTimer, recipe: Recipe) -> None:
    lr, make_optimizer = bytes_lm.PEAK_LR * recipe.adamw_lr, bytes_lm.make_adamw
    if recipe.bare:  # with the same weight decay, which AdamW adds to the step, not to the gradient
        make_optimizer = functools.partial(torch.optim.SGD, lr=lr, weight_decay=0.01)
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
        # Bytes of a window depend on each other, so the windows are the samples: their bits per byte have a standard
        # deviation of 0.67.
        standard_error=0.67 / math.sqrt(bytes_lm.VALID_WINDOWS),
    ),
}


SHORT = tuple(name for name in MODELS if name != "fashion_mnist_long")
"""What a sweep trains unless told otherwise. The other shows what ten epochs do for those that are slow in three."""


# -------------------------------------------------------------------- margins

# (model, class name) -> (margin in the metric's unit, reason): what is promised instead of the model's own margin.
_FEEDBACK_UNDER_ADAM = (
    "error feedback sends the gradient divided by one scale per block, on average, and spread over steps; Adam then "
    "sees the same magnitude everywhere and adapts less to the parameter, so it advances more slowly on this model, "
    "which is compared long before its plateau"
)
_FEEDBACK_IN_A_HURRY = (
    "three epochs at the learning rate that is best for plain SGD: what waits in residuals arrives late, and counts "
    "most where few steps are taken; after ten epochs, fashion_mnist_long, it keeps the model's own margin"
)
_RANDOM = "the largest elements wait as long as the smallest; it is for programs that need payloads that add up"
MARGIN_EXCEPTIONS: dict[tuple[str, str], tuple[float, str]] = {
    ("fashion_mnist", "OneBit"): (0.015, _FEEDBACK_IN_A_HURRY),
    ("fashion_mnist", "EFSignSGD"): (0.025, _FEEDBACK_IN_A_HURRY),
    ("fashion_mnist", "TBQ"): (0.025, _FEEDBACK_IN_A_HURRY),
    **{("fashion_mnist", name): (0.015, _FEEDBACK_IN_A_HURRY) for name in ("TopK", "MSTopK", "GradDrop", "Threshold")},
    ("fashion_mnist", "DGC"): (0.012, _FEEDBACK_IN_A_HURRY),
    ("fashion_mnist", "RandomK"): (0.035, _RANDOM),
    ("fashion_mnist_long", "RandomK"): (0.015, _RANDOM),
    ("fashion_mnist", "TernGrad"): (0.012, "the variance of three levels, in the same three epochs"),
    ("fashion_mnist", "SignSGD"): (
        0.045,
        "the sign of one batch's gradient is mostly noise; SigNUM's momentum mends it",
    ),
    ("bytes_lm", "OneBit"): (0.3, _FEEDBACK_UNDER_ADAM),
    ("bytes_lm", "EFSignSGD"): (0.3, _FEEDBACK_UNDER_ADAM),
    ("bytes_lm", "TBQ"): (0.8, _FEEDBACK_UNDER_ADAM),
    **{("bytes_lm", name): (0.6, _FEEDBACK_UNDER_ADAM) for name in _SPARSIFIERS},
    ("bytes_lm", "PowerSGD"): (
        0.3,
        "four directions of each matrix in a step, the others later; as with other residuals",
    ),
    ("bytes_lm", "SignSGD"): (0.12, "AdamW sees signs, and adapts to how steady they are, not to magnitudes"),
    ("bytes_lm", "SigNUM"): (0.3, "it is its own optimizer, and on this model not quite AdamW, whatever is compressed"),
}


def margin_of(model_name: str, spec: str, num_seeds: int) -> float:
    """How much worse than plain DDP the mean over ``num_seeds`` runs may be.

    Three standard errors of the difference of two such means. All runs share one test set. What they all get right or
    wrong there cancels in the difference; what differs from run to run is at most what independent test sets would
    give, so runs count as independent: standard error of one run, times sqrt(2 / num_seeds).
    """
    exception = MARGIN_EXCEPTIONS.get((model_name, _class_name(spec)))
    if exception is not None:
        return exception[0]
    return 3 * MODELS[model_name].standard_error * math.sqrt(2 / num_seeds)


def worse_by(model_name: str, value: float, plain: float) -> float:
    """How much worse ``value`` is than that of plain DDP, in the metric's unit; negative when it is better."""
    return plain - value if MODELS[model_name].higher_is_better else value - plain


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Result:
    """What one run gave; accuracy and bits per byte are the same on all ranks, and NaN if the training diverged."""

    accuracy: float
    bits_per_byte: float | None
    sent_nbytes_per_step: float
    mean_step_s: float
    steps: int
    lr_factor: float
    start_step: int


def train_once(model_name: str, spec: str, seed: int, device: torch.device) -> Result:
    """Train a fresh network. Every rank of the default group calls it, with the same arguments but the device.

    Args:
        model_name: a key of :data:`MODELS`.
        spec: a compressor as :func:`gckernels.from_spec` takes it, or ``"none"`` for plain DDP.
        seed: of the weights, the order of the data and stochastic compressors.
        device: of this rank.
    """
    model, recipe = MODELS[model_name], recipe_of(spec)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(model.build().to(device))
    handle, start_step = None, int(recipe.exact * model.steps)
    if spec != PLAIN:
        compressor = recipe.compressor(spec, model.adamw, model.steps)
        handle = sync.attach(ddp, sync.plan(ddp, compressor, exempt=recipe.exempt), seed=seed, start_step=start_step)
    timer = common.StepTimer(device)
    try:
        model.train(ddp, device, timer, recipe)
        accuracy, bits_per_byte = model.evaluate(ddp.module, device)
        if not all(bool(parameter.isfinite().all()) for parameter in ddp.parameters()):
            # the argmax of NaN is a class as well, and right for some samples
            accuracy, bits_per_byte = math.nan, None if bits_per_byte is None else math.nan
        return Result(
            accuracy=accuracy,
            bits_per_byte=bits_per_byte,
            sent_nbytes_per_step=common.sent_nbytes_per_step(ddp, handle),
            mean_step_s=statistics.fmean(timer.measured_s),
            steps=common.WARMUP_STEPS + len(timer.measured_s),
            lr_factor=recipe.lr_factor(model.adamw),
            start_step=start_step,
        )
    finally:
        if handle is not None:
            handle.close()
        del ddp
        gc.collect()  # DDP is part of a reference cycle, and its buckets would stay through the next run
