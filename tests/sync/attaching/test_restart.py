"""Under torchrun, when a rank is killed and all are restarted, the job continues from its checkpoint bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import EFSignSGD
from gckernels.sync import attach
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

KILLED_AT = 5
SCRIPT = """
import sys
from pathlib import Path

import torch.distributed as dist
import test_restart

dist.init_process_group("gloo")
digest = test_restart.job(sys.argv[1], sys.argv[2], is_killed=True)
Path(sys.argv[2], f"end{dist.get_rank()}").write_text(digest)
dist.destroy_process_group()
"""


def job(front: str, folder: str, is_killed: bool) -> str:
    """Train from the checkpoint in ``folder``, if there is one, and return a digest of parameters and residuals. With
    ``is_killed``, rank 1 is killed along the way if torchrun has not restarted it yet."""
    rank = dist.get_rank()
    module = build("Mlp")
    model: torch.nn.Module = module
    if front == "hook":
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        attachment: Any = attach(model, EFSignSGD())
    else:
        attachment = attach(module, EFSignSGD(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    parts = {"model": module, "optimizer": optimizer, "attachment": attachment}
    file, first = Path(folder, f"rank{rank}.pt"), 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        first = state.pop("step")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for step in range(first, 10):
        if step % 2 == 0:
            dist.barrier()
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, file)
            dist.barrier()  # all have one of the same step
        if is_killed and step == KILLED_AT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(module.batch(step, rank)).backward()
        optimizer.step()
    residuals = [each for kind in attachment.state_dict()["feedback"].values() for _, each in sorted(kind.items())]
    attachment.close()
    return f"{first} " + digest_of([*module.parameters(), *residuals])


def under_torchrun(front: str, folder: Path) -> list[list[str]]:
    """Run the job, in which a rank is killed, and return per rank the step that it went on with and its digest."""
    (folder / "script.py").write_text(SCRIPT)
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # otherwise restarted ranks find the addresses of the ranks before them: github.com/pytorch/pytorch/issues/135712
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(folder / "script.py"), front, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [(folder / f"end{rank}").read_text().split() for rank in range(2)]


# Slow, for five processes import torch; test_checkpoints.py and test_dcp.py restore both front ends in new processes.
@pytest.mark.slow
@pytest.mark.parametrize("front", ["hook", "module"])
def test_a_killed_rank_is_started_again_and_goes_on_with_the_same_bits(front, tmp_path):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = values_of(run_ranks(2, job, front, str(tmp_path / "undisturbed"), False))
    restarted = under_torchrun(front, tmp_path)
    assert [each.split()[0] for each in undisturbed] == ["0", "0"]
    assert [first for first, _ in restarted] == ["4", "4"]
    assert [digest for _, digest in restarted] == [each.split()[1] for each in undisturbed]
