"""Errors and warnings are also of help to users who have only installed the package."""

from __future__ import annotations

import ast
from pathlib import Path

import gckernels
from gckernels import patches, planner, sync

FOLDERS = [Path(module.__file__).resolve().parent for module in (gckernels, sync, patches, planner)]


def _texts(tree: ast.AST) -> list[str]:
    """All strings in a file except docstrings, which stand alone."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_message_refers_to_files_that_are_not_installed():
    files = [file for folder in FOLDERS for file in folder.rglob("*.py")]
    assert len(files) > 50
    found = [(file.name, text) for file in files for text in _texts(ast.parse(file.read_text())) if "docs/" in text]
    assert not found
