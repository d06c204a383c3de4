"""Tests of the helper that runs ranks: its reports, and that it leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import run_ranks, values_of

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import test_ranks
print(*(worker for worker in test_ranks.values_of(test_ranks.run_ranks(2, test_ranks.process))), flush=True)
test_ranks.run_ranks(2, test_ranks.stuck)
"""


def process() -> int:
    return os.getpid()


def reports() -> tuple[int, int, float, int]:
    total = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.sum().item(), torch.get_num_threads()


def stuck() -> None:
    time.sleep(1000)


def ends_in_its_own_way() -> int:
    match dist.get_rank():
        case 0:
            os._exit(5)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            raise LookupError("not here")
    return os.getpid()


def starts_another() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def dies_later() -> int:
    print("the last words", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return os.getpid()


def gone(pid: int) -> bool:
    """Whether the process and all its threads end within a generous time.

    A process that nobody waits for stays a zombie, and its files are open until its last thread has ended.
    """
    for _ in range(600):
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text() and len(os.listdir(f"/proc/{pid}/task")) == 1:
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers(world_size):
    expected = 3.0 * world_size * (world_size + 1) / 2
    assert values_of(run_ranks(world_size, reports)) == [(rank, world_size, expected, 1) for rank in range(world_size)]


def test_processes_are_used_again_unless_fresh_ones_are_wanted():
    first = values_of(run_ranks(2, process))
    assert set(values_of(run_ranks(2, process))) == set(first)
    outcomes = run_ranks(2, process, fresh=True)
    assert not set(first) & set(values_of(outcomes))
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert all(gone(pid) for pid in values_of(outcomes))


def test_outcomes_report_how_a_rank_ended():
    exited, killed, raised, returned = run_ranks(4, ends_in_its_own_way, fresh=True)
    assert (exited.error_type, exited.exit_code) == ("ProcessDied", 5)
    assert (killed.error_type, killed.exit_code) == ("ProcessDied", -signal.SIGKILL)
    assert (raised.error_type, raised.error_text, raised.exit_code) == ("LookupError", "not here", 0)
    assert "ends_in_its_own_way" in raised.output
    assert returned.error_type is None and returned.exit_code == 0
    with pytest.raises(AssertionError, match="rank 2: LookupError"):
        values_of([exited, killed, raised, returned])


def test_a_process_that_dies_after_its_answer_is_blamed_on_the_call_before():
    (pid,) = values_of(run_ranks(1, dies_later))
    assert gone(pid)
    with pytest.raises(AssertionError, match=r"died after dies_later\n(.|\n)*the last words"):
        run_ranks(1, process)
    values_of(run_ranks(1, process))  # once only


def test_a_rank_that_does_not_end_is_killed():
    outcomes = run_ranks(2, stuck, timeout_s=0.2)
    assert [outcome.error_type for outcome in outcomes] == ["StillRunning"] * 2
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2


def test_processes_that_a_rank_has_started_end_with_it():
    outcomes = run_ranks(1, starts_another, fresh=True)
    assert gone(values_of(outcomes)[0])


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    started: list[int] = []

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Noted(ranks._Worker):
        def __init__(self) -> None:
            super().__init__()
            started.append(self._pid)

    monkeypatch.setattr(ranks, "_Worker", Noted)
    monkeypatch.setattr(ranks, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, stuck, fresh=True)
    assert len(started) == 2 and all(gone(pid) for pid in started)


@pytest.mark.slow
def test_when_the_tests_are_killed_the_ranks_end():
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    tests = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert tests.stdout is not None
        pids = [int(word) for word in tests.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        tests.kill()
        tests.wait()
        tests.stdout.close()
    assert all(gone(pid) for pid in pids)


def own_pid(fails: bool) -> int:
    if fails and dist.get_rank() == 1:
        raise LookupError("on purpose")
    return os.getpid()


def test_nobody_who_has_seen_a_failure_goes_back_to_the_pool():
    """The threads of Gloo may spin there for ever, because the peers of their connections are gone."""
    survivor, failed = run_ranks(2, own_pid, True)
    assert (survivor.error_type, failed.error_type) == (None, "LookupError")
    assert survivor.value not in values_of(run_ranks(4, own_pid, False))
