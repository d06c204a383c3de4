"""Tests of ranks in network namespaces: when links are refused, their rate, and their removal at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gckernels.planner import commands
from gckernels.sync import lab
from gckernels.sync.lab import LinksError, cluster, link, namespaces
from network_namespaces import WAIT_S, script, wait_until

ROOT = Path(__file__).parents[3]
TALK = """
import os, socket
import torch, torch.distributed as dist
from gckernels.sync import lab

dist.init_process_group("gloo")
before = lab.sent_nbytes()
values = torch.full((2**18,), float(dist.get_rank() + 1))
dist.all_reduce(values)
dist.barrier()
sent = lab.sent_nbytes() - before
assert (values == 3).all() and lab.in_rank() and os.environ[lab.RATE] == "100mbit", values
assert sent >= 2**20, sent  # half of a MiB to the owner of each half, and half of one back
if dist.get_rank() == 1:
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as connected:
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 8).startswith(b"reno")
dist.barrier()  # rank 0 keeps the port open until then
open(f"{dist.get_rank()}.done", "w").close()
dist.destroy_process_group()
"""
HOLD = """
import pathlib, signal, sys
sys.path.insert(0, "LAB")  # without the rest of the package, which takes seconds to import
import lab
script, ready = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
network = lab.Network(2, ranks_per_machine=2, delay_s=0.001)
with lab.links(network) as made:
    (ready / "namespaces").write_text(" ".join([*made.namespaces, *made._inner, made._outer]))
    made.run(script)
""".replace("LAB", str(ROOT / "sync"))


# -------------------------------------------------------------------- without the means to create links


@pytest.fixture
def nothing_is_done(monkeypatch):
    """Fails the test if any command is run."""

    def refuse(*arguments, **options):
        raise AssertionError(f"ran {arguments}")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_without_root_nothing_is_done(monkeypatch, nothing_is_done):
    monkeypatch.setattr(shutil, "which", lambda tool, path: None)  # root comes first: without it, tools are no help
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinksError, match="need root"), lab.links(lab.Network(2)):
        pass


@pytest.mark.parametrize(("absent", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")])
def test_a_missing_tool_names_its_package(monkeypatch, nothing_is_done, absent, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool == absent else f"/usr/sbin/{tool}")
    with (
        pytest.raises(LinksError, match=rf"{absent} not found.*apt-get install {package}\)$"),
        lab.links(lab.Network(2)),
    ):
        pass


@pytest.mark.parametrize(
    ("ranks", "rate"), [(0, "none"), (251, "none"), (2, "fast"), (2, "0mbit"), (2, "1 gbit"), (2, "1gbit; reboot")]
)
def test_arguments_are_checked(nothing_is_done, ranks, rate):
    with pytest.raises(ValueError, match=r"ranks must be|rate must be written"), lab.links(lab.Network(ranks, rate)):
        pass


def test_the_command_says_why_and_ends(monkeypatch, nothing_is_done, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "found_tool", lambda tool: None)
    assert commands.main(["lab", "script.py"]) == 2
    need = "gckernels lab: ip and tc and setpriv and unshare and mount not found: install iproute2 util-linux mount"
    assert capsys.readouterr().err.startswith(need)


def test_the_command_says_why_the_system_does_not_allow_it(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert commands.main(["lab", "script.py"]) == 2
    line = capsys.readouterr().err
    assert "this system lets only root make links (unshare: unshare failed: Operation not permitted)" in line
    assert 'sudo "$(command -v gckernels)" lab ...' in line


def test_without_root_the_command_runs_in_namespaces_of_its_own(folder):
    """As the user nobody, for whom the system knows no other rights."""
    here = script(folder, "import os; print(os.environ['RANK'], os.environ['LINK_RATE'], os.listdir('/sys/class/net'))")
    folder.chmod(0o755)
    as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        sys.executable,
        "-m",
        "gckernels",
        "lab",
    ]
    ran = subprocess.run(
        [*as_nobody, "--rate", "50mbit", str(here)], capture_output=True, text=True, check=False, cwd="/"
    )
    if "lets only root" in ran.stderr or "Permission denied" in ran.stderr:
        pytest.skip(f"no user namespaces here, or no Python for other users: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [f"{rank} 50mbit ['eth0', 'lo']" for rank in range(2)]


def test_tools_are_found_where_the_path_lacks_the_folders_of_root(monkeypatch, tmp_path):
    tool = tmp_path / "sbin" / "gckernels-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho found $1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert namespaces.found_tool(tool.name) is None
    monkeypatch.setattr(namespaces, "SYSTEM_FOLDERS", f"/usr/sbin:{tool.parent}")
    assert namespaces.found_tool(tool.name) == str(tool)
    assert namespaces.run_tool(tool.name, "it") == "found it\n"


@pytest.mark.parametrize(("rate", "nbytes"), [("8kbit", 4097), ("100mbit", 16_596), ("1gbit", 129_096)])
def test_a_millisecond_passes_without_delay(rate, nbytes):
    assert link.bucket_nbytes(rate) == nbytes


# -------------------------------------------------------------------- with links


def made_namespaces():
    return list(namespaces.NAMESPACES.glob(f"{namespaces.PREFIX}-{os.getpid()}-*"))


def running(pid):
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_two_ranks_talk_over_links_of_the_rate(folder):
    with lab.links(lab.Network(2, "100mbit")) as made:
        assert made.run(script(folder, TALK), timeout_s=WAIT_S) == [0, 0]
        for name, end in ((made.namespaces[0], "eth0"), (made.namespaces[1], "eth0"), (made._outer, "port1")):
            shown = json.loads(namespaces.run_tool("tc", "-json", "-n", name, "qdisc", "show", "dev", end))
            assert [(each["kind"], each["options"]["rate"]) for each in shown] == [("tbf", 12_500_000)]  # bytes
    assert len(list(folder.glob("*.done"))) == 2
    assert not made_namespaces()


def test_links_that_nothing_slows_down(folder):
    with lab.links(lab.Network(1)) as made:
        assert "tbf" not in namespaces.run_tool("tc", "-n", made.namespaces[0], "qdisc", "show")


def test_a_rank_that_fails_ends_the_others_and_what_they_have_started(folder):
    text = """
