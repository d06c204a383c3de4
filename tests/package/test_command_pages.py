"""The pages about the command are true: command lines in them are valid, options are all there, the tutorial runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from docs import console
from gckernels.planner.commands import dispatch
from pages import PAGES, ROOT

REFERENCE = ROOT / "docs" / "reference"
TUTORIAL = (ROOT / "docs" / "howto" / "does_it_pay.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*gckernels .*)$", "\n".join(page.read_text("utf-8") for page in PAGES), re.MULTILINE)


def words_of(line):
    """The arguments of ``gckernels`` in a line of a shell."""
    words = shlex.split(line.partition(" #")[0], comments=False)
    return words[words.index("gckernels") + 1 :] if "gckernels" in words else []


@pytest.mark.parametrize("line", sorted({line for line in COMMANDS if words_of(line)[:1] != ["--version"]}))
def test_command_lines_are_valid(line):
    words = words_of(line)
    given = dispatch.parser_of(words[0]).parse_args(words)
    assert given.verb == words[0]
    if words[0] == "lab" and given.script == "gckernels":  # a verb on the links
        inner = given.arguments
        assert dispatch.parser_of(inner[0]).parse_args(inner).verb == inner[0]


@pytest.mark.parametrize("verb", dispatch.VERBS)
def test_every_verb_has_a_page_with_its_options(verb):
    page = (REFERENCE / "commands" / f"{verb}.md").read_text(encoding="utf-8")
    overview = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `gckernels {verb}`\n")
    assert f"](commands/{verb}.md)" in overview and f"\ncommands/{verb}\n" in overview
    subparsers = next(action for action in dispatch.parser_of(verb)._actions if action.dest == "verb")
    options = {option for action in subparsers.choices[verb]._actions for option in action.option_strings}
    general = {"-h", "--help", "-o", "--output"}
    assert {option for option in options - general if f"`{option}" not in page and f" {option}" not in page} == set()


@pytest.mark.parametrize("page", console.PAGES, ids=lambda page: page.stem)
def test_quoted_outputs_are_those_of_today(page):
    text = page.read_text(encoding="utf-8")
    assert "```text\n$ gckernels " in text
    assert console.page_with_outputs(page) == text, "run `make tables`"


def test_traces_by_hand_are_read(tmp_path, capsys):
    page = (REFERENCE / "commands" / "trace.md").read_text(encoding="utf-8")
    blocks, path = re.findall(r"^```json\n(.*?)^```$", page, re.S | re.M), tmp_path / "paper.json"
    assert len(blocks) == 2
    for block, attached in zip(blocks, ("a bare module", "a DDP model's buckets"), strict=True):
        path.write_text(block)
        assert dispatch.main(["plan", str(path), "two-sites-1gbit", "--policy", "all"]) in (0, 1)
        shown = capsys.readouterr().out
        assert f"For {attached}." in shown and "forward and optimizer 21.0 ms" in shown


def test_the_tutorial_has_ten_commands():
    steps = TUTORIAL.partition("## Predict: ten commands")[2].partition("\n## ")[0]
    assert re.findall(r"^\*\*(\d+)\. ", steps, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert len(re.findall(r"^\$ ", steps, re.MULTILINE)) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs(folder):
    """On the links lab; skipped where there are no network namespaces."""
    (folder / "train.py").write_text(re.search(r"^```python\n(.*?)^```$", TUTORIAL, re.S | re.M)[1])
    steps = TUTORIAL.partition("## Predict: ten commands")[2].partition("\n## ")[0]
    printed = {}
    for number, line in enumerate(re.findall(r"^\$ (.*)$", steps, re.MULTILINE), 1):
        command = [sys.executable, "-m", "gckernels", *words_of(line)]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        is_disturbed = "less than the error of the prediction" in ran.stdout or "no reliable price for" in ran.stderr
        if ran.returncode and is_disturbed:
            pytest.skip(f"other work on this machine has disturbed the profile: {ran.stderr}")
        assert ran.returncode == 0, (line, ran.stdout, ran.stderr)
        printed[number] = ran.stdout
    assert "none: " in printed[1] and "ms per step" in printed[1]
    assert "\nCompress with the plan of " in printed[4]
    assert "4.weight" in printed[6] and "cast16.json" in printed[8]
    assert " pays " in printed[9] and "plan.json: " in printed[10]
    assert (folder / "plans.json").exists()
