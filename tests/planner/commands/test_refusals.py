"""Files that are damaged, or of something else, are refused in one line, and nothing is written."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from command_files import run_text, write_small_plan, write_small_trace
from gckernels.sync import Plan

MACHINE = "two-sites-1gbit"
SHIPPED = Path(__file__).parents[3] / "planner" / "machines" / "shipped"


def also(*values):
    """Values with which only slow tests run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def files(tmp_path):
    """The paths of a trace, a machine and a plan that fit, by kind."""
    machine = shutil.copy(SHIPPED / f"{MACHINE}.json", tmp_path / "machine.json")
    plan = write_small_plan(tmp_path, MACHINE)
    return {"trace": write_small_trace(tmp_path), "machine": str(machine), "plan": plan}


def commands_with(files, kind):
    """The command lines that read a file of a kind, each with a file to write."""
    trace, machine, plan = files["trace"], files["machine"], files["plan"]
    out = str(Path(trace).with_name("out"))
    explain = ["explain", trace, machine, plan, "--messages", "0", "--perfetto", out]
    if kind == "plan":
        return [explain]
    quick = ["--policy", "all:Cast16", "-o", out]
    return [["plan", trace, machine, *quick], ["plan", trace, machine, *quick, "--sweep"], explain]


def check_refused(files, kind, capsys, codes):
    before = sorted(Path(files["trace"]).parent.iterdir())
    for arguments in commands_with(files, kind):
        code, shown, errors = run_text(capsys, *arguments)
        assert code in codes, (arguments, errors)
        assert shown == "" and errors.count("\n") == 1 and errors.startswith(f"gckernels {arguments[0]}: ")
        assert files[kind] in errors or Path(files[kind]).name in errors
        assert "gckernels " in errors.partition(": ")[2], errors  # a command to run next
        assert sorted(Path(files["trace"]).parent.iterdir()) == before


@pytest.mark.parametrize("kind", ["trace", "machine", "plan"])
def test_a_file_that_is_missing(files, kind, capsys):
    files[kind] += ".missing"
    check_refused(files, kind, capsys, {2})


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, *also(b"[]", b"null", b"{}", b"\xff\xfe", b'{"format": 1}', b"NaN")]
)
@pytest.mark.parametrize("kind", ["trace", "machine", "plan"])
def test_a_file_of_something_else(files, kind, content, capsys):
    Path(files[kind]).write_bytes(content)
    check_refused(files, kind, capsys, {3})


@pytest.mark.parametrize("kind", ["trace", "machine", "plan"])
def test_a_file_that_is_cut_off(files, kind, capsys):
    content = Path(files[kind]).read_bytes()
    for part in (0.3, 0.99):
        Path(files[kind]).write_bytes(content[: int(part * len(content))])
        check_refused(files, kind, capsys, {3})


@pytest.mark.parametrize(("kind", "other"), [("trace", "plan"), ("machine", "trace"), ("plan", "machine")])
def test_a_file_of_another_kind(files, kind, other, capsys):
    shutil.copy(files[other], files[kind])
    check_refused(files, kind, capsys, {3})


@pytest.mark.parametrize(
    ("arguments", "given", "expected", "code"),
    [
        (("plan", "espresso-pcie", "lstm"), "espresso-pcie: is a machine", "a trace is", 2),
        (("plan", "bert", "bert"), "bert: is a trace", "a machine is", 2),
        (("explain", "bert", MACHINE, "bert"), "bert: is a trace", "a plan is", 2),
        (("plan", "{plan}", "{machine}"), "plan.json: is a plan", "a trace is", 3),
        (("plan", "{trace}", "{trace}"), "small.trace.json: is a trace", "a machine is", 3),
        (("explain", "{plan}", "bert", MACHINE), "plan.json: is a plan", "a trace is", 3),
        (("explain", "bert", MACHINE, "{machine}"), "machine.json: is a machine", "a plan", 3),
    ],
)
def test_swapped_arguments_are_told_apart(files, capsys, arguments, given, expected, code):
    found, shown, errors = run_text(capsys, *(each.format(**files) for each in arguments))
    assert found == code and shown == "" and errors.count("\n") == 1
    assert f"{given}, and {expected}" in errors and "write gckernels plan TRACE MACHINE" in errors


