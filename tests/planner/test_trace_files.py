"""Traces in files: what is written is read again, and everything that is damaged is refused with an explanation."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace

import pytest
import torch

from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.trace_files import trace_names
from gckernels.sync.traces.traced_tensors import Role, TracedTensor, TraceError

TRACE = ModelTrace(
    model="ünder test",
    tensors=(
        TracedTensor("out.weight", 12, 0.25, (3, 4), torch.float32, Role.OUTPUT, 1.5, {"BlockQuant(bits=4)": 0.125}),
        TracedTensor("out.bias", 3, 0.25, (3,), torch.float32, Role.VECTOR, 0.0),
        TracedTensor("scalar", 1, 0.5, (), torch.float64, Role.VECTOR),
        TracedTensor("half", 7, 0.75, (7,), torch.bfloat16, Role.VECTOR),
        TracedTensor("unknown", 5, 1 / 3 + 0.5),
    ),
    backward_s=1.0,
    forward_s=0.1,
    optimizer_s=0.01,
    buckets=(("out.bias", "out.weight"), ("scalar",), ("half",), ("unknown",)),
    source="a test",
)
PUBLISHED = {
    "model": "small",
    "source": "a paper",
    "batch_per_gpu": "32 images",
    "order": "backward",
    "more": [1],
    "tensors": [
        {"name": "fc.bias", "numel": 10, "ready_us": 0, "more": None},
        {"name": "fc.weight", "numel": 640, "ready_us": 7},
        {"name": "down.1.weight", "numel": 64, "ready_us": 9.5},
        {"name": "down.1.bias", "numel": 64, "ready_us": 9.5},
        {"name": "conv.weight", "numel": 999, "ready_us": 1e3},
        {"name": "word_embeddings.weight", "numel": 7680, "ready_us": 2000},
    ],
}


def test_what_is_written_is_read_again(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    assert ModelTrace.load(tmp_path / "trace.json") == TRACE == ModelTrace.load(str(tmp_path / "trace.json"))
    assert os.listdir(tmp_path) == ["trace.json"]
    record = json.loads((tmp_path / "trace.json").read_text())
    assert record["sha256"] == TRACE.fingerprint() != replace(TRACE, backward_s=1.5).fingerprint()


def test_published_traces_have_roles():
    trace = ModelTrace.from_text(json.dumps(PUBLISHED), "small")
    assert [tensor.role for tensor in trace.tensors] == [
        *(Role.VECTOR, Role.OUTPUT, Role.VECTOR, Role.VECTOR, Role.WEIGHT, Role.EMBEDDING)
    ]
    assert [tensor.ready_s for tensor in trace.tensors] == [0, 7e-6, 9.5e-6, 9.5e-6, 1e-3, 2e-3]
    assert trace.backward_s == 2e-3 and "a paper" in trace.source and "32 images" in trace.source
    assert ModelTrace.from_text(trace.to_text(), "again") == trace


def test_a_published_trace_may_have_the_rest_of_the_step():
    assert not ModelTrace.from_text(json.dumps(PUBLISHED), "small").is_whole_step
    trace = ModelTrace.from_text(json.dumps(PUBLISHED | {"rest_us": 5000}), "small")
    assert trace.is_whole_step and (trace.forward_s, trace.backward_s) == (5e-3, 2e-3)
    for wrong in (-1, "5"):
        with pytest.raises(TraceError, match="rest_us must be a finite number from 0 up"):
            ModelTrace.from_text(json.dumps(PUBLISHED | {"rest_us": wrong}), "small")


def test_a_model_with_tied_embeddings_has_no_output_of_its_own():
    tensors = [
        {"name": "ln_f.weight", "numel": 64, "ready_us": 0},
        {"name": "ln_f.bias", "numel": 64, "ready_us": 0},
        {"name": "h.mlp.weight", "numel": 640, "ready_us": 1},
        {"name": "wte.weight", "numel": 6400, "ready_us": 2},
    ]
    trace = ModelTrace.from_text(json.dumps(PUBLISHED | {"tensors": tensors}), "small")
    assert [tensor.role for tensor in trace.tensors] == [Role.VECTOR, Role.VECTOR, Role.WEIGHT, Role.EMBEDDING]


def test_every_shipped_trace_is_read():
    traces = {name: ModelTrace.load(name) for name in trace_names()}
    assert all(trace.tensors for trace in traces.values())
    assert [name for name, trace in traces.items() if not trace.is_whole_step] == ["resnet50"]


def changed(*path, **changes):
    """The record of the trace with some values changed in the object at a path; a value of ``...`` removes the key."""
    record = json.loads(TRACE.to_text())
    inside = record
    for key in path:
        inside = inside[key]
    for key, value in changes.items():
        if value is ...:
            del inside[key]
        else:
            inside[key] = value
    return json.dumps(record)


FIRST = ("tensors", 0)
WRONG = {
    "version": (changed(version=2), "of version 1, got version 2, a newer release"),
    "format": (changed(format="other"), "whose format is 'gckernels trace'"),
    "missing": (changed(backward_s=...), "none with backward_s"),
    "unknown": (changed(speed=1), "no other keys .* got one with 'speed'"),
    "type": (changed(*FIRST, numel="12"), r"tensors\[0\].numel must be an integer .* got '12'"),
    "boolean": (changed(*FIRST, numel=True), r"tensors\[0\].numel must be an integer .* got True"),
    "negative": (changed(*FIRST, ready_s=-1), r"tensors\[0\].ready_s must be a finite number from 0 up, got -1"),
    "nan": (changed(*FIRST, ready_s=float("nan")), "NaN is no number in JSON"),
    "infinite": (changed().replace("0.25", "1e999", 1), "finite number from 0 up, got inf"),
    "huge": (changed().replace("0.25", "1" + "0" * 400, 1), "got an integer of 1329 bits"),
    "unsorted": (changed(*FIRST, ready_s=0.75), r"tensors\[1\] must be ready after 'out.weight'"),
    "duplicate": (changed(*FIRST, name="scalar", shape=None), r"tensors\[2\] .* the name 'scalar' again"),
    "twice": (changed().replace('"model"', '"source": "", "model"', 1), "key 'source' occurs twice"),
    "surrogate": (changed(*FIRST, name="\ud800"), r"tensors\[0\].name must be a text"),
    "shape": (changed(*FIRST, shape=[3, 5]), r"of 12 elements in all, got \[3, 5\]"),
    "dtype": (changed(*FIRST, dtype="int8"), "one of float32, float64, bfloat16, float16, got 'int8'"),
    "role": (changed(*FIRST, role="head"), "one of weight, vector, embedding, output, got 'head'"),
    "errors": (changed(*FIRST, errors={"TopK": -1}), r"tensors\[0\].errors\['TopK'\] must be a finite number"),
    "early": (changed(backward_s=0.5), "backward_s must be at least the 0.8333"),
    "empty": (changed(tensors=[]), "a list of at least one tensor"),
    "buckets": (changed(buckets=[["scalar"]]), "the name of every tensor once"),
    "mixed bucket": (
        changed(buckets=[["out.weight", "out.bias"], ["scalar", "half"], ["unknown"]]),
        r"buckets\[1\] must be tensors of one dtype, as in DDP's buckets, got bfloat16 and float64",
    ),
    "edited": (changed(forward_s=0.2), "the hash of the rest of the file, or left out after an edit by hand"),
    "cut off": (changed()[:-40], "cut off, at line 1"),
    "deep": ('{"tensors": ' + "[" * 40 + "]" * 40 + "}", "more than 32 levels"),
    "very deep": ("[" * 100000, "no JSON that can be read"),
    "list": ("[1]", "must be an object with format"),
    "published": (json.dumps(PUBLISHED | {"source": 1}), "source must be a text, got 1"),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_the_error_names_file_entry_and_remedy(text, message):
    with pytest.raises(TraceError, match=rf"^here.json.*{message}.*; .*gckernels trace"):
        ModelTrace.from_text(text, "here.json")


def test_an_edited_file_without_a_hash_is_read():
    assert ModelTrace.from_text(changed(forward_s=0.2, sha256=...), "edited").forward_s == 0.2


def test_files_that_cannot_be_read_are_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe{}")
    for path in (binary, tmp_path, tmp_path / "missing", "no such name", "\0", None, 3):
        with pytest.raises(TraceError):
            ModelTrace.load(path)


def test_what_is_not_valid_is_not_written(tmp_path):
    nan = replace(TRACE.tensors[0], norm=float("nan"))
    wrong = (
        (replace(TRACE, backward_s=-1.0), "backward_s"),
        (replace(TRACE, tensors=(nan,), buckets=()), r"tensors\[0\].norm must be a finite number"),
        (replace(TRACE, tensors=()), "at least one"),
        (replace(TRACE, tensors=(None,)), "wrong types"),
    )
    for trace, message in wrong:
        with pytest.raises(TraceError, match=message):
            trace.save(tmp_path / "trace.json")
    with pytest.raises(TraceError, match="cannot be written"):
        TRACE.save(tmp_path / "missing" / "trace.json")
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------- fuzzing

VALUES = (None, True, -1, 0, 1.5, 2**70, "", "x", [], {}, [[]], {"a": 1}, float("inf"), float("nan"), "\ud800", 10**400)


def places(value, path=()):
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield from places(each, (*path, key))


def mutated(record, rng):
    """The record with one value replaced, removed or repeated."""
    record = json.loads(json.dumps(record))
    *path, last = rng.choice([each for each in places(record) if each])
    inside = record
    for key in path:
        inside = inside[key]
    match rng.randrange(4):
        case 0:
            del inside[last]
        case 1 if isinstance(inside, list):
            inside.append(inside[last])
        case _:
            inside[last] = rng.choice(VALUES)
    return record


def test_no_damage_raises_another_error():
    rng = random.Random(0)
    ours = json.loads(TRACE.to_text())
    del ours["sha256"]  # would find most of the damage before the checks do
    outcomes = {"read": 0, "refused": 0}
    for _ in range(1500):
        record = rng.choice((ours, PUBLISHED))
        text = json.dumps(mutated(mutated(record, rng), rng) if rng.random() < 0.5 else mutated(record, rng)).encode()
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text))]
        if rng.random() < 0.3 and text:
            place = rng.randrange(len(text))
            text = text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :]
        try:
            trace = ModelTrace.from_text(text, "fuzzed")
        except TraceError as error:
            assert str(error).startswith("fuzzed")
            outcomes["refused"] += 1
        else:
            assert ModelTrace.from_text(trace.to_text(), "again") == trace
            outcomes["read"] += 1
    assert min(outcomes.values()) > 50
