"""Compressors are values: frozen, hashable, convertible to JSON and back, and named on a command line."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from configurations import for_each

import gckernels
from cases import cases
from gckernels import CODECS

NAMES = pytest.mark.parametrize("name", sorted(CODECS))


@for_each()
def test_survives_json(compressor):
    record = json.loads(json.dumps(compressor.to_json()))
    assert gckernels.from_json(record) == compressor
    assert record["name"] == compressor.name
    assert set(record) == {"name"} | {field.name for field in dataclasses.fields(compressor)}


@for_each()
def test_survives_a_spec(compressor):
    record = compressor.to_json()
    fields = ", ".join(f"{key}={value!r}" for key, value in record.items() if key != "name")
    assert gckernels.from_spec(f"{record['name']}({fields})") == compressor
    assert gckernels.from_spec(f"  {record['name']}( {fields} ) ") == compressor


@for_each()
def test_is_a_frozen_value(compressor):
    twin = dataclasses.replace(compressor)
    assert twin == compressor
    assert hash(twin) == hash(compressor)
    assert {compressor: 1}[twin] == 1
    assert pickle.loads(pickle.dumps(compressor)) == compressor  # from our own processes, never from a file
    with pytest.raises(dataclasses.FrozenInstanceError):
        compressor.anything = 1


@NAMES
def test_default_configuration(name):
    """A bare name gives the default configuration, which equals the class without arguments."""
    assert gckernels.from_spec(name) == gckernels.from_json({"name": name}) == CODECS[name]()


@NAMES
@cases("field", ["no_such_field", "name_", ""])
def test_unknown_field(name, field):
    with pytest.raises(ValueError, match=f"{name}.*{field}"):
        gckernels.from_json({"name": name, field: 1})


@NAMES
@cases("value", [-1, 3, 4.0, "four", [4], {"bits": 4}, 10**30, True, float("nan")])
def test_refused_values_name_the_field(name, value):
    """Values of the wrong kind are refused when the compressor is made, not at its first use."""
    for field in dataclasses.fields(CODECS[name]):
        right = type(value) is type(field.default) or (value == 4.0 and "float" in str(field.type))
        if not right or value != value:
            with pytest.raises(ValueError, match=field.name):
                gckernels.from_json({"name": name, field.name: value})


@pytest.mark.parametrize("name", ["NoSuchCompressor", "", "efsignsgd", None, 3, ["EFSignSGD"], {"a": 1}], ids=repr)
def test_unknown_name(name):
    with pytest.raises(ValueError, match="name"):
        gckernels.from_json({"name": name})


@pytest.mark.parametrize("record", [None, 3, "EFSignSGD", [], {}, {"bits": 4}], ids=repr)
def test_record_without_a_name(record):
    with pytest.raises(ValueError, match="'name'"):
        gckernels.from_json(record)


@cases(
    "spec",
    [
        "",
        "NoSuchCompressor",
        "BlockQuant(",
        "BlockQuant(4)",
        "BlockQuant(bits=4",
        "BlockQuant(bits=3)",
        "BlockQuant(bits=4, bits=8)",
        "BlockQuant(bits=2 + 2)",
        "BlockQuant(bits=x)",
        "BlockQuant(**{'bits': 4})",
        "BlockQuant(bits=__import__('os').getpid())",
        "gckernels.BlockQuant()",
        "BlockQuant()()",
        "BlockQuant; EFSignSGD",
        "lambda: 0",
        "\0",
        "(" * 300,
        "BlockQuant(bits=" + "(" * 300,
        "BlockQuant(bits=" + "-" * 5000 + "1)",
        "BlockQuant(bits=" + "-" * 100_000 + "1)",
        "BlockQuant(bits=" + "[" * 150 + "]" * 150 + ")",
        "BlockQuant(bits=" + "8" * 5000 + ")",
        "TopK(ratio={[]: 1})",
        "TopK(ratio={1: {2: 3}, **4})",
        "BlockQuant(name='TopK')",
        "BlockQuant(bits=bf16)",
        "Cast16(dtype=int7)",
        "Cast16(dtype=os.float16)",
        "Cast16(dtype=torch.Tensor)",
    ],
)
def test_bad_spec(spec):
    """Nothing is evaluated, and every fault is a ValueError."""
    with pytest.raises(ValueError):
        gckernels.from_spec(spec)


@pytest.mark.parametrize("spec", [None, 3, b"EFSignSGD", gckernels.EFSignSGD(), ["EFSignSGD"]], ids=repr)
def test_a_spec_is_text(spec):
    with pytest.raises(TypeError, match="a spec must be a string"):
        gckernels.from_spec(spec)


@pytest.mark.parametrize("field", ["levels", "name", "more"])
def test_a_record_has_few_levels(field):
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="levels of nested lists and objects"):
        gckernels.from_json({"name": "QSGD", field: value})


@pytest.mark.parametrize("name", ["fp16", "FP16", "float16", "half", "torch.float16", torch.float16])
def test_a_dtype_goes_by_its_name(name):
    want = gckernels.Cast16(torch.float16)
    assert gckernels.Cast16(dtype=name) == gckernels.from_json({"name": "Cast16", "dtype": name}) == want
    assert hash(gckernels.Cast16(dtype=name)) == hash(want)
    assert gckernels.from_spec(f"Cast16(dtype={str(name)!r})") == gckernels.from_spec(f"Cast16(dtype={name})") == want
    grad = torch.randn(50)
    assert torch.equal(gckernels.encode(gckernels.Cast16(name), grad), gckernels.encode(want, grad))
    scales = {"fp16": "bf16", torch.float16: torch.bfloat16}.get(name, "bfloat16")
    assert gckernels.BlockQuant(scale_dtype=scales) == gckernels.BlockQuant(scale_dtype=torch.bfloat16)


@for_each()
def test_what_a_compressor_prints_is_a_spec(compressor):
    assert gckernels.from_spec(str(compressor)) == compressor


def test_bad_dtype_is_named():
    with pytest.raises(ValueError, match="scale_dtype"):
        gckernels.from_json({"name": "BlockQuant", "scale_dtype": "float16"})
    with pytest.raises(ValueError, match="dtype"):
        gckernels.from_json({"name": "BlockQuant", "scale_dtype": "nonsense"})
