"""Under torchrun, when a rank is killed and all are restarted, the job continues from its checkpoint bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from models import SMALL_BUCKETS, build
from workloads import digest_of

from gckernels import EFSignSGD
from gckernels.sync import Synchronizer, attach

way, folder, killed_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
module = build("Mlp")
if way == "hook":
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(model, EFSignSGD())
else:
    model = module
    attachment = Synchronizer(module, EFSignSGD(), bucket_cap_mb=SMALL_BUCKETS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
parts = {"model": module, "optimizer": optimizer, "attachment": attachment}
file, first = folder / f"rank{rank}.pt", 0
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
    if step == killed_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(module.batch(step, rank)).backward()
    optimizer.step()
residuals = [each for kind in attachment.state_dict()["feedback"].values() for _, each in sorted(kind.items())]
text = os.environ["TORCHELASTIC_RESTART_COUNT"] + " " + digest_of([*module.parameters(), *residuals])
(folder / f"end{rank}").write_text(text)
attachment.close()
dist.destroy_process_group()
"""


def ended(front: str, folder: Path, killed_at: int) -> list[list[str]]:
    """Run the job and return, per rank, the number of its restarts and a digest of its final parameters and
    residuals."""
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    paths = [str(Path(__file__).parents[2] / "support"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # otherwise restarted ranks find the addresses of the ranks before them: github.com/pytorch/pytorch/issues/135712
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(folder / "job.py"), front, str(folder)]
    done = subprocess.run([*command, str(killed_at)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [(folder / f"end{rank}").read_text().split() for rank in range(2)]


# Slow, for eight processes import torch; test_checkpoints.py and test_dcp.py restore both front ends in one process.
@pytest.mark.parametrize("front", [pytest.param("hook", marks=pytest.mark.slow), "synchronizer"])
def test_a_killed_rank_is_started_again_and_goes_on_with_the_same_bits(front, tmp_path):
    undisturbed = ended(front, tmp_path / "undisturbed", killed_at=-1)
    restarted = ended(front, tmp_path / "restarted", killed_at=5)
    assert [count for count, _ in undisturbed] == ["0", "0"]
    assert [count for count, _ in restarted] == ["1", "1"]
    assert [digest for _, digest in restarted] == [digest for _, digest in undisturbed]
