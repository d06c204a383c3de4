"""Prose and names: the constructions that CONTRIBUTING bans do not occur in docstrings, comments, strings and names."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import cases
from pages import PAGES

ROOT = Path(__file__).parents[2]
FOLDERS = ("gckernels", "sync", "patches", "planner", "bench", "tests", "examples", "harness")

OPENING = re.compile(r"(?:\A|[.!?]\s+|\n\s*\n\s*(?:- )?|\n\s*- )(What|Of|Those|That|And)\b")
GENITIVE = re.compile(r"^ +\w+(?:, \w+)*: (of|that|those|and)\b", re.MULTILINE)
COMMENT = re.compile(r"# (what|of|those|that|and)\b", re.IGNORECASE)
WORD = re.compile(r"\b(mend|mends|mended|reckon\w*|so many|belongs? into|(?:make|makes|made) good for|told by)\b")
FIRST = re.compile(r"\b(tells?|as many as|the ones? that|that of)\b")
"""Banned in the first sentence of a docstring."""
SUBJECT = re.compile(r"(?:\A|[:;.] )(it (?:is|was|has|had|does|did|can|cannot|could|must|needs|would|will))\b")
"""A clause of an error text whose subject is a pronoun: the error has to name the thing."""
MARKUP = re.compile(r":\w+:`[^`]*`|``[^`]*``")
MOST_WORDS = 32
"""The largest number of words in the first sentence of a docstring."""
NAME = re.compile(r"_*(?:most_(?!common$).*|said|said_twice|told|came|come|spoilt|adds|way)", re.IGNORECASE)


def faults(path: Path) -> Iterator[str]:
    """Every banned construction in a file, as ``line: text``."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = inspect.cleandoc(node.value.value)
            yield from (f"{node.lineno}: {found.group(1)} ..." for found in OPENING.finditer(text))
            yield from (f"{node.lineno}: {found.group().strip()} ..." for found in GENITIVE.finditer(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            first = MARKUP.sub("x", re.split(r"(?<=[.!?])\s|\n\n", text)[0])
            yield from (f"{node.body[0].lineno}: {found.group()}" for found in FIRST.finditer(first))
            if len(first.split()) > MOST_WORDS:
                yield f"{node.body[0].lineno}: a first sentence of {len(first.split())} words"
        if isinstance(node, ast.Raise) and node.exc is not None:
            constants = (each for each in ast.walk(node.exc) if isinstance(each, ast.Constant))
            texts = ((each.lineno, each.value) for each in constants if isinstance(each.value, str))
            yield from (f"{line}: {found.group(1)}" for line, text in texts for found in SUBJECT.finditer(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {found.group()}" for found in WORD.finditer(node.value))
        for name in (getattr(node, field, None) for field in ("id", "arg", "attr", "name")):
            if isinstance(name, str) and NAME.fullmatch(name):
                yield f"{getattr(node, 'lineno', 1)}: {name}"
    if not COMMENT.search(source) and not WORD.search(source):
        return  # finding the comments takes as long as all the rest
    previous = 0
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                alone = token.line.lstrip().startswith("#")
                if COMMENT.match(token.string) and not (alone and previous == token.start[0] - 1):
                    yield f"{token.start[0]}: {token.string}"
                yield from (f"{token.start[0]}: {found.group()}" for found in WORD.finditer(token.string))
                previous = token.start[0] if alone else 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_is_plain(folder):
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / folder).rglob("*.py"))}
    linked = tuple(f"gckernels/{each}" for each in ("sync", "patches", "planner"))
    left_out = (*linked, "tests/package/test_prose.py")
    checked = {name: path for name, path in files.items() if not name.startswith(left_out)}
    found = [f"{name}:{fault}" for name, path in checked.items() for fault in faults(path)]
    assert not found, "\n" + "\n".join(found)


DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@cases("path", [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS])
def test_documents_are_plain(path):
    """They may ask a question, as in "Which compressor?", and begin a sentence with "That"."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\(.*?\)", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [*WORD.findall(text), *re.findall(r"(?:[.!?]\s+|\n\n|- )((?:What|Of|Those)\b.*)", text)] == []


def test_every_construction_is_found(tmp_path):
    path = tmp_path / "module.py"
    long = f'def f():\n    """It tells {"very " * 32}much."""\n'
    long += 'def g():\n    """The size, or that of x."""\n    raise ValueError(f"size: it is {x}; it must be y")\n'
    path.write_text(
        '"""What it is. Of a rank.\n\nArgs:\n    rank: of this process.\n"""\n'
        "most_nbytes = 1  # of a bucket\nraise ValueError(f'told by {most_nbytes}')  # mends it\n" + long
    )
    assert sorted(faults(path)) == [
        "11: that of",
        "12: it is",
        "12: it must",
        "1: Of ...",
        "1: What ...",
        "1: rank: of ...",
        "6: # of a bucket",
        "6: most_nbytes",
        "7: mends",
        "7: most_nbytes",
        "7: told by",
        "9: a first sentence of 35 words",
        "9: tells",
    ]
