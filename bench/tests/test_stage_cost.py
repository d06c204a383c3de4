"""The arms of the benchmark of the engine's cost do the same work."""

import pytest
import torch.distributed as dist

from bench.sync import stage_cost


@pytest.mark.parametrize("in_flight", stage_cost.IN_FLIGHT)
@pytest.mark.usefixtures("little_garbage")
def test_every_arm_runs_all_stages_of_all_messages(monkeypatch, in_flight):
    monkeypatch.setattr(stage_cost, "WARM_UP", 0)
    monkeypatch.setattr(stage_cost, "CALLS", 3)
    ran = []
    messages = stage_cost.empty_messages(5, in_flight, lambda: ran.append(None))
    rows = list(stage_cost.measured("empty", messages, rounds=2))
    assert len(ran) == 2 * len(rows) * 3 * in_flight * 5
    assert [row["arm"] for row in rows] == ["calls", "one thread", "a thread per stage", "engine"]


def test_real_messages_run_alone():
    dist.init_process_group("fake", rank=0, world_size=stage_cost.RANKS, store=dist.HashStore())
    try:
        for spec, program in stage_cost.REAL:
            (message,) = stage_cost.real_messages(spec, stage_cost.PROGRAMS[program], 1)
            for stage in message.stages:
                stage.work()
            assert message.sent_nbytes > 0
    finally:
        dist.destroy_process_group()
