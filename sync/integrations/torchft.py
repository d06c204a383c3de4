"""Compression between the replicas of torchft."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceOp
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.process_group import ProcessGroup
from torchft.work import _DummyWork

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.functional import decode, encode

from ..plans.arguments import as_method

SMALLEST = 1024
"""The number of elements below which a tensor is averaged exactly."""


class _Compressed(ProcessGroup):
    """The part that both groups share, in front of one of torchft's: its sums of gradients.

    torchft makes a group for each quorum inside of this object, by ``configure`` or, in later releases, by
    ``reconfigure``. Neither is touched. Every replica sends payloads to all others, so a change of members loses only
    what those that are gone had kept.
    """

    manager: Manager | None = None
    """The manager that has this group, which says whether steps count."""

    def __init__(
        self, compressor: Compressor | str = "BlockQuant(bits=4)", *, fragments: int = 1, **group: Any
    ) -> None:
        caller = type(self).__name__
        method = as_method(f"{caller}: compressor", compressor)
        if not isinstance(method, Codec) or not method.traits.averages or method.traits.states > 1:
            raise ValueError(
                f"{caller}: compressor must have payloads that can be averaged, and no momentum, such as BlockQuant, "
                f"got {method}"
            )
        if type(fragments) is not int or fragments < 1:
            raise ValueError(f"{caller}: fragments must be an int from 1 up, got {fragments!r}")
        super().__init__(**group)
        self._method, self._fragments = method, fragments
        self._kept: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # residuals from before the step that runs
        self._step, self._calls, self._has_ended = 0, 0, False

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Add gradients up over the replicas, the same bits on all of them.

        Other operations than sums, and small tensors, are those of torchft.

        Raises:
            RuntimeError: the manager of this group is not known.
            ValueError: steps have other tensors than the steps before.
        """
        operation = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        (tensor, *others) = tensors
        is_gradient = not others and tensor.dtype in GRAD_DTYPES and tensor.is_contiguous()
        if operation != ReduceOp.SUM or not is_gradient or tensor.numel() < SMALLEST:
            return super().allreduce(tensors, opts)
        if self.manager is None:
            raise RuntimeError("gckernels: set the attribute manager of the process group to the Manager that has it")
        residual = self._residual(tensor.view(-1))
        if self.size() == 1:
            if residual is not None and self.manager.is_participating():
                tensor += residual.view_as(tensor)  # nothing remains to be sent
                residual.zero_()
            return super().allreduce(tensors, opts)
        # a replica that heals sends zeros, and keeps what it has
        sent = residual if self.manager.is_participating() else None
        payload = encode(self._method, tensor.view(-1), sent, seed=self._step * 2**16 + self._calls)
        payloads = torch.empty(self.size(), payload.numel(), dtype=payload.dtype, device=payload.device)
        self.allgather([list(payloads)], [payload], AllgatherOptions()).wait()
        decode(self._method, payloads, out=tensor)
        return _DummyWork([tensor])

    def errored(self) -> Exception | None:
        """The error of torchft's group; the manager asks for it at the end of each step."""
        self._has_ended = True
        error: Exception | None = super().errored()
        return error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residuals of this replica by their places in a step, fp32, for its own checkpoint."""
        return {name: residual.clone() for name, residual in self._kept.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from the residuals that :meth:`state_dict` has returned on the same replica."""
        self._kept, self._before = {name: residual.clone() for name, residual in state.items()}, {}

    def _residual(self, vector: torch.Tensor) -> torch.Tensor | None:
        """The residual of the next sum of a step, as it was before the step if that was tried before; ``None`` if the
        compressor keeps none."""
        assert self.manager is not None
        step = self.manager.current_step()
        if self._has_ended:
            if step == self._step:
                self._kept |= self._before  # the step has not counted
            self._before, self._calls, self._has_ended = {}, 0, False
        self._step, self._calls = step, self._calls + 1
        traits = self._method.traits
        if not traits.conserves and not traits.needs_feedback:
            return None
        name = f"{step % self._fragments}.{self._calls}"
        if (kept := self._kept.get(name)) is None:
            kept = torch.zeros(vector.numel(), dtype=torch.float32, device=vector.device)
        elif kept.numel() != vector.numel():
            raise ValueError(
                f"gckernels: sum {name} has {vector.numel()} elements, and had {kept.numel()} in an earlier step; let "
                "fragments be the number of fragments of DiLoCo, and all steps have the same tensors"
            )
        self._before[name] = kept
        self._kept[name] = kept = kept.clone()
        return kept


class CompressedProcessGroupGloo(_Compressed, ProcessGroupGloo):
    """A process group for torchft's ``Manager`` that sends compressed gradients::

        group = CompressedProcessGroupGloo()
        group.manager = Manager(pg=group, ...)

    It serves ``torchft.DistributedDataParallel``, ``LocalSGD`` and ``DiLoCo``. Residuals of a step that the manager
    does not commit become what they were before it.

    Args:
        compressor: the compressor, or its spec.
        fragments: the number of fragments of streaming DiLoCo, which take turns.
        group: arguments of ``ProcessGroupGloo``.

    Raises:
        TypeError, ValueError: the compressor has no payloads that can be averaged, or an argument is not valid.
    """


class CompressedProcessGroupNCCL(_Compressed, ProcessGroupNCCL):
    """The same over NCCL, with the arguments of ``ProcessGroupNCCL``. Nobody has run it yet."""
