"""After a failed step residuals are consistent, no threads or processes remain, and training can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_models import attached
from gckernels import EFSignSGD, sync
from gckernels.codec import Encoding
from gckernels.sync import Attachment, attach
from gckernels.sync.messages import codings
from gckernels.sync.resources.lanes import DeviceLanes
from leftovers import children, lanes
from models import build
from ranks import Outcome, run_ranks, values_of
from workloads import thinned

pytestmark = pytest.mark.host_only("collectives of a device do not raise where they are issued")

FAULTY, WORLD_SIZE = 1, 3
AT = 3  # the step of the fault; the first step is not compressed
GROUP_TIMEOUT_S = 20.0  # ranks that are gone are noticed at once; others may be slow
TIMEOUT_S = 60.0
FRONTS = ("hook", "module")
State = dict[str, dict[str, torch.Tensor]]


def _taken(front: str, module: nn.Module, program: str) -> tuple[nn.Module, Any]:
    return attached(front, module, sync.uniform_plan(module, EFSignSGD(), program=program))


def _refuse(*_: Any) -> None:
    raise LookupError("a bad example")


def _in_forward(module: Any) -> None:
    module.layers[2].register_forward_pre_hook(_refuse)


def _in_backward(module: Any) -> None:
    """Fail while the gradients of the last layers are being sent."""
    module.layers[2].register_full_backward_hook(_refuse)


def _early(module: Any) -> None:
    raise StopIteration


FAULTS: dict[str, Callable[[Any], None]] = {"forward": _in_forward, "backward": _in_backward, "leaves": _early}


def survived(fault: str | None, program: str, front: str) -> tuple[int, list[int], list[State], str]:
    """Train until a step fails, or four steps if there is no fault.

    Returns:
        The number of steps, the counts of steps in the states, the states before the last step and after it with
        everything closed, and the error.
    """
    rank = dist.get_rank()
    module = build("Mlp")
    model, taken = _taken(front, module, program)
    raised, states = "", []
    for step in range(AT + 1):
        states.append(taken.state_dict())
        dist.barrier()  # all ranks have finished the step before
        if step == AT and fault is not None and rank == FAULTY:
            FAULTS[fault](module)
        try:
            model(module.batch(step, rank)).backward()
        except RuntimeError as error:
            raised = str(error)
            break
    taken.close()
    lanes(within_s=TIMEOUT_S / 2)
    states.append(taken.state_dict())
    last = states[-2:]
    return step, [state["step"] for state in last], [state["feedback"] for state in last], raised


@pytest.fixture(scope="module")
def clean() -> Callable[[str, str], list[Outcome]]:
    """The same training without a fault, run once for each program and front end."""
    known: dict[tuple[str, str], list[Outcome]] = {}

    def trained(program: str, front: str) -> list[Outcome]:
        if (program, front) not in known:
            known[program, front] = run_ranks(WORLD_SIZE, survived, None, program, front, timeout_s=TIMEOUT_S)
        return known[program, front]

    return trained


# `make test` takes every fault and every program once
@pytest.mark.parametrize(
    ("fault", "program", "front"),
    thinned(
        [
            (fault, *each)
            for fault in FAULTS
            for each in (("alltoall", "hook"), ("alltoall", "module"), ("allgather", "module"))
        ],
        4,
    ),
)
def test_a_residual_is_that_before_the_failed_step_or_that_after_it(clean, fault, program, front):
    """A unit that was encoded has given its payload away, whether or not any rank received it. Its residual is the
    error of that payload, and the payload is lost. Every other unit keeps its old residual. No residual is in
    between."""
    outcomes = run_ranks(
        WORLD_SIZE, survived, fault, program, front, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=TIMEOUT_S
    )
    expected = {"forward": "LookupError", "backward": "LookupError", "leaves": "StopIteration"}[fault]
    assert outcomes[FAULTY].error_type == expected, outcomes[FAULTY]
    for rank, (outcome, good) in enumerate(zip(outcomes, clean(program, front), strict=True)):
        if rank == FAULTY:
            continue
        assert outcome.error_type is None, outcome
        step, counts, (before, after), raised = outcome.value
        _, good_counts, (good_before, good_after), nothing = good.value
        assert (step, nothing) == (AT, "") and "gckernels: synchronisation failed" in raised
        assert counts[0] == AT and counts[1] in (AT, AT + 1) and good_counts == [AT, AT + 1]
        encoded = 0
        for kind, residuals in after.items():
            assert residuals.keys() == good_after[kind].keys()
            for name, residual in residuals.items():
                assert torch.equal(before[kind][name], good_before[kind][name])
                kept = torch.equal(residual, before[kind][name])
                assert kept or torch.equal(residual, good_after[kind][name]), (rank, kind, name)
                encoded += not kept
        assert encoded or front == "hook"


# -------------------------------------------------------------------- leftovers, and further training


def goes_on(front: str, folder: str) -> tuple[list[str], list[str], set[str], int, list[str], list[float]]:
    """The lanes before and after a failure, the processes and process groups that remain, the error of a step after
    closing, and the losses of the ranks that train on."""
    rank = dist.get_rank()
    module = build("Mlp")
    processes, groups = children(), len(dist.distributed_c10d._world.pg_map)
    model, taken = _taken(front, module, "alltoall")
    for step in range(2):  # in the second step DDP makes a collective of its own, about its buckets
        model(module.batch(step, rank)).backward()
    made = lanes()
    dist.barrier()
    if rank == FAULTY:
        raise StopIteration
    with pytest.raises(RuntimeError, match="synchronisation failed"):
        model(module.batch(2, rank)).backward()
    for _ in range(2):
        taken.close()
    left, groups_left = lanes(within_s=TIMEOUT_S / 2), len(dist.distributed_c10d._world.pg_map) - groups
    output = []
    if front == "hook":  # under a closed attachment gradients stay local, without an error
        with pytest.raises(RuntimeError) as caught:
            model(module.batch(3, rank)).backward()
        output.append(str(caught.value))
    dist.destroy_process_group()
    processes = children() - processes
    members = [each for each in range(WORLD_SIZE) if each != FAULTY]
    store = dist.FileStore(f"{folder}/store", len(members))
    place = {"rank": members.index(rank), "world_size": len(members)}
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=GROUP_TIMEOUT_S), **place)
    model, taken = _taken(front, module, "alltoall")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(module.batch(0, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    taken.close()
    return made, left, processes, groups_left, output, losses


@pytest.mark.parametrize("front", ["hook", pytest.param("module", marks=pytest.mark.slow)])
def test_nothing_is_left_and_the_same_process_goes_on(front, tmp_path):
    outcomes = run_ranks(
        WORLD_SIZE, goes_on, front, str(tmp_path), group_timeout_s=GROUP_TIMEOUT_S, timeout_s=TIMEOUT_S, fresh=True
    )
    assert outcomes[FAULTY].error_type == "StopIteration"
    for rank, outcome in enumerate(outcomes):
        if rank != FAULTY:
            assert outcome.error_type is None, outcomes
            made, left, processes, groups, output, losses = outcome.value
            assert made and not left and not processes and groups == 0
            # the model is plain DDP again, whose own group has lost a rank
            assert all("Connection" in text or "Timed out" in text for text in output), output
            assert losses[-1] < losses[0]
            assert outcome.exit_code == 0


def half_encoded() -> list[float]:
    """The values of a residual that is read while the failing step is still encoding."""
    begun, gate = threading.Event(), threading.Event()

    def bind_encodes(encodings: list[Encoding], scale: float, added: torch.Tensor) -> Callable[[], None]:
        (residual,) = [encoding.residual for encoding in encodings if encoding.residual is not None]

        def encode() -> None:
            residual[: residual.numel() // 2] = 1.0
            begun.set()
            gate.wait(GROUP_TIMEOUT_S)
            residual[residual.numel() // 2 :] = 1.0

        return encode

    module = build("Mlp")
    attachment = attach(
        module, sync.uniform_plan(module, EFSignSGD(), exempt=lambda name, parameter: name != "layers.0.weight")
    )
    module(module.batch(0, dist.get_rank())).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codings, "bind_encodes", bind_encodes)
        training = threading.Thread(target=lambda: module(module.batch(1, dist.get_rank())).backward())
        training.start()
        assert begun.wait(TIMEOUT_S)
        lanes_of(attachment).failure.set(RuntimeError("on another lane"))
        threading.Timer(0.1, gate.set).start()
        (residual,) = attachment.state_dict()["feedback"]["worker"].values()
    with suppress(RuntimeError):
        training.join()
    attachment.close()
    return residual.unique().tolist()


def lanes_of(attachment: Attachment) -> DeviceLanes:
    engine = attachment._frontend.runtime._engine
    assert engine is not None
    return engine.lanes


def test_a_residual_is_not_read_while_it_is_written():
    assert values_of(run_ranks(2, half_encoded)) == [[1.0], [1.0]]
