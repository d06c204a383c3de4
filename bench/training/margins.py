"""Margins: how much worse than with plain DDP a model may be at the end of a training with a compressor."""

from __future__ import annotations

import math

from bench.training.recipes import MODELS, SPARSIFIERS, class_name

# (model, class name) -> (margin in the metric's unit, reason), in place of the model's own margin.
_FEEDBACK_UNDER_ADAM = (
    "with error feedback, elements of a block arrive with the same magnitude, spread over steps; Adam then adapts "
    "less to single parameters and advances more slowly on this model, which is compared long before its plateau"
)
_FEEDBACK_IN_A_HURRY = (
    "three epochs at the learning rate that is best for plain SGD: values in residuals arrive late, which matters most "
    "in short trainings; after ten epochs, fashion_mnist_long, it keeps the model's own margin"
)
_RANDOM = "the largest elements wait as long as the smallest; it is meant for programs that need summable payloads"
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
        "the sign of one batch's gradient is mostly noise; SigNUM's momentum reduces it",
    ),
    ("bytes_lm", "OneBit"): (0.3, _FEEDBACK_UNDER_ADAM),
    ("bytes_lm", "EFSignSGD"): (0.3, _FEEDBACK_UNDER_ADAM),
    ("bytes_lm", "TBQ"): (0.8, _FEEDBACK_UNDER_ADAM),
    **{("bytes_lm", name): (0.6, _FEEDBACK_UNDER_ADAM) for name in SPARSIFIERS},
    ("bytes_lm", "PowerSGD"): (
        0.3,
        "each step sends four directions of each matrix, the others later; as with other residuals",
    ),
    ("bytes_lm", "SignSGD"): (0.12, "AdamW sees signs, and adapts to how steady they are, not to magnitudes"),
    ("bytes_lm", "SigNUM"): (0.3, "it is an optimizer itself and, on this model, not quite as good as AdamW"),
}


def margin_of(model_name: str, spec: str, num_seeds: int) -> float:
    """The margin: how much worse than plain DDP the mean over ``num_seeds`` runs may be, in the metric's unit.

    It is three standard errors of the difference of two such means. All runs share one test set; samples that all runs
    get right, or wrong, cancel in the difference. Runs differ at most as much as with independent test sets, so they
    count as independent: the standard error of one run, times sqrt(2 / num_seeds).
    """
    exception = MARGIN_EXCEPTIONS.get((model_name, class_name(spec)))
    if exception is not None:
        return exception[0]
    return 3 * MODELS[model_name].standard_error * math.sqrt(2 / num_seeds)


def worse_by(model_name: str, value: float, plain: float) -> float:
    """How much worse ``value`` is than plain DDP's value ``plain``, in the metric's unit; negative if better."""
    return plain - value if MODELS[model_name].higher_is_better else value - plain
