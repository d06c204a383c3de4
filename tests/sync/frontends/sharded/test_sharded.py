"""Models of FSDP2, over replicas or over all ranks: with nothing compressed they train as without an attachment, bit
for bit; with compression nothing is lost, and replicas stay equal."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gckernels import sync
from gckernels.planner.predictive import searching
from gckernels.sync.frontends.sharded.stand_ins import factor_of
from ranks import run_ranks, values_of
from sharded_models import (
    SETTINGS,
    Net,
    adamw,
    conserving,
    digest,
    fsdp_modules,
    model_of,
    shards_of,
    split,
    train,
)

STEPS = 3
QUANT = "BlockQuant(bits=4)"
CODECS = (QUANT, "EFSignSGD", "TopK(ratio=0.1)", "QSGD", "Cast16")
WITHOUT_REPLICAS = [name for name in SETTINGS if name != "sums last"]  # there are no sums of replicas
OF_SHARDS = ("compiled", "bare root", "prefetches", "keeps parameters", "keeps parameters after forward")
OF_PAIRS = ("plain", "sums last", "bf16", "sometimes unused")
OF_ONE_SHARD = ("every microbatch", "bf16, reduced in fp32", "clips", "checkpoints", "groups")
FORMS = pytest.mark.parametrize(("form", "ranks"), [("hsdp", 4), ("fsdp", 2)], ids=["hsdp", "fsdp"])


def exactly(names: Sequence[str], form: str) -> dict[str, tuple[str, str, int]]:
    """By setting: digests without an attachment and with one that compresses nothing, and the steps of the latter."""
    found = {}
    for name in names:
        setting, digests, attachment = SETTINGS[name], [], None
        for plan in (None, "Identity"):
            model = model_of(setting, form)
            attachment = None if plan is None else sync.attach(model, plan)
            train(model, setting, range(STEPS), adamw(model))
            digests.append(digest(model))
        assert attachment is not None
        found[name] = (*digests, attachment.steps)
        attachment.close()
    return found


@pytest.mark.parametrize(
    ("form", "ranks", "names"),
    [
        ("hsdp", 4, OF_PAIRS),
        ("one shard", 2, [name for name in SETTINGS if name not in (*OF_SHARDS, *OF_PAIRS)]),
        ("replicate", 2, ["plain", "accumulates", "clips"]),
        ("fsdp", 2, [name for name in WITHOUT_REPLICAS if name not in OF_ONE_SHARD]),
        pytest.param("fsdp", 2, OF_ONE_SHARD, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, list(SETTINGS), marks=pytest.mark.slow),
    ],
    ids=["hsdp", "one shard", "replicate", "fsdp", "fsdp, others", "hsdp, all"],
)
def test_nothing_changes_if_nothing_is_compressed(form, ranks, names):
    # torch keeps the names of the groups of a mesh for an equal mesh of a later job in the same process
    for found in values_of(run_ranks(ranks, exactly, names, form, fresh=True, exits=False)):
        for name, (alone, attached, steps) in found.items():
            assert attached == alone, name
            assert steps == STEPS * (2 if name == "every microbatch" else 1), name


def whole(form: str) -> list[list[torch.Tensor]]:
    """The parameters after steps without an attachment, and with one that compresses nothing."""
    found = []
    for plan in (None, "Identity"):
        model = model_of(SETTINGS["plain"], form)
        attachment = None if plan is None else sync.attach(model, plan)
        train(model, SETTINGS["plain"], range(STEPS), torch.optim.SGD(model.parameters(), 1e-2))
        found.append(shards_of(model))
        if attachment is not None:
            attachment.close()
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_with_more_ranks_only_the_order_of_sums_differs(ranks):
    for alone, attached in values_of(run_ranks(ranks, whole, "fsdp")):
        for one, other in zip(alone, attached, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def compressed(specs: tuple[str, ...], form: str) -> dict[str, tuple[str, float, float, float]]:
    """By compressor: the digest, bytes that were sent and would be sent, and those of residuals."""
    found = {}
    for spec in specs:
        model = model_of(SETTINGS["plain"], form)
        attachment = sync.attach(model, spec)
        train(model, SETTINGS["plain"], range(STEPS), adamw(model))
        stats = attachment.stats()
        found[spec] = (digest(model), stats["sent_nbytes"], stats["plain_nbytes"], stats["residual_nbytes"])
        attachment.close()
    return found


@pytest.mark.parametrize("form", ["hsdp", pytest.param("replicate", marks=pytest.mark.slow)])
def test_replicas_stay_equal_bit_for_bit(form):
    specs = ("BlockQuant(bits=4)", "PowerSGD", "QSGD") if form == "hsdp" else (*CODECS, "PowerSGD")
    ranks = values_of(run_ranks(4, compressed, specs, form))
    for spec in specs:
        digests = [found[spec][0] for found in ranks]
        if form == "hsdp":
            assert digests[0] == digests[2] and digests[1] == digests[3] and digests[0] != digests[1], spec
        else:
            assert len(set(digests)) == 1, spec
        _, sent, plain, _ = ranks[0][spec]
        assert 0 < sent < plain, spec


def test_shards_are_sent_to_their_ranks_alone():
    numels, matrices = 7 * 33 + 33 + 2 * (33 * 12 + 12) + 12 + 1, 7 * 33 + 2 * 33 * 12 + 12
    for found in values_of(run_ranks(2, compressed, CODECS, "fsdp")):
        for spec, (_, sent, plain, residuals) in found.items():
            assert plain == 4 * numels / 2, spec
            assert 0 < sent < plain, spec
            assert residuals == (4 * matrices if spec not in ("QSGD", "Cast16") else 0), spec


@pytest.mark.parametrize(
    ("spec", "leaves", "form", "ranks"),
    [
        (QUANT, False, "fsdp", 2),
        (QUANT, True, "hsdp", 4),
        ("TopK(ratio=0.1)", False, "fsdp", 2),
        pytest.param(QUANT, False, "hsdp", 4, marks=pytest.mark.slow),
        pytest.param(QUANT, True, "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("TopK(ratio=0.1)", False, "hsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost(spec, leaves, form, ranks):
    trained = (values_of(run_ranks(ranks, conserving, each, leaves, form)) for each in (None, spec))
    for exact, sent in zip(*trained, strict=True):
        torch.testing.assert_close(sent, exact, rtol=1e-4, atol=1e-5)


@FORMS
def test_with_residuals_in_8_bits_little_is_lost(form, ranks):
    """A step loses no more than the rounding of its residuals, which are a part of its gradients."""
    trained = [values_of(run_ranks(ranks, conserving, QUANT, False, form, bits)) for bits in (32, 8)]
    for exact, sent in zip(*trained, strict=True):
        for one, other in zip(exact, sent, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=2e-4)


class Interrupted(Exception):
    """Ends a backward in the middle."""


def interrupted(form: str) -> tuple[str, str, int]:
    """The digests of trainings without and with an attachment, a backward of which is given up; the counted steps."""
    setting, digests, attachment = SETTINGS["plain"], [], None
    for plan in (None, "Identity"):
        model = model_of(setting, form)
        attachment = None if plan is None else sync.attach(model, plan)
        optimizer = adamw(model)
        train(model, setting, range(2), optimizer)

        def fail(*_: object) -> None:
            raise Interrupted

        hook = model.first.register_full_backward_pre_hook(fail)
        with contextlib.suppress(Interrupted):
            train(model, setting, range(2, 3), optimizer)
        hook.remove()
        optimizer.zero_grad()
        for part in fsdp_modules(model):
            part._get_fsdp_state()._state_ctx.post_backward_final_callback_queued = False  # FSDP would do nothing more
        train(model, setting, range(3, 5), optimizer)
        digests.append(digest(model))
    assert attachment is not None
    steps = attachment.steps
    attachment.close()
    return digests[0], digests[1], steps


@FORMS
def test_a_backward_that_fails_is_not_counted(form, ranks):
    for alone, attached, steps in values_of(run_ranks(ranks, interrupted, form)):
        assert attached == alone
        assert steps == 4


def closed(form: str) -> tuple[str, str, bool]:
    """The digests of steps without an attachment, and after one was closed; whether FSDP has its own objects again."""
    setting, digests, before = SETTINGS["plain"], [], None
    for attaches in (False, True):
        model = model_of(setting, form)
        before = _of_fsdp(model)
        if attaches:
            attachment = sync.attach(model, "EFSignSGD")
            assert _of_fsdp(model) != before
            attachment.close()
        train(model, setting, range(STEPS), adamw(model))
        digests.append(digest(model))
    return digests[0], digests[1], _of_fsdp(model) == before


def _of_fsdp(model: Any) -> list[Any]:
    from gckernels.sync.frontends.sharded.shard_groups import shard_groups

    groups = shard_groups(model)
    return [each.replicas if each.is_replicated else each.reduce_scatter for each in groups]


@FORMS
def test_a_closed_attachment_leaves_the_model_as_it_was(form, ranks):
    for alone, after, is_own in values_of(run_ranks(ranks, closed, form)):
        assert after == alone
        assert is_own


def on_any(here: bool) -> bool:
    """Whether something holds on any rank."""
    there: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(there, here)
    return any(there)


def tuned(form: str) -> tuple[str, str, str, int]:
    """The digest of a training, the plan that was found, the plan of the resumed training, and how often plans were
    predicted."""
    setting = SETTINGS["plain"]
    model = model_of(setting, form)
    attachment = sync.attach(model, sync.Auto(propose=searching.proposer))
    with mock.patch.object(searching, "proposal", wraps=searching.proposal) as proposal:
        optimizer = adamw(model)
        train(model, setting, range(80), optimizer)
        for begin in range(80, 800, 40):  # a plan is predicted beside the training, later on a loaded machine
            if form != "fsdp" or on_any(proposal.call_count > 0):
                break
            train(model, setting, range(begin, begin + 40), optimizer)
    found, state = attachment.plan.fingerprint(), attachment.state_dict()
    trained = digest(model)
    attachment.close()
    model = model_of(setting, form)  # which must stay, as an attachment ends with its model
    again = sync.attach(model, sync.Auto(propose=searching.proposer))
    again.load_state_dict(state)
    taken = again.plan.fingerprint()
    again.close()
    return trained, found, taken, proposal.call_count


@pytest.mark.parametrize(("form", "ranks"), [pytest.param("hsdp", 4, marks=pytest.mark.slow), ("fsdp", 2)])
def test_a_plan_is_found_while_the_model_is_trained(form, ranks):
    found = values_of(run_ranks(ranks, tuned, form))
    assert all(taken == plan == found[0][1] for _, plan, taken, _ in found)
    assert [calls for *_, calls in found] == [int(form == "fsdp"), *[0] * (ranks - 1)]
    if form == "hsdp":
        assert found[0][0] == found[2][0]


def in_two_messages() -> list[str]:
    """The digests of trainings whose groups are sent in one message, and in one for each parameter."""
    digests, setting = [], SETTINGS["plain"]
    for apart in (False, True):
        model = model_of(setting, "fsdp")
        plan = sync.uniform_plan(model, "BlockQuant(bits=4)")
        if apart:
            plan = plan.with_units(replace(unit, message=number) for number, unit in enumerate(plan.units))
        attachment = sync.attach(model, plan)
        train(model, setting, range(STEPS), adamw(model))
        digests.append(digest(model))
        attachment.close()
    return digests


def test_messages_of_a_group_have_memory_of_their_own():
    for together, apart in values_of(run_ranks(2, in_two_messages)):
        assert apart == together


def gone() -> int:
    """The threads of lanes that are left when a model that was attached is gone."""
    model = model_of(SETTINGS["plain"], "fsdp")
    sync.attach(model, "EFSignSGD")
    train(model, SETTINGS["plain"], range(2), adamw(model))
    del model
    gc.collect()
    return sum("gckernels" in thread.name for thread in threading.enumerate())


def test_an_attachment_ends_with_its_model():
    assert values_of(run_ranks(2, gone)) == [0, 0]


def over_two_meshes() -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any], list[str]]:
    """Shards without and with an attachment, where a layer is sharded over pairs of ranks; figures, and warnings."""
    found, stats, texts = [], dict[str, Any](), list[str]()
    for plan in (None, "Identity"):
        torch.manual_seed(0)
        model = Net()
        pairs = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("between", "pair"))["pair"]
        fully_shard(model.second, mesh=pairs)
        split(model, [model], "fsdp")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment = None if plan is None else sync.attach(model, plan)
        train(model, SETTINGS["plain"], range(2), torch.optim.SGD(model.parameters(), 1e-2))
        found.append(shards_of(model))
        if attachment is not None:
            stats, texts = (
                attachment.stats(),
                [str(each.message) for each in caught if "gckernels" in str(each.message)],
            )
            attachment.close()
    return found[0], found[1], stats, texts


def test_groups_of_another_mesh_are_left_to_fsdp():
    for alone, attached, stats, texts in values_of(run_ranks(4, over_two_meshes)):
        for one, other in zip(alone, attached, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)
        assert stats["units"] == 6 and stats["sent_nbytes"] > 0
        (text,) = texts
        assert text.startswith("gckernels: parameter second.weight and 1 more are in no group of FSDP, or in one with")


def on_some_ranks() -> list[int]:
    """The numbers of process groups after attachments of a model on some of the ranks, one after the other."""
    mesh, found = DeviceMesh(torch.get_default_device().type, [0, 1], mesh_dim_names=("shard",)), list[int]()
    if dist.get_rank() < 2:
        model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 12))
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            attachment = sync.attach(model, "EFSignSGD")
            for _ in range(2):
                model(torch.ones(5, 7)).sum().backward()
            assert attachment.stats()["world_size"] == 2
            attachment.close()
            found.append(len(dist.distributed_c10d._world.pg_map))
    dist.barrier()
    return found


def test_attachments_of_a_model_on_some_ranks_leave_no_groups_behind():
    first, second, none = values_of(run_ranks(3, on_some_ranks))
    assert len(set(first)) == len(set(second)) == 1 and not none


def without_a_root() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Shards after steps of layers without a common module of FSDP, without and with an attachment."""
    found = []
    for plan in (None, "Identity"):
        torch.manual_seed(0)
        model: Any = Net()
        split(model, model.children(), "fsdp")
        attachment = None if plan is None else sync.attach(model, plan)
        train(model, SETTINGS["plain"], range(3), torch.optim.SGD(model.parameters(), 1e-2))
        found.append(shards_of(model))
        if attachment is not None:
            assert attachment.steps == 3
            attachment.close()
    return found[0], found[1]


