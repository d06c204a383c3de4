"""The process group of torchft: replicas stay equal, nothing is lost, and members come and go."""

from __future__ import annotations

import copy
import datetime
import logging
import os

import pytest
import torch
import torch.distributed as dist

os.environ["TORCHFT_WATCHDOG_TIMEOUT_SEC"] = "4"  # its thread sleeps for so long when it is to end
pytest.importorskip("torchft", reason="needs the extra 'torchft'")

import torchft
from torch.distributed.distributed_c10d import ReduceOp
from torchft.coordination import LighthouseServer
from torchft.futures import _TIMEOUT_MANAGER
from torchft.local_sgd import DiLoCo

from gckernels.sync.integrations.torchft import SMALLEST, CompressedProcessGroupGloo
from ranks import run_ranks, values_of
from trainers import digest, loss_of, network

pytestmark = pytest.mark.host_only("the managers of torchft are on the CPU")
TIMEOUT = datetime.timedelta(seconds=20)
STEPS = 6


servers = []


def lighthouse(replicas):
    """The address of a lighthouse, which rank 0 keeps."""
    logging.disable(logging.WARNING)
    address = [""]
    if dist.get_rank() == 0:
        times = {"join_timeout_ms": 5000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 2000}
        servers.append(LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas, **times))
        address = [f"http://127.0.0.1:{servers[-1].address().rpartition(':')[2]}"]
    dist.broadcast_object_list(address)
    return address[0]


def in_ranks(function, *arguments):
    return values_of(run_ranks(2, function, *arguments, fresh=True, exits=False))


def rows_of(seed):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def total(tensors):
    return sum(each.double().sum().item() for each in tensors)


class Replica:
    """A replica of one rank."""

    def __init__(self, address, name, group, replicas):
        self.network = network()
        if name == "second":
            torch.nn.init.zeros_(self.network[0].weight)  # it takes the parameters of the first one
        self.store = dist.TCPStore("127.0.0.1", 0, 1, True)
        self.group = group
        self.manager = torchft.Manager(
            pg=group,
            load_state_dict=self.network.load_state_dict,
            state_dict=self.network.state_dict,
            min_replica_size=replicas,
            use_async_quorum=False,
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=address,
            replica_id=name,
            hostname="127.0.0.1",
        )
        if isinstance(group, CompressedProcessGroupGloo):
            group.manager = self.manager
        self.model = torchft.DistributedDataParallel(self.manager, self.network)
        self.optimizer = torchft.Optimizer(self.manager, torch.optim.SGD(self.network.parameters(), lr=0.1))

    def step(self, number, fails=False):
        self.optimizer.zero_grad()
        loss_of(self.model, rows_of(number)).backward()
        if fails:
            self.manager.report_error(RuntimeError("on purpose"))
        self.optimizer.step()

    def close(self):
        self.manager.shutdown()
        self.store = None


def end():
    """End torchft's threads when both replicas have ended."""
    dist.barrier()
    _TIMEOUT_MANAGER.shutdown()


def replica_of(address, group, replicas=2):
    return Replica(address, ("first", "second")[dist.get_rank()], group, replicas)


def averaged(compressor):
    """The digest of a model after some steps, its committed steps, the gradients that it has got and those that it has
    given, added up, and its residuals."""
    address = lighthouse(2)
    group = CompressedProcessGroupGloo(compressor, timeout=TIMEOUT)
    replica = replica_of(address, group)
    got = given = 0.0
    for step in range(STEPS):
        rows = 2 * step + dist.get_rank()
        if step:  # the first one heals a replica
            local = copy.deepcopy(replica.network)
            local.zero_grad()
            loss_of(local, rows_of(rows)).backward()
            given += total(each.grad for each in local.parameters())
        replica.step(rows)
        if step:
            got += total(each.grad for each in replica.network.parameters())
        else:
            group.load_state_dict({})
    found = digest(replica.network.parameters()), replica.manager.current_step()
    kept = total(group.state_dict().values())
    replica.close()
    end()
    return found, got, given, kept


