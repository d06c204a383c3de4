"""A compressor of updates is found while the model is trained, by the times of rounds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gckernels import BlockQuant, Cast16, EFSignSGD, Identity, sync
from gckernels.sync.tuning.trials import spans
from models import build
from ranks import run_ranks, values_of
from tunings import ScriptedClock
from workloads import digest_of

SIGNS = EFSignSGD(block=1024, magnitude="projection")
EXACT = Identity()


class PlanClock(ScriptedClock):
    """A clock that a round moves on by the seconds of the compressor of its matrices."""

    def mark(self) -> float:
        attachment = self.handle()
        self.now_s += self.step_s[str(EXACT if attachment is None else matrices_by(attachment))]
        return self.now_s


def matrices_by(attachment: Any) -> Any:
    return next(unit.compressor for unit in attachment.plan.units if unit.key.endswith("weight"))


def tuned(plan: Any, step_s: dict[str, float], rounds: int, **settings: Any) -> tuple[Any, set[str], set[str], str]:
    """The compressor of matrices that was found, all that were tried, and those of vectors."""
    model, attachments, seen, vectors = build("Mlp"), list[Any](), set[str](), set[str]()
    clock = PlanClock(lambda: attachments[0] if attachments else None, step_s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.object(spans, "clock_of", lambda device: clock):
        attachment = sync.attach(model, sync.Updates(optimizer, plan, every=2, **settings))
        attachments.append(attachment)
        for step in range(2 * rounds):
            model(model.batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.add(str(matrices_by(attachment)))
            vectors |= {str(unit.compressor) for unit in attachment.plan.units if unit.key.endswith("bias")}
    found = matrices_by(attachment), seen, vectors, digest_of(model.parameters())
    attachment.close()
    return found


def all_tuned() -> list[Any]:
    fast = {
        str(SIGNS): 0.2,
        str(BlockQuant(bits=4)): 0.4,
        str(BlockQuant()): 0.5,
        str(EXACT): 1.0,
        str(Cast16(dtype=torch.bfloat16)): 0.7,
    }
    plain = dict.fromkeys(fast, 1.0)
    with pytest.raises(ValueError, match="Auto: accuracy must be 'exact', 'safe', 'aggressive'"):
        sync.attach(build("Mlp"), sync.Updates(torch.optim.SGD(build("Mlp").parameters()), sync.Auto(accuracy="bold")))
    aggressive = sync.Auto(accuracy="aggressive")
    return [tuned(aggressive, fast, 60), tuned(sync.Auto(), fast, 60), tuned(aggressive, plain, 115)]


def test_the_fastest_compressor_that_is_allowed_stays():
    ranks = values_of(run_ranks(2, all_tuned, timeout_s=300.0))
    for aggressive, safe, plain in ranks:
        assert aggressive[0] == SIGNS and aggressive[1] == {
            str(each) for each in (SIGNS, BlockQuant(bits=4), BlockQuant(), EXACT)
        }
        assert aggressive[2] == {str(BlockQuant()), str(EXACT)}
        assert safe[0] == BlockQuant(bits=4) and str(SIGNS) not in safe[1]
        assert plain[0] == EXACT and len(plain[1]) == 4
    assert [each[3] for each in ranks[0]] == [each[3] for each in ranks[1]]
