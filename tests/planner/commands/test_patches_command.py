"""``gckernels patches``: files of safetensors, read without the package, and the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error

import pytest
import torch

from gckernels import patches
from gckernels.patches.format.safetensors_files import _DTYPES, read_tensors
from gckernels.planner.commands import dispatch
from patch_weights import bits, changed, equal, random_bits

RUN = """
import signal, sys
from gckernels.planner.commands import dispatch

signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background begin without it
sys.exit(dispatch.main())
"""
NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def saved(path, tensors, metadata=None) -> None:
    """Write a file as the package safetensors does."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        end = at + bits(tensor).numel()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(
        len(head).to_bytes(8, "little") + head + b"".join(bits(t).numpy().tobytes() for t in tensors.values())
    )


@pytest.fixture
def files(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    old = {name: random_bits(dtype, (3, 50), generator) for name, dtype in _DTYPES.items() if name != "BOOL"}
    old |= {"odd": random_bits(torch.uint8, (3,), generator), "late": random_bits(torch.float64, (5,), generator)}
    new = changed(old, 0.05, generator)
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "old", old, {"format": "pt"})
    saved(tmp_path / "new", new, {"format": "pt"})
    return tmp_path, old, new


def test_a_patch_makes_the_second_file_of_the_first(files, capsys):
    folder, old, new = files
    assert equal(read_tensors("old").tensors, old)
    assert dispatch.main(["patches", "diff", "old", "new", "-o", "patch"]) == 0
    assert "elements changed" in capsys.readouterr().out
    assert dispatch.main(["patches", "apply", "patch", "old", "-o", "again"]) == 0
    assert (folder / "again").read_bytes() == (folder / "new").read_bytes()
    assert f"digest {patches.digest(new):016x}" in capsys.readouterr().out
    assert (folder / "patch").read_bytes() == patches.diff(old, new)


def test_figures_of_two_files(files, capsys):
    _, old, new = files
    assert dispatch.main(["patches", "show", "old", "new", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    count = sum(
        int((bits(old[name]).view(t.numel(), -1) != bits(t).view(t.numel(), -1)).any(1).sum())
        for name, t in new.items()
    )
    assert record["changed"] == count and record["elements"] == sum(each.numel() for each in old.values())
    assert record["patch_nbytes"] == len(patches.diff(old, new))
    assert dispatch.main(["patches", "show", "old", "old"]) == 0
    assert "0 of" in capsys.readouterr().out


def test_a_key_of_a_file(files, capsys):
    folder, *_ = files
    (folder / "key").write_text("a long random word\n")
    assert dispatch.main(["patches", "diff", "old", "new", "-o", "patch", "--key-file", "key"]) == 0
    assert dispatch.main(["patches", "apply", "patch", "old", "-o", "again"]) == 3
    assert "has an HMAC: give its key" in capsys.readouterr().err and not (folder / "again").exists()
    assert dispatch.main(["patches", "apply", "patch", "old", "-o", "again", "--key-file", "key"]) == 0


def test_what_is_refused(files, capsys):
    folder, old, _ = files
    dispatch.main(["patches", "diff", "old", "new", "-o", "patch"])
    saved(folder / "fewer", {"odd": old["odd"]})
    (folder / "empty").write_bytes(b"")
    capsys.readouterr()
    for words, code, text in (
        (["diff", "old", "new"], 2, "diff writes a patch; name it with -o FILE"),
        (["diff", "old", "nothing", "-o", "x"], 2, "nothing: No such file"),
        (["diff", "old", "fewer", "-o", "x"], 3, "old, fewer: diff: old and new differ: BF16 is torch.bfloat16"),
        (["diff", "old", "patch", "-o", "x"], 3, "patch: is no file of safetensors"),
        (["apply", "patch", "new", "-o", "x"], 3, "patch: the patch is for tensors with other values"),
        (["apply", "old", "old", "-o", "x"], 3, "old: the patch is no patch"),
        (["show", "old", "empty"], 3, "empty: is no file of safetensors"),
        (["show", "old", "new", "--key-file", "empty"], 2, "empty: is empty"),
        (["serve", "nowhere"], 2, "nowhere: there is no such folder"),
        (
            ["serve", ".", "--host", "0.0.0.0"],
            2,
            "other machines could read the weights; name a file with --token-file",
        ),
        (["serve", ".", "--certificate", "empty"], 2, "cannot be served"),
    ):
        assert dispatch.main(["patches", *words]) == code, words
        assert text in capsys.readouterr().err, words
    assert not (folder / "x").exists()


def test_damage_of_a_header_is_refused(files):
    folder, *_ = files
    data = (folder / "old").read_bytes()
    head_nbytes = 8 + int.from_bytes(data[:8], "little")
    for place in range(0, head_nbytes, 3):
        damaged = bytearray(data)
        damaged[place] ^= 0x11
        (folder / "damaged").write_bytes(damaged)
        try:
            found = read_tensors(folder / "damaged").tensors
        except ValueError:
            continue
        assert sum(bits(each).numel() for each in found.values()) == len(data) - head_nbytes
    for wrong in (data[:-1], data + b"\0", data[:5], b"\xff" * 100):
        (folder / "damaged").write_bytes(wrong)
        with pytest.raises(ValueError):
            read_tensors(folder / "damaged")


def test_the_server_runs_until_it_is_interrupted(tmp_path):
    (tmp_path / "token").write_text("word\n")
    store = patches.Folder(tmp_path / "store")
    store.put("a", b"1")
    words = ["patches", "serve", str(store.path), "--port", "0", "--token-file", str(tmp_path / "token"), "--write"]
    with subprocess.Popen([sys.executable, "-c", RUN, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stderr.readline().split()[-1]
            assert patches.Http(url, "word").get("a") == b"1"
            patches.Http(url, "word").put("b", b"2")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                patches.Http(url).get("a")
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    assert store.get("b") == b"2"
