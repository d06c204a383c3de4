"""Ends of recordings: by errors, by close(), by wrong arguments; the model stays usable and is not kept alive."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from gckernels import sync
from models import MODELS, SMALL_BUCKETS, Branches, Halves, build
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
        sync.record(model, steps=4, warmup=1, compressors=[]) as recording,
    ):
        for number in range(6):
            step(twin, number)
            if number == 4 and kind == "forward":
                model({})
            if number == 4 and kind == "backward":
                handle = module.layers[0].weight.register_hook(lambda gradient: 1 / 0)
                try:
                    step(model, number)
                finally:
                    handle.remove()
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
    recording = sync.record(model, steps=3, warmup=0, compressors=[])
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
    assert values_of(run_ranks(2, closed_between_forward_and_backward)) == [(2, False)] * 2


def in_parts():
    """The error of a recording of steps with two backwards each, and digests of gradients, averaged by hand as well."""
    torch.manual_seed(0)
    model, rank = DistributedDataParallel(Halves()), dist.get_rank()
    recording = sync.record(model, steps=2, warmup=2, compressors=[])
    message, pairs = "", []
    for step in range(6):
        batch = torch.full((2, 5), 1.0 + rank + step)
        model.zero_grad()
        try:
            losses = model(batch)
        except RuntimeError as error:
            message, losses = str(error), model(batch)
        for loss in losses.values():
            loss.backward()
        mean = torch.full((2, 5), 1.5 + step).sum(0)
        pairs += [torch.equal(row, mean) for part in model.module.parts for row in part.weight.grad]
    return message, recording.done, all(pairs)


def test_steps_with_several_backwards_are_refused_and_averaged():
    for message, done, are_averaged in values_of(run_ranks(2, in_parts)):
        assert "several backwards" in message and not done and are_averaged


def refused():
    model = DistributedDataParallel(build("Mlp"))
    messages = []

    def attempt(*arguments, **keywords):
        try:
            sync.record(*arguments, **keywords).close()
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
    with sync.record(model):
        attempt(model)
    attachment = sync.attach(model, "BlockQuant")
    attempt(model)
    attachment.close()
    return messages


def test_wrong_arguments_are_refused():
    for messages in values_of(run_ranks(2, refused)):
        expected = ("steps must", "warmup must", "compressors must", "Nothing", "name must", "torch.nn.Module")
        expected += ("a parameter", "do not have the same settings", "recorded already", "communication hook")
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected, strict=True):
            assert message.startswith("record:") and part in message


def test_the_trace_is_not_there_before_the_end():
    recording = sync.record(build("Mlp"), 2)
    assert not recording.done
    with pytest.raises(RuntimeError, match="0 of 2 steps are recorded; train on"):
        _ = recording.trace
    recording.close()


def test_an_abandoned_recording_does_not_keep_the_model():
    model, before = build("Mlp"), len(optimizers._global_optimizer_post_hooks)
    recording = sync.record(model, 2, warmup=0)
    model(MODELS["Mlp"].batch(0, 0)).backward()
    gone = weakref.ref(model)
    del model, recording
    gc.collect()
    assert gone() is None and len(optimizers._global_optimizer_post_hooks) == before