import os, subprocess, time
if os.environ["RANK"] == "1":
    while not os.path.exists("child"):
        time.sleep(0.01)
    raise SystemExit(3)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open("child.new", "w") as file:
    file.write(str(child.pid))
os.rename("child.new", "child")
time.sleep(1000)
"""
    with lab.links(lab.Network(2)) as made:
        assert made.run(script(folder, text), grace_s=0) == [-signal.SIGKILL, 3]
        wait_until(lambda: not running(int((folder / "child").read_text())))
    assert not made_namespaces()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hangup_is_ignored_where_it_was(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with namespaces.terminable():
            if handler == signal.SIG_IGN:  # as with nohup
                signal.raise_signal(signal.SIGHUP)
            else:
                with pytest.raises(SystemExit, match=str(128 + signal.SIGHUP)):
                    signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGTERM)  # a second one does not disturb the removal
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_time_is_limited(folder):
    with lab.links(lab.Network(1)) as made:
        assert made.run(script(folder, "import time; time.sleep(1000)"), timeout_s=0.1) == [-signal.SIGKILL]


def test_an_exception_removes_everything(folder):
    with pytest.raises(KeyError), lab.links(lab.Network(2)):
        assert len(made_namespaces()) == 3
        raise KeyError
    assert not made_namespaces()


def test_links_that_are_half_made_are_removed(folder, monkeypatch):
    run = namespaces.run_tool

    def fail_late(*command):
        if command[3:5] == ("address", "add"):
            raise LinksError("no more addresses")
        return run(*command)

    monkeypatch.setattr(cluster, "run_tool", fail_late)
    with pytest.raises(LinksError, match="no more addresses"), lab.links(lab.Network(2)):
        pass
    assert not made_namespaces()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_stays_of_a_run_that_is_ended(folder, number):
    text = "import os, time; name = os.environ['RANK']; "
    text += "open(name, 'w').write(str(os.getpid())); os.rename(name, f'ready{name}'); time.sleep(1000)"
    command = [sys.executable, "-c", HOLD, script(folder, text), folder]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as holder, lab.links(lab.Network(1)) as other:
        wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in range(2)))
        names = (folder / "namespaces").read_text().split()
        lab.remove_leftovers()  # does not touch a run that is still alive
        assert all((namespaces.NAMESPACES / name).exists() for name in names)
        holder.send_signal(number)
        holder.wait(WAIT_S)
        ranks = [int((folder / f"ready{rank}").read_text()) for rank in range(2)]
        wait_until(lambda: not any(map(running, ranks)))
        left = [name for name in names if (namespaces.NAMESPACES / name).exists()]
        assert left == (names if number == signal.SIGKILL else [])
        lab.remove_leftovers()
        assert not any((namespaces.NAMESPACES / name).exists() for name in names)
        assert all((namespaces.NAMESPACES / name).exists() for name in other.namespaces)