def test_a_file_that_is_no_plan_is_told_so_with_one_command_to_run_next(files, capsys):
    Path(files["plan"]).write_text('{"a": 1}')
    (arguments,) = commands_with(files, "plan")
    code, _, errors = run_text(capsys, *arguments)
    assert code == 3 and errors.endswith(
        "got none with format, version; save it again with Plan.save, or make it again with gckernels plan\n"
    )
    assert errors.count("gckernels plan") == 1


@pytest.mark.parametrize("version", [99, *also(0, "1", None, 1.0)])
@pytest.mark.parametrize("kind", ["trace", "machine", "plan"])
def test_a_file_of_another_release(files, kind, version, capsys):
    path = Path(files[kind])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    check_refused(files, kind, capsys, {3})


def test_a_plan_of_another_model(files, capsys):
    plan = Plan.load(files["plan"])
    plan.with_units(plan.units[1:]).save(files["plan"])
    check_refused(files, "plan", capsys, {3})


def test_a_plan_for_ddp_is_refused_with_the_trace_of_another_model(files, capsys):
    """The other trace has no buckets either."""
    trace = write_small_trace(Path(files["trace"]).parent, buckets=True)
    made = run_text(capsys, "plan", trace, files["machine"], "--policy", "all", "-o", files["plan"])
    assert made[0] == 0
    explain = ("explain", "lstm", files["machine"], files["plan"])
    code, _, errors = run_text(capsys, *explain)
    assert code == 3 and errors.startswith(f"gckernels explain: {files['plan']}: ") and "not in the plan" in errors


def test_a_plan_for_another_topology(files, capsys):
    files["machine"] = "lab"
    (arguments,) = commands_with(files, "plan")
    code, _, errors = run_text(capsys, *arguments)
    assert code == 3 and "the plan is for 2 machines with 8 devices each, and lab has" in errors


def test_no_result_replaces_a_file_that_is_read_or_another_result(files, capsys):
    trace, machine, plan = files["trace"], files["machine"], files["plan"]
    folder = Path(trace).parent
    (folder / "link").symlink_to(trace)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    explain, twice = ["explain", trace, machine, plan], str(folder / "twice")
    for arguments, reason in (
        (["plan", trace, machine, "-o", trace], f"{trace}: would replace a file that is read; name another file"),
        (["plan", trace, machine, "-o", str(folder / "link"), "--sweep"], "would replace a file"),
        ([*explain, "--perfetto", plan], "would replace a file"),
        ([*explain, "--png", twice, "--perfetto", twice], f"{twice}: two results cannot be written to one file"),
        ([*explain, "--png", "-", "--perfetto", "-"], "two results"),
        (["trace", trace, "-o", trace], "would replace a file"),
    ):
        code, shown, errors = run_text(capsys, *arguments)
        assert code == 2 and reason in errors and shown == ""
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_only_one_file_can_be_stdin(files, capsys):
    code, _, errors = run_text(capsys, "plan", "-", "-")
    assert code == 2 and "only one input can be -" in errors


@pytest.mark.parametrize("kind", ["trace", "machine", "plan"])
@pytest.mark.parametrize("seed", [0, *also(1, 2, 3, 4)])
def test_random_damage_never_ends_in_a_traceback(files, kind, seed, capsys):
    """A damaged file may still be valid. Then there is a result; otherwise one line."""
    rng = random.Random(f"{kind}{seed}")
    path, good = Path(files[kind]), Path(files[kind]).read_bytes()
    for _ in range(10):
        path.write_bytes(damaged(rng, good))
        arguments = commands_with(files, kind)[0]
        code, shown, errors = run_text(capsys, *arguments)
        assert code in (0, 1, 2, 3), (code, errors)
        assert (shown == "") == (code > 1) and "Traceback" not in errors
        Path(files["trace"]).with_name("out").unlink(missing_ok=True)


def damaged(rng, good):
    """The bytes of a file with one kind of damage."""
    at = rng.randrange(len(good))
    match rng.randrange(6):
        case 0:
            return good[:at]
        case 1:
            return good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :]
        case 2:
            return good[:at] + good[at + rng.randrange(1, 40) :]
        case 3:
            return good[:at] + good[rng.randrange(len(good)) :]
    record = json.loads(good)
    holder, key = rng.choice(list(places(record)))
    wrong = [None, -1, 0, 1e308, 1.5, "x", "", [], {}, True, 10**30, [[1]], {"a": 1}]
    holder[key] = rng.choice(wrong)
    return json.dumps(record).encode()


def places(value):
    """All places in a JSON value, as a container and a key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])
