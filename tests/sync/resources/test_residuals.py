"""Residuals: tensors keep their identity, states are copies, and a state that does not fit changes nothing."""

from __future__ import annotations

import pytest
import torch

from gckernels.sync.resources.feedback import KINDS, Feedback
from gckernels.sync.resources.memory_spaces import Places

NOTHING: dict = {kind: {} for kind in KINDS}


@pytest.fixture
def feedback() -> Feedback:
    feedback = Feedback(Places.of(torch.device("cpu")))
    feedback.residual("worker", "a", 5).copy_(torch.arange(5.0))
    feedback.residual("shard", "a", 3).fill_(7.0)
    feedback.residual("worker", "b", 2).fill_(-1.0)
    return feedback


def same(state: dict, other: dict) -> bool:
    return all(
        state[kind].keys() == other[kind].keys()
        and all(torch.equal(state[kind][name], other[kind][name]) for name in state[kind])
        for kind in KINDS
    )


def test_a_new_residual_is_zero_and_stays_the_same_tensor(feedback):
    residual = feedback.residual("shard", "b", 4)
    assert residual.dtype == torch.float32 and torch.equal(residual, torch.zeros(4))
    residual.fill_(2.0)
    assert feedback.residual("shard", "b", 4) is residual
    assert feedback.residual("worker", "b", 2) is not residual


def test_a_residual_of_no_elements():
    feedback = Feedback(Places.of(torch.device("cpu")))
    assert feedback.residual("shard", "a", 0).shape == (0,)
    assert feedback.nbytes() == 0
    feedback.load_state_dict(feedback.state_dict())


def test_another_size_is_refused(feedback):
    with pytest.raises(ValueError, match="the shard residual of a has 3 elements, need 4"):
        feedback.residual("shard", "a", 4)


def test_nbytes(feedback):
    assert feedback.nbytes() == 4 * (5 + 3 + 2)


def test_state_is_a_copy(feedback):
    state = feedback.state_dict()
    assert {kind: sorted(state[kind]) for kind in state} == {kind: [] for kind in KINDS} | {
        "worker": ["a", "b"],
        "shard": ["a"],
    }
    feedback.residual("worker", "a", 5).zero_()
    assert torch.equal(state["worker"]["a"], torch.arange(5.0))
    state["shard"]["a"].zero_()
    assert torch.equal(feedback.residual("shard", "a", 3), torch.full((3,), 7.0))


def test_loading_keeps_the_tensors_and_takes_the_values(feedback):
    state = feedback.state_dict()
    tensors = {name: feedback.residual("worker", name, numel) for name, numel in (("a", 5), ("b", 2))}
    for tensor in tensors.values():
        tensor.fill_(99.0)
    late = feedback.residual("worker", "late", 6)
    late.fill_(3.0)
    feedback.load_state_dict(state)
    assert feedback.residual("worker", "a", 5) is tensors["a"] and torch.equal(tensors["a"], torch.arange(5.0))
    assert feedback.residual("worker", "b", 2) is tensors["b"] and torch.equal(tensors["b"], torch.full((2,), -1.0))
    assert feedback.residual("worker", "late", 6) is late and not late.any()  # zero, for the state has no such residual
    state["worker"]["a"].fill_(5.0)
    assert torch.equal(tensors["a"], torch.arange(5.0))  # the state is a copy


def test_loading_into_an_empty_one_copies(feedback):
    state = feedback.state_dict()
    empty = Feedback(Places.of(torch.device("cpu")))
    empty.load_state_dict(state)
    state["worker"]["a"].zero_()
    assert same(empty.state_dict(), feedback.state_dict())
    with pytest.raises(ValueError, match="need 4"):
        empty.residual("shard", "a", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "must have a dict under 'worker'"),
        ([], "must have a dict under 'worker'"),
        ({}, "must have a dict under 'worker'"),
        ({"worker": {}}, "must have a dict under 'shard'"),
        ({"worker": [], "shard": {}}, "must have a dict under 'worker'"),
        (NOTHING | {"shard": {"a": torch.zeros(2)}}, "shard residual of a has 2 .*need 3"),
        (NOTHING | {"worker": {"a": torch.zeros(5), "b": torch.zeros(3)}}, "worker residual of b has 3 .*need 2"),
        ({"worker": {"a": torch.zeros(5).double()}, "shard": {}}, "worker residual of a must be a float32 vector"),
        ({"worker": {"a": torch.zeros(5, 1)}, "shard": {}}, "worker residual of a must be a float32 vector"),
        ({"worker": {"a": [0.0] * 5}, "shard": {}}, "worker residual of a must be a float32 vector"),
        ({"worker": {"new": None}, "shard": {}}, "worker residual of new must be a float32 vector"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(feedback, change, message):
    before = feedback.state_dict()
    with pytest.raises(ValueError, match=message):
        feedback.load_state_dict(change)
    assert same(feedback.state_dict(), before)


# -------------------------------------------------------------------- units that are not used


@pytest.mark.parametrize("later", [False, True])
def test_residuals_come_back_if_no_rank_has_used_the_unit(later):
    feedback = Feedback(Places.of(torch.device("cpu")))
    residuals = {key: feedback.residual("worker", key, 4).fill_(1.0) for key in "abc"}
    feedback.unused.begin()
    assert feedback.unused.keep(residuals.items()) == []  # all are used
    feedback.unused.add("ab")
    feedback.unused.add("b", sends=True)
    ((spared, copy),) = feedback.unused.keep(residuals.items())
    assert spared is residuals["a"] and torch.equal(spared, copy)
    for residual in residuals.values():
        residual.fill_(2.0)
    used = torch.zeros(2)
    (feedback.unused.restore_later if later else feedback.unused.restore)(lambda key: used["ab".index(key)])
    used[0] = 1
    found = feedback.state_dict()["worker"]  # it is needed
    assert {key: float(each[0]) for key, each in found.items()} == {"a": 2.0 if later else 1.0, "b": 1.0, "c": 2.0}
