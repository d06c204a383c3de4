"""Docstring statements in the wrong form raise errors instead of being left out."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gckernels import EFSignSGD
from gckernels.testing.documented import docstring, examples, size_formula, sources, stated_nbytes

TEXT = docstring(EFSignSGD)


def documented(monkeypatch, text: str) -> type[EFSignSGD]:
    """A subclass of EFSignSGD in a module with the docstring ``text``."""
    module = ModuleType("documented_for_a_test", text)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return type("EFSignSGD", (EFSignSGD,), {"__module__": module.__name__})


def test_what_a_docstring_states():
    (example,) = examples(EFSignSGD)
    assert example.values == (3.0, -1.0, 0.0, -4.0) and example.residual == (1.0, 1.0, -2.0, -2.0)
    assert len(example.payload) == stated_nbytes(EFSignSGD(), 4) == 48
    assert sources(EFSignSGD) == [
        "Karimireddy et al., [arXiv:1901.09847](https://arxiv.org/abs/1901.09847)",
        "Vargaftik et al., [arXiv:2105.08339](https://arxiv.org/abs/2105.08339)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("decoded [", "decodes to [", "must end with 'decoded"),
        ("bytes  0..15  47", "byte 0..15  47", "must be 'bytes FIRST..LAST"),
        ("47 4B 43 31 00 .. 00", "47 4B 43 31", "must have 16 bytes"),
    ],
)
def test_an_example_of_another_form(monkeypatch, old, new, error):
    assert old in TEXT
    with pytest.raises(ValueError, match=error):
        examples(documented(monkeypatch, TEXT.replace(old, new)))


def test_a_size_is_that_of_the_base_class_unless_stated(monkeypatch):
    assert size_formula(documented(monkeypatch, "Nothing.")) == size_formula(EFSignSGD)
    assert size_formula(documented(monkeypatch, "Size in bytes: ``16 +\n  n``.")) == "16 + n"
