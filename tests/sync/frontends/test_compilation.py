"""The host's programs are compiled before the first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.compressor import Compressor
from gckernels.sync import Plan, UnitPlan, attach
from gckernels.sync.engine.compilation import compile_host, host_methods
from gckernels.sync.programs import PROGRAMS, Place, Program
from gckernels.sync.resources.memory_spaces import Places
from gckernels.toolkit.host import cache as program_cache
from gckernels.toolkit.host import compilers
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import SPECS, placed, topology

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def opened_in_steps(front: str, *specs: str) -> list[str]:
    """The compressors for which a training step, compressed or not, had to look for a compiled program."""
    late = []
    for spec in specs:
        module = build("Mlp")
        if front == "hook":
            model: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
            taken: Any = attach(model, gckernels.from_spec(spec))
        else:
            model, taken = module, attach(module, gckernels.from_spec(spec), bucket_cap_mb=SMALL_BUCKETS)
        with mock.patch.object(program_cache, "opened", wraps=program_cache.opened) as opened:
            for step in range(3):
                model(module.batch(step, dist.get_rank())).backward()
            if opened.called:
                late.append(spec)
        taken.close()
    return late


@pytest.mark.host_only("Triton compiles for a device")
@pytest.mark.parametrize("front", [pytest.param("hook", marks=pytest.mark.slow), "module"])
def test_no_step_waits_for_a_compiler(front):
    if compilers.compiler() is None:
        pytest.skip("there is no C compiler")
    specs = SPECS if front == "module" else ("EFSignSGD", "SigNUM", "TopK")
    # new processes have not loaded any program yet
    assert values_of(run_ranks(2, opened_in_steps, front, *specs, fresh=True, exits=False)) == [[], []]


def plan_of(*units: tuple[Compressor, Program]) -> Plan:
    plans = [UnitPlan(f"{index}", 100, *unit, feedback=False) for index, unit in enumerate(units)]
    return Plan(tuple(plans), topology(2))


def test_programs_are_those_of_all_methods_that_compute_on_the_host():
    identity, natural = gckernels.Identity(), gckernels.Natural()
    dgc, signum = gckernels.DGC(warmup_steps=8), gckernels.SigNUM()
    sharded, gathered = PROGRAMS["alltoall"], PROGRAMS["allgather"]
    plan = plan_of((identity, PROGRAMS["allreduce"]), (natural, gathered), (dgc, gathered), (signum, sharded))
    methods = {method for _, method in dgc.schedule}
    shards = {method.shard_compressor for method in methods}
    assert len(methods) > 1
    on_cpu = host_methods(plan, Places.of(CPU))
    assert on_cpu.keys() == {natural, *methods, *shards, signum, signum.shard_compressor}
    assert {method for method, recodes in on_cpu.items() if recodes} == {signum, signum.shard_compressor}


def test_beside_a_device_only_what_is_placed_on_the_host_counts():
    natural, cast = gckernels.Natural(), gckernels.Cast16()
    gathered = PROGRAMS["allgather"]
    plan = plan_of((cast, gathered), (natural, placed(gathered, Place.HOST)))
    assert host_methods(plan, Places.of(CUDA)) == {natural: False}


def test_ranks_begin_with_different_programs():
    methods = [gckernels.LinearQuant(bits=bits) for bits in (2, 4, 8)]
    plan = plan_of(*((method, PROGRAMS["allgather"]) for method in methods))
    order: list[Compressor] = []
    with mock.patch.object(gckernels.LinearQuant, "compile_host", lambda self, recodes: order.append(self)):
        compile_host(plan, Places.of(CPU), rank=4)
    assert order == [*methods[1:], methods[0]]