@pytest.mark.parametrize("compressor", ["BlockQuant(bits=4)", "EFSignSGD", "Cast16"])
def test_replicas_stay_equal_and_nothing_is_lost(compressor):
    (first, got, given, kept), (second, _, other_given, other_kept) = in_ranks(averaged, compressor)
    assert first == second and first[1] == STEPS
    # sums of some ten thousand numbers in fp32
    assert got + (kept + other_kept) / 2 == pytest.approx((given + other_given) / 2, rel=1e-3)


def repeated(fails):
    address = lighthouse(2)
    replica = replica_of(address, CompressedProcessGroupGloo(timeout=TIMEOUT))
    for step in range(STEPS):
        if fails and step == 3:
            replica.step(1000 + dist.get_rank(), fails=True)
        replica.step(2 * step + dist.get_rank())
    found = digest(replica.network.parameters()), replica.manager.current_step()
    replica.close()
    end()
    return found


def test_steps_that_are_not_committed_leave_nothing_behind():
    whole, again = (in_ranks(repeated, fails) for fails in (False, True))
    assert whole == again and whole[0][1] == STEPS


def left_and_back():
    """The digests of two replicas after one was away, and the participants and residuals while it was."""
    address = lighthouse(1)
    rank = dist.get_rank()
    replica = replica_of(address, CompressedProcessGroupGloo("EFSignSGD", timeout=TIMEOUT), replicas=1)
    while replica.manager.num_participants() < 2 or replica.manager.current_step() < 4:
        replica.step(replica.manager.current_step())
    dist.barrier()
    if rank:
        replica.close()
        dist.barrier()
        replica = replica_of(address, CompressedProcessGroupGloo("EFSignSGD", timeout=TIMEOUT), replicas=1)
    else:
        before = replica.manager.current_step()
        while replica.manager.current_step() < before + 3:
            replica.step(replica.manager.current_step())
        alone = replica.manager.num_participants(), total(each.abs() for each in replica.group.state_dict().values())
        dist.barrier()
    steps = 0
    while steps < 4:
        replica.step(replica.manager.current_step())
        steps += replica.manager.num_participants() == 2
    found = digest(replica.network.parameters()), replica.manager.current_step()
    replica.close()
    end()
    return found, None if rank else alone


def test_replicas_leave_and_come_back():
    (found, alone), (other, _) = in_ranks(left_and_back)
    assert found == other and alone == (1, 0.0)


def in_fragments():
    """The digest of a model that DiLoCo has trained in two fragments, and its residuals by names."""
    address, parts = lighthouse(2), 2
    group = CompressedProcessGroupGloo(fragments=parts, timeout=TIMEOUT)
    replica = replica_of(address, group)
    layers = [replica.network[0], replica.network[2]]
    inner = torch.optim.AdamW(replica.network.parameters(), lr=1e-2)
    outer = [torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in layers]
    with DiLoCo(replica.manager, layers, inner, outer, sync_every=4) as rounds:
        for step in range(16):
            inner.zero_grad()
            loss_of(replica.network, rows_of(2 * step + dist.get_rank())).backward()
            inner.step()
        anchors = [each for fragment in rounds._fragments for each in fragment.original_parameters.values()]
    found = digest(anchors), {name: each.numel() for name, each in group.state_dict().items()}
    replica.close()
    end()
    return found


def test_fragments_have_residuals_of_their_own():
    (found, kept), (other, _) = in_ranks(in_fragments)
    assert found == other
    assert kept == {"0.1": 64 * 96, "1.1": 96 * 64}


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="compressor must have payloads that can be averaged"):
        CompressedProcessGroupGloo("SigNUM")
    with pytest.raises(ValueError, match="compressor cannot be 'BlockQuant"):
        CompressedProcessGroupGloo("BlockQuant(bits=5)")
    with pytest.raises(ValueError, match="fragments must be an int from 1 up, got 0"):
        CompressedProcessGroupGloo(fragments=0)
    group = CompressedProcessGroupGloo()
    with pytest.raises(RuntimeError, match="set the attribute manager"):
        group.allreduce([torch.ones(SMALLEST)], ReduceOp.SUM)
