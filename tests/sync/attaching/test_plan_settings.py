"""Both ways of attaching honour what a plan says, and refuse a plan for the other one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, EFSignSGD, Identity, sync
from gckernels.sync import Frontend, Plan, Prediction, Topology, attach
from gckernels.sync.plans.prediction import Source
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, launched

STEPS = 4  # the first step is not compressed
SLOW = pytest.mark.slow
SOURCE = Source("lab", "00")
PREDICTION = Prediction(0.1, 0.2, "auto", False, 0.05, SOURCE, SOURCE, 0.13)

# -------------------------------------------------------------------- either way of attaching


def hooked(model: str, spec: str, program: str) -> list[list[str]]:
    """The digests of each step's gradients under DDP's hook, for plans that differ in messages and channels alone."""
    plans = [sync.uniform_plan(build(model), spec, program=program, exempt=None, world_size=dist.get_world_size())]
    plans.append(launched(plans[0], "messages").for_frontend(Frontend.DDP))
    plans.append(launched(plans[0].parted(1000), "channels").for_frontend(Frontend.DDP))
    plans.append(plans[0].parted(1000))
    found = []
    for plan in plans:
        module = build(model)
        ddp_model = DistributedDataParallel(
            module, bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=model == "Branches"
        )
        attachment = attach(ddp_model, plan, start_step=1)
        digests = []
        for step in range(STEPS):
            module.zero_grad()
            ddp_model(module.batch(step, dist.get_rank())).backward()
            digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        attachment.close()
        found.append(digests)
    return found


@pytest.mark.parametrize(
    ("world_size", "model"), [(2, "Branches"), pytest.param(2, "Mlp", marks=SLOW), pytest.param(4, "Mlp", marks=SLOW)]
)
def test_the_hook_has_the_messages_and_channels_of_the_plan(world_size, model):
    ranks = values_of(run_ranks(world_size, hooked, model, "BlockQuant(bits=4)", "alltoall"))
    for whole, messages, channels, parts in ranks:
        assert whole == messages == ranks[0][0]
        assert parts == channels == ranks[0][3]


def refused() -> list[str]:
    """The errors of plans for the other way of attaching, another model, and other ranks; then whether conversions to
    the right way train."""
    module, other = build("Mlp"), build("Mlp")
    model = DistributedDataParallel(module)
    plan = sync.uniform_plan(module, BlockQuant(), world_size=dist.get_world_size())
    with_launches = launched(plan, "pairs")
    for_ddp = dataclasses.replace(plan, frontend=Frontend.DDP)
    found = []
    for take, target, wrong, settings in (
        (attach, model, dataclasses.replace(with_launches, frontend=None), {}),
        (attach, model, dataclasses.replace(plan, frontend=Frontend.MODULE), {}),
        (attach, other, for_ddp, {}),
        (attach, other, with_launches, {"bucket_cap_mb": 25}),
        (attach, other, Plan(plan.units[1:]), {}),
        (attach, model, Plan(plan.units, Topology(4)), {"strict": False}),
    ):
        with pytest.raises(ValueError) as caught:
            take(target, wrong, **settings)
            pytest.fail(f"{take} {wrong} {settings}")
        found.append(str(caught.value))
    of_ddp = attach(model, with_launches.for_frontend(Frontend.DDP))
    of_module = attach(other, for_ddp.for_frontend(Frontend.MODULE))
    for each in (model, other):
        for step in range(2):
            each(module.batch(step, dist.get_rank())).backward()
    found.append(str(of_ddp.sent_nbytes_per_step() == of_module.sent_nbytes_per_step() > 0))
    of_ddp.close()
    of_module.close()
    return found


def test_a_plan_for_something_else_is_refused_with_what_to_do():
    for texts in values_of(run_ranks(2, refused)):
        launches, for_module, for_ddp, size, names, ranks, trains = texts
        assert launches.startswith("attach: the plan is for bare modules: its units have launches")
        assert "gckernels plan --frontend ddp, or pass plan.for_frontend(sync.Frontend.DDP)" in launches
        assert for_module.startswith("attach: the plan is for bare modules: it says so (frontend)")
        assert for_ddp.startswith("attach: the plan is for DistributedDataParallel models: it says so (frontend)")
        assert "plan.for_frontend(sync.Frontend.MODULE)" in for_ddp
        assert size == "attach: bucket_cap_mb must be None for a plan with launches, got 25"
        assert names.startswith(
            "plan does not fit the model:\n  layers.0.weight: not in the plan\nmake a plan for this"
        )
        assert names.endswith("gckernels plan; strict=False averages exactly what does not fit the model")
        assert ranks.startswith(
            "plan is for Topology(machines=4, devices=1), here are 2 ranks\nmake a plan for this model"
        )
        assert trains == "True"


# -------------------------------------------------------------------- other settings


def begun(planned: int, given: int) -> list[list[bool]]:
    """For each way of attaching: whether anything had been compressed after each step. The ranks know of different
    predictions."""
    plan = dataclasses.replace(
        sync.uniform_plan(build("Mlp"), EFSignSGD(), world_size=2),
        start_step=planned,
        prediction=PREDICTION if dist.get_rank() == 1 else None,
    )
    module, other = build("Mlp"), build("Mlp")
    model = DistributedDataParallel(module)
    handles = [attach(model, plan, start_step=given), attach(other, plan, start_step=given)]
    found: list[list[bool]] = [[], []]
    for step in range(STEPS):
        for each, handle, compressed in zip((model, other), handles, found, strict=True):
            each(module.batch(step, dist.get_rank())).backward()
            compressed.append(handle.sent_nbytes_per_step() > 0)
    for handle in handles:
        handle.close()
    return found


@pytest.mark.parametrize(("planned", "given", "first"), [(2, 0, 2), (3, 2, 3), (1, 2, 2)])
def test_the_larger_start_step_counts(planned, given, first):
    expected = [step >= first for step in range(STEPS)]
    assert values_of(run_ranks(2, begun, planned, given)) == [[expected, expected]] * 2


def resumed() -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """The digests of the last steps of a training that goes on, and of one that resumes with other launches; and the
    plan that the state had, and that it was given."""
    module = build("Mlp")
    plan = sync.uniform_plan(module, EFSignSGD(), exempt=None)
    first = dataclasses.replace(launched(plan, "each"), prediction=PREDICTION)
    attachment = attach(module, first)
    found: list[list[str]] = [[], []]
    for step in range(2 * STEPS):
        if step == STEPS:
            state = attachment.state_dict()
            plans = [state["plan"], _version_1(state["plan"])]
            state["plan"] = plans[1]
            other = copy.deepcopy(module)
            second = attach(other, launched(plan, "messages"), memory_budget_mb=100)
            second.load_state_dict(state)
        for each, digests in zip((module, other) if step >= STEPS else (module,), found, strict=False):
            each.zero_grad()
            each(module.batch(step, dist.get_rank())).backward()
            digests.append(digest_of(parameter.grad for parameter in each.parameters()))
    attachment.close()
    second.close()
    return found[0][STEPS:], found[1], plans


def _version_1(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan as the first version of the format has it, without launches."""
    units = [
        {name: unit[name] for name in unit if name not in ("launch", "message", "channel")} for unit in plan["units"]
    ]
    head = {name: plan[name] for name in ("format", "topology", "channels")}
    return head | {"version": 1, "units": units}


