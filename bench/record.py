"""How measurements are recorded: one CSV row each, with device, versions, date and the command that made it."""

from __future__ import annotations

import csv
import datetime
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent / "results"


def device_name(device: torch.device) -> str:
    """``"NVIDIA H100 80GB HBM3"``, or the processor's model name and the number of usable cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def environment(device: torch.device) -> dict[str, str]:
    """The columns that say where, with what and when a row was measured."""
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
    }


def write_csv(name: str, device: torch.device, rows: Iterable[dict[str, Any]]) -> Path:
    """Write ``bench/results/<device type>/<name>.csv``, each row completed with :func:`environment`."""
    where = environment(device)
    complete = [row | where for row in rows]
    path = RESULTS / device.type / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(complete[0]))
        writer.writeheader()
        writer.writerows(complete)
    return path
