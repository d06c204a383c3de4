"""The command starts in two ways, finds its verbs, and refuses what is wrong in one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

import gckernels
from gckernels.planner import commands
from gckernels.planner.commands import dispatch
from gckernels.planner.commands.common.files import add_outputs
from gckernels.planner.commands.common.outcome import Exit, Outcome, Part, bad_data


@pytest.fixture
def verb(monkeypatch):
    """A function that adds the verb ``probe``, which runs another function."""

    def add(run):
        class Probe:
            @staticmethod
            def add_arguments(parser):
                add_outputs(parser, "nothing")

            @staticmethod
            def run(given: argparse.Namespace, console) -> Outcome:
                return run(given, console)

        monkeypatch.setattr(dispatch, "VERBS", {"probe": "try something"})
        monkeypatch.setattr(dispatch, "module_of", lambda name: Probe)

    return add


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gckernels {gckernels.__version__}\n"


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert dispatch.VERBS and all(f"\n  {name} " in shown for name in dispatch.VERBS)


@pytest.mark.parametrize("name", dispatch.VERBS)
def test_every_verb_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: gckernels {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "arguments are required: VERB; gckernels --help"),
        (["plann"], "invalid choice: 'plann'"),
        (["plan"], "gckernels plan: "),
        (["compressors", "--what"], "unrecognized arguments: --what"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, reason, capsys):
    assert commands.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert reason in printed.err and "--help lists the arguments" in printed.err


def test_the_exit_code_is_that_of_the_verb(verb, capsys):
    verb(lambda given, console: Outcome(code=Exit.DOES_NOT_PAY))
    assert commands.main(["probe"]) == 1


def test_an_error_names_what_to_do_next(verb, capsys):
    def run(given, console):
        raise bad_data("x.json: is\ndamaged.", "gckernels probe makes another one")

    verb(run)
    assert commands.main(["probe"]) == 3
    assert capsys.readouterr().err == "gckernels probe: x.json: is damaged; gckernels probe makes another one\n"


def test_a_bug_is_one_line_with_its_place(verb, capsys, monkeypatch):
    monkeypatch.delenv(dispatch.SHOWS_TRACEBACK, raising=False)
    verb(lambda given, console: {}["missing"])
    assert commands.main(["probe"]) == 4
    error = capsys.readouterr().err
    assert error.startswith("gckernels probe: this is a bug: KeyError: 'missing' (test_dispatch.py:")
    assert error.count("\n") == 1
    monkeypatch.setenv(dispatch.SHOWS_TRACEBACK, "1")
    with pytest.raises(KeyError):
        commands.main(["probe"])


def test_tables_or_json(verb, capsys):
    verb(lambda given, console: Outcome([Part("a table", {"a": 1})]))
    assert commands.main(["probe"]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert commands.main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    assert commands.main(["probe", "-o", "-"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "a table\n")


def test_files_are_written_before_their_notes(verb, capsys, tmp_path):
    verb(lambda given, console: Outcome([Part("a table")], files={given.output: "content"}, notes=["a note"]))
    path = tmp_path / "x.json"
    assert commands.main(["probe", "-o", str(path)]) == 0
    printed = capsys.readouterr()
    assert path.read_text() == "content" and printed.out == "a table\n"
    assert printed.err == f"gckernels probe: {path} is written\ngckernels probe: a note\n"
    assert commands.main(["probe"]) == 0  # no file is asked for
    assert capsys.readouterr().err == "gckernels probe: a note\n"


@pytest.mark.parametrize("fails", [True, False])
def test_other_ranks_print_and_write_nothing(verb, capsys, monkeypatch, tmp_path, fails):
    def run(given, console):
        console.note("a note")
        console.progress(0.5)
        if fails:
            raise bad_data("wrong")
        return Outcome([Part("a table")], {given.output: "content"}, ["another note"], Exit.BAD_DATA)

    verb(run)
    monkeypatch.setenv("RANK", "3")
    assert commands.main(["probe", "-o", str(tmp_path / "x.json")]) == 3
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "") and list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_first(verb, capsys, tmp_path):
    verb(lambda given, console: pytest.fail("it has run"))
    for path in (tmp_path, tmp_path / "missing" / "x.json"):
        assert commands.main(["probe", "-o", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"gckernels probe: {path}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_it_quietly():
    program = f"{sys.executable} -m gckernels compressors | head -1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=200)
    head, code = ran.stdout.splitlines()
    assert head.startswith("compressor ") and (code, ran.stderr) == ("0", "")


@pytest.mark.slow
def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "gckernels", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, f"gckernels {gckernels.__version__}\n"), ran.stderr
