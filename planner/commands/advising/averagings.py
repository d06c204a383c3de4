"""The ways of averaging that advice compares: the line of each, and where its accuracy is measured."""

from __future__ import annotations

from dataclasses import dataclass

SIGNS = "EFSignSGD(block=1024, magnitude='projection')"
FOUR_BITS = "BlockQuant(bits=4)"
_ACCURACY, _UPDATES = "All trained accuracies", "Train over a very slow link"


@dataclass(frozen=True)
class Averaging:
    """A way of averaging."""

    name: str  # in the table
    line: str  # the line of the training script
    accuracy: str  # the accuracy in trainings that were measured
    page: str = ""  # the title of the page with their figures, in the documentation
    compressor: str = ""  # the compressor of gradients or updates; "" for none
    weights: str | None = None  # the codec of parameters that FSDP2 gathers
    every: int = 0  # the steps of a round of updates, of the longest ones; 0 if gradients are averaged
    scales: bool = False  # whether steps of optimizers like Adam are made longer there, which takes time


PLAIN = Averaging("plain", "", "exact")
GRADIENTS = (
    Averaging("8 bits", 'sync.attach(model, "BlockQuant")', "as plain", _ACCURACY, "BlockQuant"),
    Averaging("4 bits", f'sync.attach(model, "{FOUR_BITS}")', "as plain", _ACCURACY, FOUR_BITS),
)
GATHERS = (
    Averaging(
        "4 bits, and parameters in 8",
        f'sync.attach(model, "{FOUR_BITS}", weights="BlockQuant")',
        "nearly as plain",
        "Models of fully_shard and replicate",
        FOUR_BITS,
        weights="BlockQuant",
    ),
)
"""The way of models whose parameters FSDP2 gathers."""


def _updates(compressor: str, every: str, last: int, name: str, accuracy: str, scales: bool = True) -> Averaging:
    line = f'sync.attach(model, sync.Updates(optimizer, "{compressor}", every={every}))'
    return Averaging(name, line, accuracy, _UPDATES, compressor, every=last, scales=scales)


UPDATES = (
    _updates(SIGNS, "2", 2, "updates of 2 steps in signs", "nearly as plain"),
    _updates(SIGNS, "{0: 2, 1000: 8}", 8, "updates of 2 steps, then 8, in signs", "a small loss"),
    _updates(FOUR_BITS, "10", 10, "updates of 10 steps in 4 bits", "a loss", scales=False),
)
"""Ways for which DDP averages nothing, each with the steps of its longest rounds."""
