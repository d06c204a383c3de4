"""Every order of work is needed: a test fails without it, on the simulated device or on the CPU.

:data:`FOUND_BY` names the test for each order of the synchronisation, and :data:`NO_ORDERS` says why a call is none. A
new call that is in neither of them fails here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.simulated_device import build
from orders import copy_without, orders, run_tests

RESULT = "frontends/module/test_bare_modules.py::test_the_gradients_of_the_hook[sim-2-Zoo-8]"
UNUSED = "frontends/test_unused.py::test_kept_gradients_of_unused_parameters_come_once[sim-2-False-names0]"
GATHERS = "frontends/sharded/test_gathers.py::test_all_ranks_compute_with_the_same_parameters[sim-Cast16-0.004]"
GATHERED_AHEAD = "frontends/sharded/test_gather_memory.py::test_a_root_that_is_gathered_ahead_keeps_its_parameters[sim]"
ROOTS = "frontends/sharded/test_sharded.py::test_layers_need_no_common_root[sim]"
BUFFERS = "frontends/updates/test_updates.py::test_exact_updates_of_a_plain_loop[sim]"
WINDOW = "tuning/test_monitor.py::test_a_window_is_the_median_of_the_steps_from_the_last_begin_of_all_ranks"

FOUND_BY = {
    "communication/links.py Transfer.wait: wait": (
        "messages/test_captured_steps.py::test_a_step_is_the_work_of_its_stages"
    ),
    "engine/failures.py wait_for: wait": RESULT,
    "engine/runtime.py Runtime._let_decay: here": (
        "frontends/test_decay.py::test_a_unit_forgets_the_rest_of_its_residual_in_each_step[sim-ddp]"
    ),
    "engine/runtime.py Runtime._new_future: future_on": RESULT,
    "engine/runtime.py Runtime._renew: here": "engine/test_skipped_steps.py::test_nothing_is_lost[sim-2-attach]",
    "engine/runtime.py Runtime.begin_step: here": (
        "frontends/test_streams_of_models.py::test_branches_on_streams[sim-None-QSGD-Identity]"
    ),
    "engine/runtime.py Runtime.submit: here": UNUSED,
    "engine/runtime.py Runtime.submit: set_result": (
        "attaching/test_parts_of_jobs.py::test_one_rank_is_as_without_a_hook[sim]"
    ),
    "engine/runtime.py Runtime.submit: set_result 2": RESULT,
    "engine/state.py RuntimeState.settle: synchronize": (
        "engine/test_discarded_steps.py::test_a_training_goes_on_as_if_those_steps_had_not_been[sim-attach-0]"
    ),
    "engine/step_copies.py _Renewal.run: used_here": "engine/test_skipped_steps.py::test_nothing_is_lost[sim-2-module]",
    "frontends/ddp/averages.py Averages._new_future: future_on": (
        "frontends/ddp/test_plain_again.py::test_a_closed_attachment_leaves_plain_ddp[sim-default]"
    ),
    "frontends/ddp/averages.py _finish: set_result 2": (
        "frontends/ddp/test_other_parameters.py::test_parameters_that_are_not_averaged_are_named[sim]"
    ),
    "frontends/sharded/announcements.py Announcements.check: wait": (
        "frontends/sharded/test_announcements.py::test_all_ranks_learn_which_parameter_some_do_not_use[signs]"
    ),
    "frontends/sharded/gathers.py GatherBuffer.lend: wait_stream": GATHERED_AHEAD,
    "frontends/sharded/gathers.py Gathers.gather: future_on": GATHERS,
    "frontends/sharded/gathers.py Gathers.gather: here": GATHERS,
    "frontends/sharded/gathers.py Gathers.gather: set_result 2": GATHERS,
    "frontends/sharded/shard_buffers.py ShardBuffer.rows: wait": ROOTS,
    "frontends/sharded/shard_buffers.py ShardBuffer.settle: event_behind": ROOTS,
    "frontends/updates/anchors.py Arrival.state_dict: wait": (
        "frontends/updates/test_fuzzed_updates.py::test_parameters_are_those_of_local_sgd_and_of_all_ranks[18]"
    ),
    "frontends/updates/anchors.py Arrival.wait: wait": BUFFERS,
    "frontends/updates/round_buffers.py BufferArrival.wait: wait": BUFFERS,
    "frontends/updates/step_scales.py StepScales.end_measuring: wait": (
        "frontends/updates/test_updates.py::test_kinds_of_training[sim]"
    ),
    "frontends/updates/updates_frontend.py UpdatesFrontend._arrive: wait": (
        "frontends/updates/test_updates.py::test_what_was_not_sent_is_in_residuals[sim-all]"
    ),
    "messages/collectives.py bind_collective.gather_and_concatenate.wait_and_concatenate: wait": (
        "programs/test_options.py::test_every_option_gives_the_mean_on_two_machines_of_two[specs0-dtype0-0-6]"
    ),
    "messages/exchanges.py send_around.wait: wait": (
        "messages/test_exchanges.py::test_exchanges_give_the_bytes_of_collectives[4]"
    ),
    "messages/seeds.py Seeds._follow: wait_stream": (
        "frontends/sharded/test_sharded.py::test_a_root_may_begin_a_step_behind_that_of_another_one[sim-hsdp]"
    ),
    "messages/exchanges.py wait_for: wait": (
        "messages/test_neighbours.py::test_units_do_not_notice_their_neighbours[sim-BlockQuant--0]"
    ),
    "resources/lane_kinds.py Lane._enqueue: event_behind": UNUSED,
    "resources/lane_kinds.py Lane._enqueue: wait_event": UNUSED,
    "resources/lane_kinds.py ThreadLane._do: synchronize": (
        "resources/test_places.py::test_a_training_with_steps_on_the_host[sim]"
    ),
    "resources/lanes.py DeviceLanes.close: synchronize": (
        "resources/test_lane_ends.py::test_close_finishes_what_a_device_has_to_do[sim]"
    ),
    "resources/lanes.py DeviceLanes.here: event_behind": UNUSED,
    "resources/residual.py Residual.change: used_here": (
        "frontends/sharded/test_sharded_states.py"
        "::test_a_resumed_training_goes_on_bit_for_bit[sim-hsdp-4-BlockQuant(bits=4)-8-False]"
    ),
    "resources/workers.py Token.join: wait": (
        "resources/test_lane_ends.py::test_close_does_not_wait_for_a_stuck_collective_after_a_failure"
    ),
    "tuning/watching/monitor.py Monitor._ask: event_behind": f"{WINDOW}[sim]",
    "tuning/watching/monitor.py Monitor._ask: wait": f"{WINDOW}[sim]",
    "tuning/watching/monitor.py Monitor._read: synchronize": f"{WINDOW}[sim]",
    "tuning/watching/monitor.py Monitor._read: wait": WINDOW,
}
"""For each order a test that fails without it."""

FAILURE = "a failure has no work behind which anything must be"
TIMES = "without it times are wrong, and no numbers"
THREAD = "a thread or a process of the host is awaited"
NO_ORDERS = {
    "communication/clocks.py StreamClock.seconds: synchronize": TIMES,
    "communication/clocks.py StreamClock.seconds: synchronize 2": TIMES,
    "communication/links.py _hang_up: wait": THREAD,
    "engine/failures.py failed_future: set_result": FAILURE,
    "engine/runtime.py Runtime.submit: set_result 3": FAILURE,
    "engine/timeline_recorder.py TimelineRecorder.record: synchronize": TIMES,
    "engine/timeline_recorder.py _DeviceClock.__init__: synchronize": TIMES,
    "frontends/ddp/averages.py _finish: set_result": FAILURE,
    "frontends/sharded/gathers.py Gathers.gather: set_result": "FSDP waits for its own event behind the copy",
    "frontends/sharded/gathers.py Gathers.gather: set_result 3": FAILURE,
    "frontends/sharded/shard_buffers.py ShardBuffer.filled: on_stream": (
        "the stream of FSDP is behind this one, and behind earlier results: messages would begin later"
    ),
    "frontends/updates/updates_frontend.py UpdatesFrontend.close: wait": "nobody uses what arrives",
    "frontends/updates/updates_state.py UpdatesState.settle: wait": (
        "it raises what has failed; those who read what arrives wait for it themselves"
    ),
    "integrations/torchft.py _Compressed.allreduce: wait": "needs torchft, whose tests are the host's",
    "lab/cluster.py Links.run: wait": THREAD,
    "resources/lane_kinds.py Lane._enqueue: on_stream": (
        "all work would be on the stream of the caller, in order, with nothing beside it"
    ),
    "resources/lane_kinds.py Lane.start: set_result": FAILURE,
    "resources/workers.py Token.wait: synchronize": TIMES,
    "tracing/shard_watch.py ComputingClock._settle: synchronize": TIMES,
    "tracing/shard_watch.py _finish: wait": TIMES,
}
"""For each other call the reason why it orders no work of a device, or why no number depends on it."""

FOUND = {order.key: order for order in orders()}


def test_every_order_has_a_test_or_a_reason():
    assert not FOUND_BY.keys() & NO_ORDERS.keys()
    assert FOUND_BY.keys() | NO_ORDERS.keys() == FOUND.keys()


TRIES = 10
"""On the CPU work that nothing waits for may be done in time by chance, once in three runs of one test."""


@pytest.mark.slow
@pytest.mark.skipif(build.reason_against() is not None, reason=str(build.reason_against()))
@pytest.mark.parametrize("key", FOUND_BY)
def test_a_test_fails_without_the_order(key: str, tmp_path: Path):
    copy_without(FOUND[key], tmp_path)
    for _ in range(TRIES):
        ended = run_tests(tmp_path, [f"tests/sync/{FOUND_BY[key]}"])
        if ended.returncode == 1:  # tests have run, and failed
            return
    raise AssertionError(ended.stdout[-4000:])
