"""The stages of PowerSGD's back ends, called as its ops are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gckernels.ops.powersgd import host, kernels


class Stages:
    """The stages of a back end, each bound and called."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def orthogonalise(self, factors: list[torch.Tensor], seeds: Sequence[int] | None, added: int = 0) -> None:
        number = torch.full((1,), added, dtype=torch.int64, device=factors[0].device)
        self._backend.bind_orthogonalise(factors, seeds, number)()

    def __getattr__(self, stage: str) -> Callable[..., None]:
        return lambda *arguments: getattr(self._backend, f"bind_{stage}")(*arguments)()


HOST = Stages(host)
STAGES = {"host": HOST, "kernel": Stages(kernels)}
