"""Checkpoints of tuned trainings: the plan that was found runs again without trials, and nothing unsent is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gckernels import sync
from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import digest_of, mass_of

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}


def save(handle: Any, kind: str, folder: str) -> None:
    """Save the state of a handle, as the list of all ranks' states or with torch.distributed.checkpoint."""
    if kind == "dcp":
        dcp.save({"gckernels": handle.checkpoint()}, checkpoint_id=f"{folder}/dcp")
    else:
        torch.save(handle.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()


def load(handle: Any, kind: str, folder: str) -> None:
    """Load what :func:`save` has saved, into a job of any size."""
    if kind == "dcp":
        dcp.load({"gckernels": handle.checkpoint(reads=f"{folder}/dcp")}, checkpoint_id=f"{folder}/dcp")
        return
    states = [torch.load(file, weights_only=True) for file in sorted(Path(folder).glob("*.pt"))]
    is_same = len(states) == dist.get_world_size()
    handle.load_state_dict(states[dist.get_rank()] if is_same else states)


def compresses(handle: Any) -> bool:
    return any(not unit.in_place for unit in handle.plan.units)


def total(handle: Any) -> torch.Tensor:
    """Everything that has not been sent, over all ranks."""
    return torch.cat([mass.flatten() for mass in mass_of(handle).values()])


class Training:
    """A tuned training of a small network, whose steps take the seconds that a test says."""

    def __init__(self, front: str, winner_s: float = 0.5) -> None:
        self.module, self.handles = build("Mlp"), []
        step_s = {PLAIN: 1.0, "four": winner_s, "eight": 1.5 * winner_s}
        self.scripted = scripted(self.module, SPECS, step_s, self.handles)
        self.scripted.__enter__()
        self.model, self.handle = tuned_handle(front, self.module)
        self.handles.append(self.handle)

    def train(self, first: int, last: int) -> list[str]:
        """Digests of the gradients of some steps."""
        return train(self.model, self.module, range(first, last), lambda _: digest_of(self.gradients()))

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.module.parameters() if each.grad is not None]

    def close(self) -> None:
        self.handle.close()
        self.scripted.__exit__(None, None, None)


def interrupted(front, winner_s, kind, folder):
    """A training that is saved and goes on, and one that is continued from there."""
    saved, at_step = Training(front, winner_s), STEPS + 4
    saved.train(0, at_step)
    save(saved.handle, kind, folder)
    weights = {name: each.clone() for name, each in saved.module.state_dict().items()}
    before = saved.handle.decisions, saved.handle.samples, saved.handle.plan
    expected = saved.train(at_step, at_step + 5)
    saved.close()
    again = Training(front, winner_s)
    again.module.load_state_dict(weights)
    load(again.handle, kind, folder)
    after = again.handle.decisions[:-1], again.handle.samples, again.handle.plan
    digests, handle = again.train(at_step, at_step + 30), again.handle
    stays = handle.plan == before[2] and policy_of(handle) == policy_of(saved.handle)
    again.handle.report(f"{folder}/{kind}-{dist.get_rank()}.html")
    found = (digests[:5] == expected, after == before, stays, handle.decisions[-1].text, handle.stats())
    samples, decided = [each.step for each in handle.samples], [each.step for each in handle.decisions]
    again.close()
    return found, decided, (compresses(handle), samples)


@pytest.mark.parametrize(
    ("front", "winner_s", "kind"),
    [
        ("ddp", 0.5, "state_dict"),
        ("module", 2.0, "dcp"),
        pytest.param("module", 0.5, "state_dict", marks=pytest.mark.slow),
        pytest.param("ddp", 0.5, "dcp", marks=pytest.mark.slow),
        pytest.param("ddp", 2.0, "state_dict", marks=pytest.mark.slow),
    ],
)
def test_a_settled_training_goes_on_with_its_plan_and_its_figures(front, winner_s, kind, tmp_path):
    found = values_of(run_ranks(2, interrupted, front, winner_s, kind, str(tmp_path)))
    for rank, (result, decided, counts) in enumerate(found):
        same, goes_on, stays, text, stats = result
        assert same or front == "ddp"  # DDP's first step has one bucket, which is sent exactly
        assert goes_on or (kind, rank) == ("dcp", 1)  # whose samples are those of one rank
        assert stays and "no trials" in text and f"step {STEPS + 4}" in text
        assert counts == (winner_s < 1.0, [10, 20, 30, 40, 50, 60, 70, 80, 90])
        assert (stats["step"], stats["decisions"]) == (STEPS + 34, 2)
        assert stats["plain_s"] - stats["step_s"] == pytest.approx(1.0 - min(winner_s, 1.0))
        page = (tmp_path / f"{kind}-{rank}.html").read_text()
        assert decided[0] < decided[1] == STEPS + 4 and all(f"<b>Step {step}</b>" in page for step in decided)
        assert ("<h2>Alternatives</h2>" in page) == (winner_s < 1.0)  # with the prediction


