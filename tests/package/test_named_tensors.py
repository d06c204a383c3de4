"""Every new tensor of the package names its dtype and its device.

Otherwise it takes those that the process has set for its model (``torch.set_default_dtype``, ``torch.device`` as a
context), and memory whose address is given to C would have another size, or be elsewhere.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
import torch
from test_arrows import LINKED, modules
from torch.utils._device import _device_constructors

KINDS = {"dtype", "device"}
LAYERS = [each for each in vars(torch.nn).values() if isinstance(each, type) and issubclass(each, torch.nn.Module)]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()} | {
    layer.__name__ for layer in LAYERS if set(inspect.signature(layer).parameters) >= KINDS
}
"""The functions and the layers of torch that take what is not named from the process."""


def unnamed(text: str) -> Iterator[str]:
    """The calls in a program that make a tensor and leave dtype or device to the process."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            named = {keyword.arg for keyword in node.keywords}
            if owner in ("torch", "torch.nn") and name in CONSTRUCTORS and not named >= KINDS:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.nn"):
            yield from (f"from {node.module} import {alias.name}" for alias in node.names if alias.name in CONSTRUCTORS)


def test_all_tensors_name_their_type_and_place():
    wrong = [(name, call) for name, path in modules("gckernels", *LINKED) for call in unnamed(path.read_text())]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "torch.empty(3)",
        "torch.zeros(3, dtype=torch.float32)",
        "torch.arange(3, device=device)",
        "torch.nn.Linear(3, 3)",
        "from torch import full",
    ],
)
def test_a_tensor_that_does_not_is_found(text):
    assert list(unnamed(text))


def test_others_are_not():
    text = "torch.empty(3, dtype=dtype, device=device); torch.empty_like(x); x.new_zeros(3); torch.frombuffer(x)"
    assert list(unnamed(text)) == []
