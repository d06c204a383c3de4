"""``Constants`` holds compile-time arguments in one object, whose text is the key of the compiled kernel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import gckernels
from gckernels.toolkit.constants import Constants
from gckernels.toolkit.quantizer.launches import kernel_constants


def test_constants_are_equal_by_their_text_and_cannot_be_changed():
    constants = Constants(bits=2, tau=0.1)
    assert constants.tau == torch.tensor(0.1).item()  # rounded to fp32, in which all implementations compute
    assert repr(constants) == f"Constants(bits=2, tau={constants.tau!r})"
    assert constants == Constants(tau=0.1, bits=2)
    assert hash(constants) == hash(Constants(tau=0.1, bits=2))
    assert constants != Constants(bits=2, tau=0.2)
    with pytest.raises(AttributeError, match="cannot be changed"):
        constants.bits = 3
    assert constants.bits == 2


def functions(path: Path, text: str) -> Any:
    """A module with the source ``text``, written to ``path``."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HELPER = "import triton\n\n@triton.jit\ndef helper(x):\n    return x + {}\n"
CALLER = "\ndef quantize(x):\n    return helper(x) * 2\n"


def compiled(path: Path, added: int) -> JITFunction:
    """``quantize`` compiled by Triton even if the tests interpret kernels; it calls a helper that adds ``added``."""
    module = functions(path, HELPER.format(added) + CALLER)
    if not isinstance(module.helper, JITFunction):
        module.helper = JITFunction(module.helper.fn)
    return JITFunction(module.quantize)


def test_a_changed_function_changes_the_key(tmp_path):
    path = tmp_path / "module.py"
    before = Constants(quantize=compiled(path, 1), bits=2)
    same = Constants(quantize=compiled(path, 1), bits=2)
    assert repr(before) == repr(same)

    changed = Constants(quantize=compiled(path, 3), bits=2)  # a change in the helper that it calls
    assert repr(before) != repr(changed)
    assert before != changed


def test_other_functions_and_values_change_the_key(tmp_path):
    quantize = compiled(tmp_path / "module.py", 1)
    other = JITFunction(functions(tmp_path / "other.py", "def quantize(x):\n    return x\n").quantize)
    nested = Constants(tau=0.5)
    texts = {
        repr(each)
        for each in (
            Constants(quantize=quantize, C=nested),
            Constants(quantize=other, C=nested),
            Constants(dequantize=quantize, C=nested),
            Constants(quantize=quantize, C=Constants(tau=0.25)),
            Constants(quantize=quantize, C=nested, whole=True),
            Constants(quantize=quantize, C=nested, whole=False),
        )
    }
    assert len(texts) == 6


def test_kernels_of_different_configurations_have_different_keys():
    """This holds, too, where the tests interpret the kernels and functions are known by name alone."""
    quantizers = [gckernels.EFSignSGD(), gckernels.OneBit(), gckernels.SignSGD(), gckernels.QSGD(), gckernels.QSGD(4)]
    found = {repr(kernel_constants(quantizer, **flags)) for quantizer in quantizers for flags in FLAGS}
    assert len(found) == len(quantizers) * len(FLAGS)


FLAGS = ({}, {"has_residual": True}, {"merging": True}, {"partials_width": 128}, {"adds_to_out": True})
