"""``docs/tutorials/checkpoints.md`` is true: its code runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.sync import attach
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

DOCUMENT = (Path(__file__).parents[3] / "docs" / "tutorials" / "checkpoints.md").read_text()
SAVE, LOAD, LOAD_ALL, DCP_SAVE, DCP_LOAD = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def _names(folder: str, seed: int) -> dict[str, Any]:
    """The names that the code of the document uses."""
    network = build("Mlp", seed=seed)
    model = DistributedDataParallel(network)
    names = {"network": network, "model": model, "attachment": attach(model, gckernels.EFSignSGD()), "torch": torch}
    names["optimizer"] = torch.optim.SGD(network.parameters(), lr=0.1)
    return names | {"folder": folder, "rank": dist.get_rank(), "path": f"{folder}/all"}


def followed(folder: str) -> None:
    names = _names(folder, seed=0)
    for step in range(3):
        names["optimizer"].zero_grad()
        names["model"](names["network"].batch(step, dist.get_rank())).backward()
        names["optimizer"].step()
    for code in (SAVE, DCP_SAVE):
        exec(code, names)
    for loads in ((SAVE, LOAD), (DCP_SAVE, DCP_LOAD)):
        again = _names(f"{folder}/again", seed=1)
        Path(folder, "again").mkdir(exist_ok=True)
        exec(loads[0], again)  # the names that it makes; what it saves is not what is loaded
        again |= {"folder": folder, "path": f"{folder}/all"}
        exec(loads[1], again)
        assert _digest(again) == _digest(names)
        again["attachment"].close()
    dist.barrier()
    names["attachment"].close()


def followed_by_more(folder: str, ranks_before: int) -> None:
    names = _names(folder, seed=1)
    exec(LOAD_ALL, names | {"ranks_before": ranks_before})
    listed = names["attachment"].state_dict()
    names["attachment"].close()
    names = _names(folder, seed=1)
    exec("import torch.distributed.checkpoint as dcp\n" + DCP_LOAD, names)
    state = names["attachment"].state_dict()
    assert state["step"] == listed["step"] == 3 and state["feedback"]["shard"]
    for kind, tensors in listed["feedback"].items():
        assert all(torch.equal(state["feedback"][kind][name], tensor) for name, tensor in tensors.items())
    names["attachment"].close()


def _digest(names: dict[str, Any]) -> str:
    feedback = names["attachment"].state_dict()["feedback"]
    return digest_of([*names["network"].parameters(), *(each for _, each in sorted(feedback["worker"].items()))])


def test_its_code_runs(tmp_path):
    values_of(run_ranks(3, followed, str(tmp_path)))
    values_of(run_ranks(4, followed_by_more, str(tmp_path), 3))
