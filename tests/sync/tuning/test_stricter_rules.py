"""Jobs that are continued under another rule of accuracy: a plan that it does not allow is left before anything is
compressed, and what it holds is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gckernels import BlockQuant, sync
from gckernels.sync.accuracy.accuracy import relative_error
from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import mass_of

TIMES_S = {PLAIN: 1.0, "signs": 0.3, "four": 0.5, "half": 0.9}
SIGNS, FOUR, HALF = {"signs": "EFSignSGD"}, {"four": "BlockQuant(bits=4)"}, {"half": "Cast16"}


class Training:
    """A tuned training of a small network, whose proposals and step times are given."""

    def __init__(self, front: str, accuracy: object, specs: dict[str, str], **options: object) -> None:
        self.module, self.handles = build("Mlp"), []
        self.scripted = scripted(self.module, specs, TIMES_S, self.handles)
        self.scripted.__enter__()
        self.model, self.handle = tuned_handle(front, self.module, accuracy=accuracy, **options)
        self.handles.append(self.handle)

    def train(self, first: int, last: int) -> list[str]:
        """The plans that ran when these steps ended."""
        return train(self.model, self.module, range(first, last), lambda _: policy_of(self.handle))

    def unsent(self) -> torch.Tensor:
        """The gradient that has not been sent, over all ranks."""
        masses = mass_of(self.handle)
        return torch.cat([masses[name].flatten() for name, _ in self.module.named_parameters()])

    def mean_gradient(self, step: int) -> torch.Tensor:
        """The mean of the gradients of all ranks, computed here."""
        parameters, ranks = list(self.module.parameters()), range(dist.get_world_size())
        each = [torch.autograd.grad(self.module(self.module.batch(step, rank)), parameters) for rank in ranks]
        return torch.stack([flat(gradients) for gradients in each]).mean(0)

    def gradient(self) -> torch.Tensor:
        return flat(each.grad for each in self.module.parameters())

    def close(self) -> None:
        self.handle.close()
        self.scripted.__exit__(None, None, None)


def flat(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in gradients])


def ended(training: Training, kind: str, folder: str) -> Callable[[Training], None]:
    """End a training, and return a function that lets another one continue where it was."""
    path, handle = Path(folder) / "dcp", training.handle
    state = handle.state_dict()
    if kind == "dcp":
        dcp.save({"gckernels": handle.checkpoint()}, checkpoint_id=path)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, {name: value for name, value in state.items() if name != "note"})
    training.close()

    def load(again: Training) -> None:
        if kind == "dcp":
            dcp.load({"gckernels": again.handle.checkpoint(reads=path)}, checkpoint_id=path)
        else:
            again.handle.load_state_dict(states if kind == "list" else state)

    return load


def resumed(front, accuracy, kind, folder):
    """A training under a list of compressors that is continued under another rule."""
    saved = Training(front, ["EFSignSGD"], SIGNS)
    saved.train(0, STEPS + 4)
    unsent, expected = saved.unsent(), saved.mean_gradient(STEPS + 4)
    load = ended(saved, kind, folder)
    again = Training(front, accuracy, {} if accuracy == "exact" else HALF)
    again.module.load_state_dict(saved.module.state_dict())
    load(again)
    kept = torch.equal(again.unsent(), unsent) and bool(unsent.any()) and again.handle.is_changing
    policies = again.train(STEPS + 4, STEPS + 5)
    first, left = again.gradient(), again.unsent()
    torch.testing.assert_close(first, expected + unsent.float(), rtol=0, atol=1e-6)  # two roundings of fp32
    policies += again.train(STEPS + 5, 2 * STEPS + 30)
    texts = [each.text for each in again.handle.decisions]
    again.close()
    return kept, bool(left.any()), first, policies, texts


@pytest.mark.parametrize(
    ("front", "accuracy", "kind"),
    [
        ("ddp", "exact", "own"),
        ("module", "safe", "dcp"),
        pytest.param("ddp", ["Cast16"], "dcp", marks=pytest.mark.slow),
        pytest.param("module", "exact", "list", marks=pytest.mark.slow),
        pytest.param("ddp", 0.1, "list", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_a_stricter_rule_does_not_allow_is_left_by_an_exact_step(front, accuracy, kind, tmp_path):
    ranks = values_of(run_ranks(2, resumed, front, accuracy, kind, str(tmp_path)))
    for kept, has_unsent, first, policies, texts in ranks:
        assert kept and not has_unsent and torch.equal(first, ranks[0][2])
        assert {*policies} <= {PLAIN, "half"} and policies[-1] == (PLAIN if accuracy == "exact" else "half")
        (left,) = [text for text in texts if "the saved plan is left" in text]
        assert "does not allow EFSignSGD" in left and "EFSignSGD" not in texts[-1]


def given(front, rules, folder):
    """The last decision and plan of a training whose plan was given under one rule, when it goes on under another."""
    before, after = rules
    saved = Training(front, before, HALF)
    saved.train(0, 4)
    saved.handle.change_plan(sync.uniform_plan(saved.model, "EFSignSGD"))
    text = saved.handle.decisions[-1].text
    saved.train(4, 8)
    load = ended(saved, "own", folder)
    again = Training(front, after, HALF)
    load(again)
    again.train(8, 10)
    compresses = again.handle.stats()["compressed_units"] > 0
    texts = text, again.handle.decisions[-1].text
    again.close()
    return texts, compresses


@pytest.mark.parametrize(
    ("rules", "stays"),
    [(("safe", "safe"), True), (("safe", ["EFSignSGD"]), True), (("safe", "exact"), False)],
)
def test_a_plan_that_was_given_stays_unless_another_rule_does_not_allow_it(rules, stays, tmp_path):
    for (text, resumed), compresses in values_of(run_ranks(2, given, "module", rules, str(tmp_path))):
        assert "set, although the rule safe does not allow EFSignSGD" in text and compresses == stays
        assert ("keeping the plan that you set" if stays else "the saved plan is left") in resumed


def before_the_rule(folder):
    """Plans of a training whose rule begins later than the rule of the job that it continues."""
    saved = Training("ddp", "safe", FOUR)
    saved.train(0, STEPS + 4)
    load = ended(saved, "own", folder)
    again = Training("ddp", "safe", FOUR, start_step=STEPS + 20)
    load(again)
    text = again.handle.decisions[-1].text
    policies = again.train(STEPS + 4, 2 * STEPS + 30)
    again.close()
    return text, policies


def test_nothing_is_compressed_before_the_first_step_that_may_be(tmp_path):
    for text, policies in values_of(run_ranks(2, before_the_rule, str(tmp_path))):
        assert f"the rule exact until step {STEPS + 20} does not allow BlockQuant(bits=4)" in text
        assert {*policies[:20]} == {PLAIN} and policies[-1] == "four"


def replanned(limit):
    """Whether the plan that ran is tried again after its compressor has had a larger error."""
    training = Training("module", "safe", FOUR)
    training.train(0, STEPS + 2)
    tuner, plan = training.handle._tuning._tuner, training.handle.plan
    trace, stage = tuner._progress.tuned.trace, tuner._stages[0]
    names = {name for unit in plan.units for name in unit.parameters}
    worse = trace.remembering({(name, str(BlockQuant(bits=4))): limit for name in names})
    (judged,) = tuner._again(plan, trace, stage)
    again = tuner._again(plan, worse, stage)
    training.close()
    return judged.prediction.error == pytest.approx(relative_error(plan, trace)), again


def test_a_plan_whose_errors_have_grown_is_not_tried_again():
    for is_checked, again in values_of(run_ranks(2, replanned, 0.5)):
        assert is_checked and again == []
