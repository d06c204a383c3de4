"""Jobs that are saved by torch.distributed.checkpoint, and what a saved state remembers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ddp_models import attached
from gckernels import sync
from gckernels.sync import Attachment
from gckernels.sync.programs import PROGRAMS, ring
from gckernels.sync.resources.feedback import KINDS
from models import build
from workloads import digest_of, topology

SAVED, STEPS = 4, 8

Setting = tuple[str, str, str]
"""The compressor, the program, and the front end."""

SETTINGS: tuple[Setting, ...] = (
    ("EFSignSGD", "alltoall", "hook"),  # shards are multiples of 16 elements, so some ranks have none
    ("BlockQuant(bits=4)", "default", "module"),  # two ranks have another program than more
    ("TopK(ratio=0.05)", "parameter_server", "hook"),
    ("BlockQuant(bits=4)", "ring", "module"),
    ("EFSignSGD", "hierarchical", "hook"),
    ("DGC", "default", "module"),
    ("PowerSGD(rank=2)", "default", "hook"),
    ("PowerSGD(rank=2, one_sided=True)", "default", "module"),
    ("Cast16", "default", "hook"),  # has no residual
)


class Job:
    """A model in training, with its attachment."""

    def __init__(self, setting: Setting, seed: int = 0, group: dist.ProcessGroup | None = None, **more: Any) -> None:
        compressor, program, front = setting
        ranks = dist.get_world_size(group)
        programs = {"default": None, "ring": ring(ranks) if ranks > 1 else None} | PROGRAMS
        more = {"seed": 7} | more
        self.module = build("Mlp", seed=seed)
        self.sync: Attachment
        plan = sync.uniform_plan(self.module, compressor, program=programs[program], topology=topology(ranks))
        grouped = {"process_group": group}
        more |= grouped if front == "module" else {}
        self.model, self.sync = attached(front, self.module, plan, grouped, **more)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.module.zero_grad()
            self.model(self.module.batch(step, dist.get_rank())).backward()
            with torch.no_grad():
                for parameter in self.module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.02 * parameter.grad)

    def parts(self, **arguments: Any) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "gckernels": self.sync.checkpoint(**arguments)}

    def load(self, path: str, **arguments: Any) -> None:
        dcp.load(self.parts(reads=path), checkpoint_id=path, **arguments)

    def digest(self) -> str:
        return digest_of([*self.module.parameters(), *remembered(self.sync.state_dict())])


def remembered(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for kind in KINDS for _, tensor in sorted(filled(state["feedback"][kind]).items())]


def filled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors with elements. A rank without a part of a shard, or that is no root, may have no tensor or an empty
    one."""
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}
