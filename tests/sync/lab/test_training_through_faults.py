"""Training on links that are cut: it goes on with the same bits, or ends with an exception on every rank."""

from __future__ import annotations

import threading
import time

import pytest

from gckernels.sync import lab
from gckernels.sync.lab import Network
from network_namespaces import WAIT_S, script, wait_until

TRAIN = """
import datetime, hashlib, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gckernels import sync

name, compressor, timeout_s = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(timeout_s)))
rank = dist.get_rank()
torch.manual_seed(0)
network = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
model = DistributedDataParallel(network, bucket_cap_mb=0.3)
attachment = sync.attach(model, compressor)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    for step in range(20):
        if step == 5:
            Path(f"{name}.{rank}.ready").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
except RuntimeError as error:
    Path(f"{name}.{rank}.error").write_text(str(error))
    os._exit(3)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
Path(f"{name}.{rank}.bits").write_text(digest.hexdigest())
attachment.close()
dist.destroy_process_group()
"""


def train(made, folder, name, compressor, timeout_s, fault):
    """Exit codes of a training, in whose fifth step ``fault()`` is called."""
    (folder / "go").unlink(missing_ok=True)
    codes: list[int] = []
    arguments = (script(folder, TRAIN), name, compressor, str(timeout_s))
    ranks = threading.Thread(target=lambda: codes.extend(made.run(*arguments, timeout_s=2 * WAIT_S)))
    ranks.start()
    wait_until(lambda: len(list(folder.glob(f"{name}.*.ready"))) == made.network.ranks)
    fault(folder / "go")
    ranks.join()
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["EFSignSGD", "PowerSGD(rank=2)"])
def test_training_goes_on_with_the_same_bits_when_a_link_is_back(folder, compressor):
    with lab.links(Network(2, "100mbit")) as made:

        def cut_for_five_seconds(go):
            made[1].cut()
            go.touch()
            time.sleep(5)
            assert not list(folder.glob("cut.*.bits"))  # the training waits
            made[1].restore()

        assert train(made, folder, "whole", compressor, WAIT_S, lambda go: go.touch()) == [0, 0]
        assert train(made, folder, "cut", compressor, WAIT_S, cut_for_five_seconds) == [0, 0]
    bits = {path.name: path.read_text() for path in folder.glob("*.bits")}
    assert len(bits) == 4 and len(set(bits.values())) == 1, bits


@pytest.mark.slow
def test_a_link_that_is_cut_for_good_ends_in_an_exception_on_all_ranks(folder):
    with lab.links(Network(3)) as made:

        def cut(go):
            made[1].cut()
            go.touch()

        assert train(made, folder, "cut", "EFSignSGD", 5, cut) == [3, 3, 3]
    assert len(list(folder.glob("cut.*.error"))) == 3
