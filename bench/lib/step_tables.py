"""Markdown tables of training steps, as fractions of plain DDP's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown

PATH = RESULTS / "cpu" / "steps.csv"
AUTO_PATH = RESULTS / "cpu" / "auto.csv"
PLAIN, AGAIN = "plain", "plain again"
MODEL = "transformer_10m"  # in the README
README_ARMS = (PLAIN, "fp16_compress_hook", "powerSGD_hook(rank=4)", "BlockQuant(bits=4)")
README_AUTO = "sync.attach(model)"
README_RATES = ("100mbit", "200mbit", "1gbit", "none")
LEFT_OUT = ("bf16_compress_hook", "Cast16(dtype=torch.float16)", "Identity")
"""Arms that are as fast as others with as many bytes, and only in the file."""
SHOWN_MODELS = ("convnet", "transformer_10m")
"""Models whose steps the page of all steps has; the file has others."""
NAMES = {
    PLAIN: "plain DDP",
    AGAIN: "plain DDP again",
    "fp16_compress_hook": "PyTorch's fp16 hook",
    "bf16_compress_hook": "PyTorch's bf16 hook",
    "powerSGD_hook(rank=4)": "PyTorch's PowerSGD hook, rank 4",
}
MODELS = {
    "mlp": "multilayer perceptron, 7.3 million parameters",
    "transformer_1m": "transformer, 1.1 million parameters",
    "transformer_10m": "transformer, 10.0 million parameters",
    "convnet": "convolutional network, 2.8 million parameters",
    "digits": "network for digits, 0.15 million parameters",
    "fashion_mnist": "network for Fashion-MNIST, 0.21 million parameters",
    "embedding": "wide embedding, 4.3 million parameters",
}

StepRow = dict[str, str]


def arm_name(arm: str) -> str:
    """The name of an arm for people, in Markdown."""
    return NAMES.get(arm, f"`{arm.replace('dtype=torch.', '')}`")


def rate_name(rate: str) -> str:
    """The name of a rate for people."""
    units = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
    return "not throttled" if rate == "none" else f"{rate[:-4]} {units[rate[-4:]]}"


def network_name(network: str) -> str:
    """The name of a network for people: ``"2"`` becomes ``"2 ranks"``."""
    machines, _, ranks = network.partition("x")
    return f"{machines} machines of {ranks} ranks" if ranks else f"{machines} ranks"


def bits_per_s(rate: str) -> float:
    """The rate in bits per second; infinite for links that are not throttled."""
    return float("inf") if rate == "none" else float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def readme_table(path: Path = PATH, auto_path: Path = AUTO_PATH) -> str:
    """Steps of the larger transformer with two ranks, of some arms at some rates, as fractions of plain DDP's.

    The automatic choice comes from a file of its own, which has fewer rates.
    """
    rows = [row for row in read_csv(path) if row["arm"] in README_ARMS]
    rows += [row | {"arm": README_AUTO} for row in read_csv(auto_path) if row["arm"] == "auto, safe"]
    return _table(
        [row for row in rows if (row["model"], row["network"]) == (MODEL, "2") and row["rate"] in README_RATES]
    )


def all_tables(path: Path = PATH) -> list[str]:
    """Titles and tables: for every model and network the steps as fractions of plain DDP's."""
    rows = [row for row in read_csv(path) if row["arm"] not in LEFT_OUT and row["model"] in SHOWN_MODELS]
    parts = []
    for model, network in sorted({(row["model"], row["network"]) for row in rows}):
        cells = [row for row in rows if (row["model"], row["network"]) == (model, network)]
        parts.append(f"**{MODELS[model]}, {network_name(network)}**:")
        parts.append(_table(cells))
    return parts


def _table(rows: Sequence[StepRow]) -> str:
    """A table of arms by rates; arms are in the order of their bytes, after plain DDP and PyTorch's hooks."""
    rates = sorted({row["rate"] for row in rows}, key=bits_per_s)
    by_key = {(row["arm"], row["rate"]): row for row in rows}
    nbytes = {row["arm"]: int(row["sent_nbytes"]) for row in rows}
    order = sorted(nbytes, key=lambda arm: (_place(arm), -nbytes[arm]))
    columns, lines = ["", "bytes per step", *map(rate_name, rates)], []
    for arm in order:
        cells = [_ratio(by_key[arm, rate]) if (arm, rate) in by_key else "" for rate in rates]
        lines.append(dict(zip(columns, [arm_name(arm), f"{nbytes[arm]:,}", *cells], strict=True)))
    return markdown(lines, columns)


def _place(arm: str) -> int:
    """The place of an arm in a table: plain DDP, then PyTorch's hooks, then all others."""
    return list(NAMES).index(arm) if arm in NAMES else len(NAMES)


def _ratio(row: StepRow) -> str:
    if row["arm"] == PLAIN:
        return short_time(row["median_s"])
    ratio = float(row["ratio_to_plain"])
    return f"{ratio:.{3 if ratio < 0.0995 else 2}f}"


def short_time(text: str) -> str:
    """A number of seconds for people: ``"0.0213"`` becomes ``"21.3 ms"``."""
    seconds = float(text)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
