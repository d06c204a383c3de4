"""A tuned training on links that are throttled while it runs: it measures them again and compresses."""

from __future__ import annotations

import threading

import pytest

from gckernels.sync import lab
from network_namespaces import WAIT_S, script, wait_until

TRAIN = """
import functools, hashlib, os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gckernels import sync
from gckernels.sync.tuning.watching import watching
from gckernels.sync.tuning.trials import trials
from gckernels.sync.tuning.trials.rules import STEPS

os.environ["XDG_CACHE_HOME"] = os.getcwd()
watching.Monitor = functools.partial(watching.Monitor, window=5)
trials.LEAST_GAIN = 0.95  # nothing gains so much on a link that is not throttled
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
network = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
model = DistributedDataParallel(network, bucket_cap_mb=1)
attachment = sync.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_ready, known = False, 0
for step in range(STEPS + 2 * trials.MOST + 200):
    known += bool(attachment.decisions)
    if known == 20 and not is_ready:  # there are some windows of steps with the plan, which others are compared with
        is_ready = True
        attachment._tuning._tuner._race.trials._handicaps[trials.PLAIN] = 0.98
        Path(f"{rank}.ready").touch()
        while not Path("go").exists():
            time.sleep(0.01)
    batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(2 * step + rank))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if len(attachment.decisions) > 1 and not attachment.is_changing:
        break
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
compressed = sum(not unit.in_place for unit in attachment.plan.units)
texts = [each.text.replace("\\n", " ") for each in attachment.decisions]
Path(f"{rank}.end").write_text("\\n".join([digest.hexdigest(), str(compressed), *texts]))
attachment.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_training_follows_its_links(folder):
    codes: list[int] = []
    with lab.links(lab.Network(2)) as made:
        ranks = threading.Thread(target=lambda: codes.extend(made.run(script(folder, TRAIN), timeout_s=4 * WAIT_S)))
        ranks.start()
        wait_until(lambda: not ranks.is_alive() or len(list(folder.glob("*.ready"))) == 2)
        for machine in (0, 1):
            made[machine].throttle("20mbit")
        (folder / "go").touch()
        ranks.join()
    assert codes == [0, 0]
    first, second = ((folder / f"{rank}.end").read_text().splitlines() for rank in (0, 1))
    assert first == second, "parameters, plans and decisions are the same"
    _, compressed, chosen, followed = first
    assert "was usual" in followed and "chosen" in followed, (chosen, followed)
    assert int(compressed) >= 4, "the matrices; biases may be averaged exactly"
