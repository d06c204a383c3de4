"""Residuals: tensors keep their identity, states are copies, and a state that does not fit changes nothing."""

from __future__ import annotations

import pytest
import torch

from gckernels.sync.resources.feedback import KINDS, Feedback
from gckernels.sync.resources.memory_spaces import Places
from gckernels.sync.resources.residual import EncodedForm, Residual, multiply

NOTHING: dict = {kind: {} for kind in KINDS}


@pytest.fixture
def feedback() -> Feedback:
    feedback = Feedback(Places.of(torch.device("cpu")))
    feedback.residual("worker", "a", 5).tensor.copy_(torch.arange(5.0))
    feedback.residual("shard", "a", 3).tensor.fill_(7.0)
    feedback.residual("worker", "b", 2).tensor.fill_(-1.0)
    return feedback


def same(state: dict, other: dict) -> bool:
    return all(
        state[kind].keys() == other[kind].keys()
        and all(torch.equal(state[kind][name], other[kind][name]) for name in state[kind])
        for kind in KINDS
    )


def test_a_new_residual_is_zero_and_stays_the_same_tensor(feedback):
    residual = feedback.residual("shard", "b", 4).tensor
    assert residual.dtype == torch.float32 and torch.equal(residual, torch.zeros(4))
    residual.fill_(2.0)
    assert feedback.residual("shard", "b", 4).tensor is residual
    assert feedback.residual("worker", "b", 2).tensor is not residual


def test_a_residual_of_no_elements():
    feedback = Feedback(Places.of(torch.device("cpu")))
    assert feedback.residual("shard", "a", 0).tensor.shape == (0,)
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
    feedback.residual("worker", "a", 5).tensor.zero_()
    assert torch.equal(state["worker"]["a"], torch.arange(5.0))
    state["shard"]["a"].zero_()
    assert torch.equal(feedback.residual("shard", "a", 3).tensor, torch.full((3,), 7.0))


def test_loading_keeps_the_tensors_and_takes_the_values(feedback):
    state = feedback.state_dict()
    tensors = {name: feedback.residual("worker", name, numel).tensor for name, numel in (("a", 5), ("b", 2))}
    for tensor in tensors.values():
        tensor.fill_(99.0)
    late = feedback.residual("worker", "late", 6).tensor
    late.fill_(3.0)
    feedback.load_state_dict(state)
    assert feedback.residual("worker", "a", 5).tensor is tensors["a"] and torch.equal(tensors["a"], torch.arange(5.0))
    assert feedback.residual("worker", "b", 2).tensor is tensors["b"]
    assert torch.equal(tensors["b"], torch.full((2,), -1.0))
    assert feedback.residual("worker", "late", 6).tensor is late
    assert not late.any()  # zero, for the state has no such residual
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
    residuals = {key: feedback.residual("worker", key, 4).tensor.fill_(1.0) for key in "abc"}
    feedback.unused.begin()
    assert feedback.unused.keep(residuals.items()) == {}  # all are used
    feedback.unused.add("ab")
    feedback.unused.add("b", sends=True)
    ((spared, copy),) = feedback.unused.keep(residuals.items()).items()
    assert spared == "a" and torch.equal(residuals["a"], copy)
    for residual in residuals.values():
        residual.fill_(2.0)
    used = torch.zeros(2)
    (feedback.unused.restore_later if later else feedback.unused.restore)(lambda key: used["ab".index(key)])
    used[0] = 1
    found = feedback.state_dict()["worker"]  # it is needed
    assert {key: float(each[0]) for key, each in found.items()} == {"a": 2.0 if later else 1.0, "b": 1.0, "c": 2.0}


# -------------------------------------------------------------------- residuals in 8 bits


def test_a_residual_in_8_bits_changes_its_form_without_loss():
    """States are fp32, and a loaded one gets its form when it is needed."""
    feedback = Feedback(Places.of(torch.device("cpu")), bits=8)
    rows, other = EncodedForm(2, 304), EncodedForm(3, 208)
    residual = feedback.residual("worker", "a", 600, form=rows)
    assert residual.tensor.shape == (2, 16 + 304) and feedback.nbytes() == 2 * 320
    residual.write(torch.randn(600))
    values = feedback.get("worker", "a")
    assert values is not None and values.dtype == torch.float32
    state, kept = feedback.state_dict(), residual.tensor.clone()
    assert torch.equal(state["worker"]["a"], values)
    residual.zero()
    assert not residual.values().any()
    feedback.load_state_dict(state)
    assert torch.equal(residual.tensor, kept)
    again = Feedback(Places.of(torch.device("cpu")), bits=8)
    again.load_state_dict(state)
    assert torch.equal(again.residual("worker", "a", 600, form=rows).tensor, kept)
    assert again.residual("worker", "a", 600, form=other).tensor.shape == (3, 16 + 208)
    assert again.residual("worker", "a", 600).tensor.dtype == torch.float32  # for an encoding that takes fp32
    plain = Feedback(Places.of(torch.device("cpu")))
    assert plain.residual("worker", "a", 600, form=rows).tensor.dtype == torch.float32


@pytest.mark.parametrize("rows", [None, EncodedForm(3, 208)])
def test_parts_of_a_residual_are_its_memory(rows):
    residual = Residual.zeros(600, torch.device("cpu"), rows)
    residual.write(torch.arange(600.0))
    parts = [residual.part(chunk, 208) for chunk in range(3)]
    assert torch.allclose(torch.cat([part.values() for part in parts]), torch.arange(600.0), atol=4.0)
    before = residual.values().clone()
    parts[1].add(parts[1].with_tensor(parts[1].tensor.clone()))
    assert torch.equal(residual.values()[208:416], 2 * before[208:416])
    parts[2].zero()
    assert not residual.values()[416:].any()
    assert torch.equal(residual.values()[:208], before[:208])


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.3, torch.tensor(4.0)])
def test_residuals_of_both_forms_are_multiplied(factor):
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    plain, encoded = Residual(values.clone(), 300), Residual(values.clone(), 300)
    encoded.change(torch.device("cpu"), EncodedForm(1, 300))
    before = encoded.values()
    multiply([plain, encoded], factor)
    assert torch.equal(plain.values(), values * factor)
    rounding = 0.0 if factor in (0.0, 0.5, 4.0) else 0.01
    torch.testing.assert_close(encoded.values(), before * factor, rtol=0, atol=rounding)
