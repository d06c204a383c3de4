"""The parameters whose gradients FSDP2 reduces together. All names of torch's FSDP that are not public are used here.

They are the same in torch 2.11 to 2.15, but that a module has one group of parameters in 2.11 and a list of groups
later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ...plans.arguments import plain_name


@dataclass(frozen=True)
class Shard:
    """The part that a rank has of a parameter.

    Attributes:
        name: the plain name of the parameter in the model.
        start: its first element in the vector that is reduced, if all parameters of the group are in it.
        numel: the number of its elements.
        row: the number of elements that it takes in the vector, with the padding behind it.
    """

    name: str
    start: int
    numel: int
    row: int


class ShardGroup:
    """The parameters of a group of modules whose gradients FSDP2 reduces together. It does not keep the model.

    Args:
        group: FSDP's own object.
        state: FSDP's state of its module.
        names: the names of parameters, by the id of their module and the name in that.

    Attributes:
        mesh: the mesh over which the parameters are sharded and replicated.
    """

    def __init__(self, group: Any, state: Any, names: dict[tuple[int, str], str]) -> None:
        self._group, self._state = weakref.ref(group), weakref.ref(state)
        self._names = [names[id(each._module_info.module), each._module_info.param_name] for each in group.fsdp_params]
        self.mesh: DeviceMesh = group.mesh_info.mesh
        self._trained: list[bool] | None = None  # which parameters were not frozen when shards were listed
        self._shards: tuple[Shard, ...] = ()

    @property
    def _alive(self) -> Any:
        group = self._group()
        assert group is not None
        return group

    @property
    def names(self) -> list[str]:
        """The names of all its parameters, frozen ones included."""
        return self._names

    @property
    def is_dim0(self) -> bool:
        """Whether all its parameters are sharded along their first dimension."""
        return all(each.fsdp_placement.dim == 0 for each in self._alive.fsdp_params)

    @property
    def offloads(self) -> bool:
        """Whether its parameters are in the memory of the host while gradients are computed on a device."""
        return any(each.offload_to_cpu for each in self._alive.fsdp_params)

    @property
    def is_replicated(self) -> bool:
        """Whether FSDP averages its gradients over replicas, after it has reduced them to shards."""
        return hasattr(self._alive.mesh_info, "replicate_process_group")

    @property
    def nests(self) -> bool:
        """Whether its parameters were distributed already, over a mesh of which FSDP's is a part."""
        return any(each.is_dtensor for each in self._alive.fsdp_params)

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that have the same shards."""
        found: dist.ProcessGroup = self._alive.mesh_info.replicate_process_group
        return found

    @replicas.setter
    def replicas(self, group: dist.ProcessGroup) -> None:
        self._alive.mesh_info.replicate_process_group = group

    @property
    def averaging(self) -> dist.ProcessGroup:
        """The ranks whose averages are compressed: the replicas, or all ranks if there are none."""
        if self.is_replicated:
            return self.replicas
        found: dist.ProcessGroup = self._alive.mesh_info.shard_process_group
        return found

    @property
    def reduce_scatter(self) -> Any:
        """FSDP's object that reduces the gradients to shards."""
        return self._alive._reduce_scatter_comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: Any) -> None:
        self._alive._reduce_scatter_comm = comm

    @property
    def all_gather(self) -> Any:
        """FSDP's object that gathers the parameters."""
        return self._alive._all_gather_comm

    @all_gather.setter
    def all_gather(self, comm: Any) -> None:
        self._alive._all_gather_comm = comm

    @property
    def gathering(self) -> dist.ProcessGroup:
        """The ranks from which FSDP gathers the parameters now: fewer than all, if it has resharded them so."""
        found: dist.ProcessGroup = self._alive._all_gather_process_group
        return found

    @property
    def gathered(self) -> torch.Tensor | None:
        """The parameters that FSDP has gathered, or is gathering, until it copies them out or gives them up."""
        result = None if (group := self._group()) is None else group._all_gather_result
        return None if result is None else result.all_gather_output

    def before_reductions(self, call: Callable[[], object]) -> None:
        """Call a function each time before FSDP looks which gradients there are, to reduce them, until
        :meth:`restore`."""
        weak = self._group

        def post_backward(*arguments: Any) -> None:
            call()
            if (group := weak()) is not None:
                type(group).post_backward(group, *arguments)

        self._alive.post_backward = post_backward

    def used(self) -> list[bool]:
        """Whether each of its parameters has a gradient that FSDP would reduce now."""
        fills = getattr(self._alive, "reduce_scatter_unused_params", False)
        return [_has_gradient(each, fills) for each in self._alive.fsdp_params]

    def restore(self) -> None:
        """Give FSDP back what stand-ins have taken the place of: its collectives, its group of replicas."""
        if (group := self._group()) is None:
            return
        vars(group).pop("post_backward", None)
        for name in ("reduce_scatter", "all_gather", *(("replicas",) if self.is_replicated else ())):
            setattr(self, name, getattr(getattr(self, name), "inner", getattr(self, name)))

    @property
    def averages_now(self) -> bool:
        """Whether the next backward averages gradients of all ranks."""
        return bool(self._alive.reduce_grads and (self._alive.all_reduce_grads or not self.is_replicated))

    @property
    def gathered_in(self) -> torch.dtype:
        """The dtype in which FSDP gathers its parameters."""
        found: torch.dtype = self._alive.mp_policy.param_dtype or self._alive.fsdp_params[0].sharded_param.dtype
        return found

    @property
    def reduced_in(self) -> torch.dtype:
        """The dtype in which FSDP reduces its gradients."""
        found: torch.dtype = self._alive.mp_policy.reduce_dtype or self.gathered_in
        return found

    def leaves_alone(self, reduced: torch.Tensor) -> bool:
        """Whether FSDP only makes views of the reduced gradients before backward ends.

        It reads them if it divides or casts them, adds them to others, copies them to the host, or calls a hook.
        """
        group = self._alive
        sums = group.force_sum_reduction_for_comms or reduced.dtype not in (torch.float32, torch.bfloat16)
        divides = sums and group.gradient_divide_factor != 1
        reads = divides or group._all_reduce_hook is not None or reduced.dtype != group._orig_dtype
        return not reads and not any(
            each.offload_to_cpu
            or each.sharded_param.grad is not None
            or getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
            for each in group.fsdp_params
        )

    def shard_of(self) -> tuple[int, int] | None:
        """The index of this rank's shards, and the number of all shards; ``None`` if there is only one."""
        ranks = getattr(self._alive.mesh_info, "shard_mesh_size", 1)
        return (self._alive.mesh_info.shard_mesh_rank, ranks) if ranks > 1 else None

    def starts(self) -> dict[str, int]:
        """The first element of each shard in its parameter, if that is sharded along its first dimension."""
        found = self.shard_of()
        index = 0 if found is None else found[0]
        rows = zip(self.parameters().items(), self.rows(), strict=True)
        return {name: min(index * row, parameter.numel()) for (name, parameter), row in rows}

    def shards(self) -> tuple[Shard, ...]:
        """The shards of the parameters that are not frozen, in the order in which FSDP reduces them. They are listed
        anew when parameters are frozen or thawed."""
        trained = [each.sharded_param.requires_grad for each in self._alive.fsdp_params]
        if trained != self._trained:
            self._trained, self._shards = trained, tuple(self._listed(trained))
        return self._shards

    def _listed(self, trained: list[bool]) -> Iterator[Shard]:
        start = 0
        for name, each, is_trained in zip(self._names, self._alive.fsdp_params, trained, strict=True):
            if is_trained:
                row = each.padded_sharded_param_size.numel()
                yield Shard(name, start, each.sharded_size.numel(), row)
                start += row

    def rows(self) -> list[int]:
        """The numbers of elements that all parameters take in the vector that is reduced, frozen ones included."""
        return [each.padded_sharded_param_size.numel() for each in self._alive.fsdp_params]

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun that FSDP has not ended."""
        state = self._state()
        return state is not None and bool(state._state_ctx.post_backward_final_callback_queued)

    def shards_nbytes(self) -> int:
        """The bytes of its shards on this rank, without padding, frozen ones included."""
        return sum(each.sharded_size.numel() * each.sharded_param.element_size() for each in self._alive.fsdp_params)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters as optimizers have them, by name; none if the model is gone."""
        if (group := self._group()) is None:
            return {}
        return dict(zip(self._names, (each.sharded_param for each in group.fsdp_params), strict=True))

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each shard, by the name of its parameter."""
        pairs = zip(self._names, self._alive.fsdp_params, strict=True)
        return {name: each.sharded_size for name, each in pairs}


def _has_gradient(parameter: Any, fills: bool) -> bool:
    """Whether FSDP has a gradient of one of its parameters, or takes zeros for it."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    if parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None:
        return True
    return fills and bool(parameter.unsharded_param.requires_grad)


def shard_groups(model: torch.nn.Module) -> list[ShardGroup]:
    """The groups of a model that have the mesh of its first one, each once, in the order of its modules. A module
    without own parameters has none."""
    found = all_groups(model)
    return [group for group in found if group.mesh == found[0].mesh]


def all_groups(model: torch.nn.Module) -> list[ShardGroup]:
    """The groups of a model, each once, in the order of its modules."""
    names = {
        (id(module), name): plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in module._parameters
    }
    found: dict[int, ShardGroup] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None and id(group) not in found:
                    found[id(group)] = ShardGroup(group, state, names)
    return list(found.values())