def test_layers_need_no_common_root():
    for alone, attached in values_of(run_ranks(2, without_a_root)):
        for one, other in zip(alone, attached, strict=True):
            assert torch.equal(other, one)


def roots_in_turn(form: str) -> int:
    """Train two roots, one after the other. FSDP is told to wait for nothing at the end of their backwards."""
    torch.manual_seed(0)
    shape, names = ((2, 1), ("replicate", "shard")) if form == "hsdp" else ((2,), ("shard",))
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    roots: Any = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))
    for root in roots:
        for each in (*root, root):
            fully_shard(each, mesh=mesh)
    attachment = sync.attach(roots, "EFSignSGD")
    for step in range(3):
        for root in roots:
            root.set_is_last_backward(step == 2)
            root(torch.randn(4, 16)).square().mean().backward()
    steps = attachment.steps
    attachment.close()
    return steps


@pytest.mark.parametrize("form", ["hsdp", "fsdp"])
def test_a_root_may_begin_a_step_behind_that_of_another_one(form):
    assert values_of(run_ranks(2, roots_in_turn, form)) == [6, 6]


def two_models() -> list[str]:
    """Digests of two models in one process, trained in turns, each with an attachment or none."""
    digests, setting = [], SETTINGS["plain"]
    for plan in (None, "Identity"):
        models = [model_of(setting, "fsdp") for _ in range(2)]
        optimizers = [adamw(model) for model in models]
        attachments = [] if plan is None else [sync.attach(model, plan) for model in models]
        for step in range(3):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train(model, setting, range(2 * step + number, 2 * step + number + 1), optimizer)
        digests.append("".join(map(digest, models)))
        for attachment in attachments:
            attachment.close()
    return digests


def test_two_models_of_one_process_have_attachments_of_their_own():
    for alone, attached in values_of(run_ranks(2, two_models)):
        assert attached == alone


def test_every_multiple_of_a_mean_is_known():
    """FSDP asks for means, sums, and sums of products with a factor, which Gloo itself does not know."""
    factors = [factor_of(each, 4) for each in (dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.5))]
    assert factors == [1.0, 4.0, 2.0]
