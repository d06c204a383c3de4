"""Ends of recordings: by errors, by close(), by wrong arguments; the model stays usable and is not kept alive."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from gckernels import sync
from gckernels.sync.tracing.model_tracer import ModelTracer
from models import MODELS, SMALL_BUCKETS, Branches, build
from ranks import run_ranks, values_of
from workloads import digest_of


def trained_after_an_error(kind):
    """Train on, after an error inside of a recorded step has ended the recording; gradients stay averages."""
    module = build("Mlp")
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    twin = DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    rank, same = dist.get_rank(), []

    def step(each, number):
        each.zero_grad()
        each(Branches.batch(number, rank)).backward()

    with (
        pytest.raises((ZeroDivisionError, KeyError)),
        sync.trace_model(model, steps=4, warmup=1, compressors=[]) as recording,
    ):
        for number in range(6):
            step(twin, number)
            if number == 4 and kind == "forward":
                model({})
            if number == 4 and kind == "backward":
                loss = model(Branches.batch(number, rank))
                loss.register_hook(lambda gradient: 1 / 0)
                loss.backward()
            step(model, number)
            if number == 4 and kind == "between":
                raise KeyError
    assert not recording.done
    with pytest.raises(RuntimeError, match="of 4 steps are recorded; the recording is closed"):
        _ = recording.trace
    for number in range(7, 10):
        for each in (model, twin):
            step(each, number)
        same.append(digest_of(p.grad for p in model.parameters()) == digest_of(p.grad for p in twin.parameters()))
    return same


@pytest.mark.parametrize("kind", ["forward", "backward", "between"])
def test_an_error_inside_leaves_the_model_usable(kind):
    assert values_of(run_ranks(2, trained_after_an_error, kind)) == [[True] * 3] * 2


def closed_between_forward_and_backward():
    module = build("Mlp")
    model, twin = (DistributedDataParallel(each) for each in (module, copy.deepcopy(module)))
    recording = sync.trace_model(model, steps=3, warmup=0, compressors=[])
    for step in range(5):
        batch = Branches.batch(step, dist.get_rank())
        for each in (model, twin):
            each.zero_grad()
        loss = model(batch)
        if step == 3:
            recording.close()
        loss.backward()
        twin(batch).backward()
        gradients = [digest_of(p.grad for p in each.parameters()) for each in (model, twin)]
        assert gradients[0] == gradients[1], step
    return recording._recorder.steps, recording._recorder._watch() is not None


def test_a_backward_after_the_end_is_averaged():
    assert values_of(run_ranks(2, closed_between_forward_and_backward)) == [(1, False)] * 2


def different():
    """The error of a recording if a rank changes a gradient when it has been averaged, in the first recorded step."""
    model, ended = DistributedDataParallel(build("Mlp")), ModelTracer.end_step

    def end_step(recorder):
        if dist.get_rank() == 1 and recorder.steps == 0 and recorder._is_recorded:
            model.module.layers[2].weight.grad[0, 0] += 1e-3
        return ended(recorder)

    recording = sync.trace_model(model, steps=2, warmup=1, compressors=[])
    with mock.patch.object(ModelTracer, "end_step", end_step), pytest.raises(RuntimeError) as caught:
        for step in range(6):
            model.zero_grad()
            model(Branches.batch(step, dist.get_rank())).backward()
    assert not model._forward_hooks and not recording.done
    return step, str(caught.value)


def test_different_gradients_raise_on_all_ranks():
    for step, message in values_of(run_ranks(2, different)):
        assert step == 3 and "in step 3 since the recording began" in message
        assert "the averaged gradients of layers.2.weight are not the same on all ranks" in message


def refused():
    model = DistributedDataParallel(build("Mlp"))
    messages = []

    def attempt(*arguments, **keywords):
        try:
            sync.trace_model(*arguments, **keywords).close()
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(str(error))

    attempt(model, steps=0)
    attempt(model, warmup=-1)
    attempt(model, compressors="TopK")
    attempt(model, compressors=["Nothing"])
    attempt(model, name=3)
    attempt(3)
    attempt(nn.ReLU())
    attempt(model, steps=3 + dist.get_rank())
    with sync.trace_model(model):
        attempt(model)
        with pytest.raises((ValueError, RuntimeError), match="attach: model is being traced"):
            sync.attach(model, "BlockQuant")
    attachment = sync.attach(model, "BlockQuant")
    attempt(model)
    attachment.close()
    return messages


def test_wrong_arguments_are_refused():
    for messages in values_of(run_ranks(2, refused)):
        expected = ("steps must", "warmup must", "compressors must", "Nothing", "name must", "torch.nn.Module")
        expected += ("a parameter", "do not have the same settings", "traced already", "communication hook")
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected, strict=True):
            assert message.startswith("trace_model:") and part in message


def test_the_trace_is_not_there_before_the_end():
    recording = sync.trace_model(build("Mlp"), 2)
    assert not recording.done
    with pytest.raises(RuntimeError, match="0 of 2 steps are recorded; train on"):
        _ = recording.trace
    recording.close()


def test_an_abandoned_recording_does_not_keep_the_model():
    model, before = build("Mlp"), len(optimizers._global_optimizer_post_hooks)
    recording = sync.trace_model(model, 2, warmup=0)
    model(MODELS["Mlp"].batch(0, 0)).backward()
    gone = weakref.ref(model)
    del model, recording
    gc.collect()
    assert gone() is None and len(optimizers._global_optimizer_post_hooks) == before
