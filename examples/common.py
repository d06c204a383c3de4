"""Bookkeeping of the example scripts: joining the process group, timing steps, reporting.

Using gckernels needs none of it.
"""

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync

# First steps, which the timings exclude: DDP rebuilds its buckets after the first backward pass,
# and allocators, threads and kernels warm up.
WARMUP_STEPS = 10
ROUND_STEPS = 2
FP16_HOOK = "fp16 hook"  # PyTorch's communication hook, for comparison
UPDATES = "updates"  # two steps of each rank's own optimizer, whose change is averaged in a bit per element


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every example has."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument(
        "--compressor",
        default="none",
        metavar="SPEC",
        help='"none" for plain DDP, "auto" for a plan that is found while training, a compressor such as '
        f'EFSignSGD or "BlockQuant(bits=4)", "{UPDATES}" for updates of two steps in signs, or "{FP16_HOOK}"',
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as JSON")
    return parser


def init_process_group() -> torch.device:
    """Join torchrun's process group and return the device of this rank.

    NCCL does not let two ranks share a GPU, so GPUs are used only if there is one for every rank
    of this machine; otherwise the ranks run on the CPU and communicate over Gloo.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "Start this script with torchrun, for example:\n"
            "  torchrun --standalone --nproc-per-node 2 -m examples.digits"
        )
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def destroy_process_group() -> None:
    """Leave the process group, when nothing refers to a model any more.

    DDP is part of a reference cycle, which keeps the threads of the group. If they still run when the process ends, it
    aborts now and then (torch 2.13).
    """
    gc.collect()
    dist.destroy_process_group()


class StepTimer:
    """Measures training steps; put each of them into a `with timer:` block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_s = 0.0
        self._steps_s: list[float] = []

    def __enter__(self) -> "StepTimer":
        self._start_s = self._now_s()
        return self

    def __exit__(self, *exc: object) -> None:
        self._steps_s.append(self._now_s() - self._start_s)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # without it only the launches are timed
        return time.perf_counter()

    @property
    def measured_s(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        if len(self._steps_s) <= WARMUP_STEPS:
            raise SystemExit(f"Nothing to time: run more than {WARMUP_STEPS} steps.")
        return self._steps_s[WARMUP_STEPS:]

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return sum(self._steps_s)


def late_step_s(measured_s: list[float]) -> float:
    """Return the median of the second half of the steps, each with the one before: of two, one may send nothing."""
    late = measured_s[len(measured_s) // 2 :]
    return statistics.median((first + second) / 2 for first, second in itertools.pairwise(late))


def show_progress(step: int, steps: int, text: str) -> None:
    """Print how far a training is: on a terminal in one line that changes, otherwise every tenth of the steps."""
    if sys.stdout.isatty():
        print(f"\r\033[Kstep {step} of {steps}, {text}", end="\n" if step == steps else "", flush=True)
    elif step * 10 // steps > (step - 25) * 10 // steps:
        print(f"step {step} of {steps}, {text}", flush=True)


def sent_nbytes_per_step(model: nn.Module, handle: sync.Attachment | None, compressor: str) -> float:
    """Return the mean number of bytes that this rank sends per step for gradients."""
    if handle is not None:
        return handle.sent_nbytes_per_step() / (ROUND_STEPS if compressor == UPDATES else 1)
    # Plain DDP does a ring allreduce of all gradients, and the hook one of halves.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grad_nbytes = sum(each.numel() * (2 if compressor == FP16_HOOK else each.element_size()) for each in trained)
    return sync.programs.allreduce_sent_nbytes(grad_nbytes, dist.get_world_size())


def report(
    args: argparse.Namespace,
    *,
    example: str,
    model: nn.Module,
    handle: sync.Attachment | None,
    timer: StepTimer,
    accuracy: float,
    **extra: float,
) -> None:
    """Print one line for people and write `args.json`; only rank 0 does."""
    if dist.get_rank() != 0:
        return
    device = next(model.parameters()).device
    record = {
        "example": example,
        "compressor": args.compressor,
        "world_size": dist.get_world_size(),
        "seed": args.seed,
        "sent_nbytes_per_step": sent_nbytes_per_step(model, handle, args.compressor),
        "mean_step_s": statistics.fmean(timer.measured_s),
        "median_step_s": statistics.median(timer.measured_s),
        "late_step_s": late_step_s(timer.measured_s),
        "total_s": timer.total_s,
        "timed_steps": len(timer.measured_s),
        "elements": sum(parameter.numel() for parameter in model.parameters()),
        "trial_steps": None if handle is None else handle.stats().get("trial_steps"),
        "decision": "" if handle is None or not handle.decisions else handle.decisions[-1].short,
        "accuracy": accuracy,
        **extra,
        **measured_with(device),
    }
    print(
        f"{example}, {args.compressor}, {record['world_size']} ranks on {record['device']}: "
        f"{record['sent_nbytes_per_step']:,.0f} bytes sent per step and rank, "
        f"step {1e3 * record['median_step_s']:.1f} ms median, "
        f"{1e3 * record['mean_step_s']:.1f} ms mean "
        f"(first {WARMUP_STEPS} of {record['timed_steps'] + WARMUP_STEPS} steps left out), "
        f"accuracy {100 * accuracy:.2f} %"
        + "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in extra.items()),
        flush=True,
    )
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def measured_with(device: torch.device, *packages: str) -> dict:
    """The device of a measurement, its date, and the versions of gckernels, torch, Python and `packages`."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "gckernels": _version("gckernels"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout without installing it
        return "not installed"