def given(front, at_step, kind, folder):
    """A training whose plan is given, continued twice: its plans and its last decisions."""
    saved = Training(front)
    saved.train(0, at_step)
    saved.handle.change_plan(sync.uniform_plan(saved.model, "EFSignSGD"))
    saved.train(at_step, at_step + 3)
    plan, found = saved.handle.plan.fingerprint(), []
    for turn in range(2):
        save(saved.handle, kind, f"{folder}/{turn}")
        saved.close()
        again = Training(front)
        load(again.handle, kind, f"{folder}/{turn}")
        again.train(at_step + 3, at_step + 30)
        found.append((again.handle.plan.fingerprint() == plan, again.handle.decisions[-1].text))
        saved = again
    saved.close()
    return found


@pytest.mark.parametrize(
    ("front", "at_step", "kind"),
    [
        ("ddp", 6, "state_dict"),  # while steps are recorded
        pytest.param("module", STEPS + 2, "dcp", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_the_training_has_given_stays_when_it_is_continued(front, at_step, kind, tmp_path):
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
    for found in values_of(run_ranks(2, given, front, at_step, kind, str(tmp_path))):
        for stays, text in found:
            assert stays and "keeping the plan that you set" in text


def saved_in_between(front, in_change, kind, folder):
    """Residuals of a training that is saved in its trials or in a change of its plan, and of one that goes on."""
    saved = Training(front)
    saved.train(0, 20)
    while not (compresses(saved.handle) and saved.handle.is_changing == in_change and total(saved.handle).any()):
        saved.train(saved.handle.steps, saved.handle.steps + 1)
    at_step = saved.handle.steps
    save(saved.handle, kind, folder)
    unsent = total(saved.handle)
    saved.close()
    again = Training(front)
    load(again.handle, kind, folder)
    loaded = compresses(again.handle), torch.equal(total(again.handle), unsent)
    again.train(at_step, at_step + 2)
    sent = compresses(again.handle), again.handle.residual_nbytes() > 0
    again.train(at_step + 2, at_step + 2 + STEPS)
    texts, last = [each.text for each in again.handle.decisions], policy_of(again.handle)
    again.close()
    return at_step, bool(unsent.any()), loaded, sent, last, texts


@pytest.mark.parametrize(
    ("front", "in_change", "kind"),
    [
        ("module", False, "state_dict"),
        ("ddp", True, "dcp"),
        pytest.param("ddp", False, "dcp", marks=pytest.mark.slow),
        pytest.param("module", True, "state_dict", marks=pytest.mark.slow),
    ],
)
def test_a_training_that_was_saved_in_its_trials_sends_what_is_left_and_is_tuned_anew(front, in_change, kind, tmp_path):
    for found in values_of(run_ranks(2, saved_in_between, front, in_change, kind, str(tmp_path))):
        at_step, has_unsent, loaded, sent, last, texts = found
        assert has_unsent and at_step < STEPS
        assert (loaded, sent) == ((True, True), (False, False))
        assert last == "four" and len(texts) == 2 and "tuned anew: its trials had not ended" in texts[0]


def settled(kind, folder):
    training = Training("ddp")
    training.train(0, STEPS + 4)
    save(training.handle, kind, folder)
    unsent = total(training.handle)
    training.close()
    return unsent


def on_other_ranks(kind, folder):
    """Residuals, plans and decisions of another number of ranks, before and after two steps."""
    training = Training("module")
    if dist.get_world_size() == 1:
        with pytest.warns(UserWarning, match="are dropped"):
            load(training.handle, kind, folder)
    else:
        load(training.handle, kind, folder)
    unsent, loaded = total(training.handle), compresses(training.handle)
    training.train(STEPS + 4, STEPS + 6)
    texts = [each.text for each in training.handle.decisions]
    now = compresses(training.handle), training.handle.steps
    training.close()
    return unsent, loaded, now, texts


@pytest.mark.parametrize(("ranks", "kind"), [(3, "dcp"), (1, "state_dict")])
def test_another_number_of_ranks_sends_what_is_left_and_is_tuned_anew(ranks, kind, tmp_path):
    before = values_of(run_ranks(2, settled, kind, str(tmp_path)))[0]
    for unsent, loaded, (still, steps), texts in values_of(run_ranks(ranks, on_other_ranks, kind, str(tmp_path))):
        assert loaded and steps == STEPS + 6
        if ranks > 1:
            torch.testing.assert_close(unsent, before, rtol=0, atol=1e-6)
            assert not still and "tuned anew: it was found on 2 ranks" in texts[-1]


def damaged(kind, folder):
    training = Training("ddp")
    training.train(0, 12)
    save(training.handle, kind, folder)
    state, before = training.handle.state_dict(), training.handle.plan
    texts = []
    for name, text in (("journal", "{}"), ("journal", 3), ("tuning", "[]"), ("tuning", json.dumps({"ranks": 2}))):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            training.handle.load_state_dict(state | {name: text})
        texts.append(str(raised.value))
    stays = training.handle.plan == before and training.handle.steps == 12
    training.close()
    return texts, stays


def test_damaged_figures_are_refused_before_anything_is_changed(tmp_path):
    for texts, stays in values_of(run_ranks(2, damaged, "state_dict", str(tmp_path))):
        names = ("journal", "journal", "tuning", "tuning")
        assert stays and all(f"state: {name}" in text for name, text in zip(names, texts, strict=True))