def test_a_job_resumes_with_other_launches():
    """The plan in its state has launches and its prediction, or is of the format's first version."""
    for went_on, again, (saved, first_version) in values_of(run_ranks(2, resumed)):
        assert went_on == again
        assert Plan.from_json(saved).has_launches
        prediction = Plan.from_json(saved).prediction
        assert prediction is not None and prediction.policy == "auto"
        assert not Plan.from_json(first_version).has_launches


def scaled() -> list[tuple[list[str], float]]:
    """The digests of gradients and the final scale of trainings with a gradient scaler, some steps of which overflow,
    without launches and with."""
    whole = sync.uniform_plan(build("Mlp"), EFSignSGD(), exempt=None, world_size=dist.get_world_size())
    found = []
    for plan in (whole, launched(whole, "backwards"), launched(whole, "messages")):
        module = build("Mlp")
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0, growth_interval=2)
        attachment = attach(module, plan, grad_scaler=scaler)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        digests = []
        for step in range(2 * STEPS):
            loss = scaler.scale(module(module.batch(step, dist.get_rank())))
            (loss * (torch.inf if step == STEPS else 1.0)).backward()
            digests.append(digest_of(parameter.grad for parameter in module.parameters()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((digests, scaler.get_scale()))
        attachment.close()
    return found


def test_residuals_follow_a_gradient_scaler_in_all_launches():
    for whole, *others in values_of(run_ranks(2, scaled)):
        assert others == [whole, whole]
        assert whole[1] != 8.0


def without_memory() -> bool:
    """Whether a plan with launches averages exactly if it may not take any memory."""
    module, other = build("Mlp"), build("Mlp")
    plan = launched(sync.uniform_plan(module, BlockQuant(), exempt=None), "messages")
    with pytest.warns(UserWarning, match="averaged without compression"):
        attachment = attach(module, plan, memory_budget_mb=0)
    exact = attach(other, Identity())
    for step in range(2):
        for each in (module, other):
            each.zero_grad()
            each(module.batch(step, dist.get_rank())).backward()
    assert [unit.launch for unit in attachment.plan.units] == [unit.launch for unit in plan.units]
    same = digest_of(p.grad for p in module.parameters()) == digest_of(p.grad for p in other.parameters())
    attachment.close()
    exact.close()
    return same


def test_units_over_the_budget_keep_their_launches():
    assert values_of(run_ranks(2, without_memory)) == [True, True]
