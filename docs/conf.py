"""Configuration of the documentation. ``make docs`` builds it; every warning is an error."""

from __future__ import annotations

import os
from typing import Any

# Under Triton's interpreter a kernel is an object that keeps the docstring and the signature of its function.
os.environ.setdefault("TRITON_INTERPRET", "1")

from sphinx.application import Sphinx

import gckernels

project = "gckernels"
author = "The gckernels authors"
copyright = author
version = release = gckernels.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings, `page.md#heading`, are checked

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
doctest_global_setup = "import torch, gckernels; from gckernels import sync"

# Every name that a docstring or a signature refers to must be documented here or listed in an inventory. Exceptions are
# internal classes in the signatures of public functions, and type variables.
nitpicky = True
nitpick_ignore_regex = [
    # imported for type checkers only
    ("py:class", r"(AccuracyLike|Checkpoint|Every|Outer|StorageReader|Profile|dist\.ProcessGroup)"),
    ("py:class", r"gckernels\.(sync\.)?[a-z_]+\..*"),
    ("py:class", r"tuple\[~gckernels\..*"),  # the alias of programs, written out
    ("py:class", r"numpy\..*"),  # arrays, which only the planner has
    ("py:class", r"torch\._C\..*"),
    ("py:class", r"torch\.(nn\.modules|optim\.optimizer)\..*"),  # documented by torch under shorter names
    ("py:(class|exc)", r"triton\..*"),  # no page of Triton's has them
    ("py:(class|obj)", r".*\.[A-Z]"),
    ("py:obj", r"typing\.Annotated\[.*"),  # a number with its form in JSON
]

# The inventories are committed, in the first version of Sphinx's format, which is text, and hold the names that are
# used. So the build needs no network, and `make docs-links` checks the pages that they name.
intersphinx_mapping = {
    name: (address, f"inventories/{name}.inv")
    for name, address in {
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
        "triton": "https://triton-lang.org/main/",
    }.items()
}

copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"gckernels {release}"

linkcheck_anchors = False  # pages that are made by scripts have none when they are read
linkcheck_timeout = 20


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _keep_first_line, priority=100)


def _keep_first_line(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put an empty comment before an attribute's docstring: napoleon takes what precedes a colon in its first line for
    a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]
