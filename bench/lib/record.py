"""Records of measurements: CSV rows with the device, versions, date and the command that produced them."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from bench.lib import nvidia_smi
from bench.lib.program import ROOT, python_arguments

RESULTS = ROOT / "bench" / "results"


def device_name(device: torch.device) -> str:
    """The GPU's name, such as ``"NVIDIA H100 80GB HBM3"``, or the processor's model name and number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def commit() -> str:
    """The commit of this checkout, with a plus sign if files differ from it; an empty text if it is no clone."""
    described = ("git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*")
    try:
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def environment(device: torch.device) -> dict[str, str]:
    """Columns that say where, when and with which versions a row was measured; on a GPU also driver and clocks."""
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", *python_arguments(sys.argv[0]), *sys.argv[1:]]),
    } | (nvidia_smi.columns() if device.type == "cuda" else {})


def results_folder(device_type: str) -> Path:
    """The folder of results: the environment variable ``BENCH_OUT`` if set, else ``bench/results/<device type>``."""
    named = os.environ.get("BENCH_OUT")
    return Path(named) if named else RESULTS / device_type


def csv_path(name: str, device: torch.device) -> Path:
    """The path of ``<name>.csv`` in :func:`results_folder`."""
    return results_folder(device.type) / f"{name}.csv"


def write_csv(name: str, device: torch.device, rows: Iterable[dict[str, Any]]) -> Path:
    """Replace the file at :func:`csv_path` by ``rows``, each completed with :func:`environment`; returns the path."""
    where = environment(device)
    path = csv_path(name, device)
    _write(path, [row | where for row in rows])
    return path


def merge_csv(name: str, device: torch.device, rows: Iterable[dict[str, Any]], key: Sequence[str]) -> Path:
    """Replace those rows of the file at :func:`csv_path` that have the same values in the columns ``key``.

    Other rows stay. Rows are completed as by :func:`write_csv`, in columns that they lack, and sorted by ``key``, so
    that measuring a row again changes one line. The file is replaced atomically: an interruption leaves the old file or
    the new one.

    Returns:
        The path of the file.
    """
    where = environment(device)
    path = csv_path(name, device)
    merged = {tuple(row[column] for column in key): row for row in read_csv(path)}
    for row in rows:
        complete = {column: str(value) for column, value in (row | where | row).items()}
        merged[tuple(complete[column] for column in key)] = complete
    new = path.with_suffix(".new")
    _write(new, [merged[values] for values in sorted(merged)])
    new.replace(path)
    return path


def note_origin(table: Path) -> None:
    """Write into ``compiled_tables.csv`` when, with what and by which command a table of compiled kernels was made.

    Its own rows do not say so: they are the same on all machines, and change with the kernels alone.
    """
    merge_csv("compiled_tables", torch.device("cpu"), [{"file": table.name}], ("file",))


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; an empty list if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)
