"""On full and read-only file systems a job still runs, and warns about what it does without."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_models import attached
from gckernels import BlockQuant, TopK
from gckernels.toolkit.host import compilers
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

pytestmark = pytest.mark.slow

SETUP_FAILED = 77
MOUNT = """
mount -t tmpfs -o size=64k none /dev/shm &&
mount -t tmpfs -o size=64k,mode=700 none "$0/full" &&
mount -t tmpfs -o size=64k,mode=700 none "$0/read-only" &&
mkdir -m 700 "$0/full/cache" "$0/read-only/cache" &&
mount -o remount,ro "$0/read-only" || exit 77
for folder in /dev/shm "$0/full"; do
    cat /dev/zero > "$folder/filler" 2> /dev/null
    ( echo more > "$folder/more" ) 2> /dev/null && [ -s "$folder/more" ] && exit 77
done
exec "$@"
"""
"""A script that mounts file systems over existing folders, visible to its children alone, and then runs its
arguments."""

CASES = {
    # the front end; the folder of compiled programs; the folder of temporary files
    "nothing else, by the hook": ("hook", "cache", "temporary"),
    "nothing else": ("module", "cache", "temporary"),
    "temporary files": ("module", "other cache", "full"),
    "the cache": ("module", "full/cache", "temporary"),
    "the cache and temporary files": ("hook", "full/cache", "full"),
    "a read-only cache": ("hook", "read-only/cache", "temporary"),
    "all is read-only": ("module", "read-only/cache", "read-only"),
}
"""All of them run with a full /dev/shm."""


def trained(front: str, cache: str | None = None, temporary: str | None = None) -> tuple[list[str], list[str]]:
    """Digests of the gradients of three steps with two compressors, and the warnings of gckernels.

    Args:
        front: the front end, ``hook`` or ``module``.
        cache, temporary: folders, by default those of the machine.
    """
    if cache is not None and temporary is not None:
        os.environ |= {"GCKERNELS_CACHE": cache, "TMPDIR": temporary}
        tempfile.tempdir = temporary  # otherwise /tmp would be tried next
    digests = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compressor in (BlockQuant(), TopK()):
            module = build("Mlp")
            model, taken = attached(front, module, compressor)
            for step in range(3):
                model(module.batch(step, dist.get_rank())).backward()
                digests.append(digest_of(parameter.grad for parameter in module.parameters()))
            taken.close()
    return digests, [text for text in map(str, (each.message for each in caught)) if text.startswith("gckernels:")]


def main(folder: str) -> None:
    """Run all cases inside the namespace and write their results to ``folder``."""
    found = {}
    for name, (front, *folders) in CASES.items():
        found[name] = values_of(
            run_ranks(2, trained, front, *(str(Path(folder, each)) for each in folders), fresh=True, exits=False)
        )
    Path(folder, "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The prefix of a command that may mount file systems."""
    reasons = []
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *options, "--propagation", "private"]
        with tempfile.TemporaryDirectory() as folder:
            try:
                trial = ["sh", "-c", 'mount -t tmpfs none "$0"', folder]
                done = subprocess.run([*command, *trial], capture_output=True, text=True)
            except FileNotFoundError as error:
                pytest.skip(f"no mount namespaces here: {error}")
        if done.returncode == 0:
            return command
        reasons.append(done.stderr.strip())
    pytest.skip(f"no mount namespaces here: {'; '.join(reasons)}")


@pytest.fixture(scope="module")
def found(namespace, tmp_path_factory) -> dict[str, Any]:
    """The results of both ranks for all cases, and the folder that holds the cases' file systems."""
    folder = tmp_path_factory.mktemp("storage")
    for name in ("full", "read-only", "temporary"):
        (folder / name).mkdir(mode=0o700)
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_faults_storage as t; "
    code += f"t.main({str(folder)!r})"
    command = [*namespace, "sh", "-c", MOUNT, str(folder), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode == SETUP_FAILED:
        pytest.skip(f"no full file systems here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return {"folder": str(folder), "cases": json.loads((folder / "found.json").read_text())}


@functools.cache
def elsewhere(front: str) -> list[str]:
    """The digests of the same job with this machine's own folders."""
    return values_of(run_ranks(2, trained, front))[0][0]


def test_gradients_are_the_same(found):
    for case, ranks in found["cases"].items():
        for digests, _ in ranks:
            assert digests == elsewhere(CASES[case][0]), case


def test_what_is_slower_is_said_with_the_folder(found):
    if compilers.compiler.__wrapped__() is None:
        pytest.skip("there is no C compiler")
    for case, ranks in found["cases"].items():
        expected = expected_of(case, str(Path(found["folder"], CASES[case][1])))
        for _, output in ranks:
            assert len(output) == len(expected), (case, output)
            for text, parts in zip(output, expected, strict=True):
                assert all(part in text for part in parts), (case, text)


def expected_of(case: str, cache: str) -> list[tuple[str, ...]]:
    """Parts of the warnings of a case, given its folder of compiled programs."""
    return {
        "nothing else, by the hook": [],
        "nothing else": [],
        "temporary files": [],  # the compiler's temporary files are in the folder of the programs
        "the cache": [("eager torch", "No space left on device", cache)],
        "the cache and temporary files": [("eager torch", "No space left on device", cache)],
        "a read-only cache": [("compiles the CPU path anew", "not writable", cache)],
        "all is read-only": [
            ("compiles the CPU path anew", "not writable", cache),
            ("eager torch", "Read-only file system", "temporary"),
        ],
    }[case]
