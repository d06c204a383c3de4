"""Reports of real trainings: their bytes are those that were sent, and any rank writes one alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.plans.prediction import Prediction, Source
from gckernels.sync.reporting.data import ReportData, collected
from gckernels.sync.reporting.page import render
from ranks import run_ranks, values_of


def train(handle, model, steps):
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.ReLU(), torch.nn.Linear(200, 30))


def data_of(handle: sync.Attachment, title: str | None = None) -> ReportData:
    return collected(handle._frontend, handle._figures, handle.residual_nbytes(), title)


def attached(compressor):
    model = DistributedDataParallel(network())
    return sync.attach(model, compressor), model


def synchronized(compressor):
    model = network()
    return sync.attach(model, compressor), model


PLANS = (
    (attached, "BlockQuant(bits=4)"),
    (attached, "PowerSGD"),
    (attached, "Identity"),
    (synchronized, "TopK(ratio=0.1)"),
    (synchronized, "Cast16"),
)


def figures():
    """The bytes that the report and the training say, for each plan."""
    found = []
    for make, compressor in PLANS:
        handle, model = make(compressor)
        train(handle, model, 12)
        data = data_of(handle, "a title")
        found.append((compressor, data.sent_nbytes, handle.sent_nbytes_per_step(), data.plain_nbytes))
        steps = 12 if handle.steps else 0  # DDP without a hook does not count its steps
        assert (data.model, data.ranks, data.rank, data.step) == ("a title", 2, dist.get_rank(), steps)
        assert bool(data.samples) == bool(steps) and "a title" in render(data)
        handle.close()
    return found


def test_bytes_are_those_that_were_sent():
    for values in values_of(run_ranks(2, figures)):
        assert len(values) == len(PLANS)
        for compressor, sent, measured, plain in values:
            assert sent == pytest.approx(measured)
            assert sent == plain if compressor == "Identity" else sent < plain


def written(folder):
    handle, model = attached("EFSignSGD")
    train(handle, model, 3)
    handle.record_next_step()
    train(handle, model, 1)
    path = f"{folder}/{dist.get_rank()}.html"
    if dist.get_rank() == 1:  # alone
        handle.report(path)
    train(handle, model, 1)
    with pytest.raises(FileNotFoundError):
        handle.report(f"{folder}/missing/report.html")
    handle.close()
    if dist.get_rank() == 0:  # a closed one still knows what it did
        handle.report(path)
    return data_of(handle).traced is not None


def test_any_rank_writes_its_page_alone(tmp_path):
    assert values_of(run_ranks(2, written, str(tmp_path))) == [True, True]
    pages = [(tmp_path / f"{rank}.html").read_text(encoding="utf-8") for rank in range(2)]
    assert "EFSignSGD by" in pages[0] and "Written by rank 1 at step 4" in pages[1]
    assert all("<h2>One step</h2>" in page for page in pages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html"]


def alone():
    handle, model = attached("EFSignSGD")
    train(handle, model, 2)
    data = data_of(handle)
    return render(data), data.sent_nbytes, data.plain_nbytes


def test_one_rank_sends_nothing():
    ((page, sent, plain),) = values_of(run_ranks(1, alone))
    assert sent == plain == 0 and "nobody to average with" in page


def named():
    model = DistributedDataParallel(network())
    plan = sync.uniform_plan(model, "EFSignSGD")
    source = Source("Network", "1234")
    prediction = Prediction(0.1, 0.2, "auto", False, 0.05, source, source, 0.5)
    predicted = sync.Plan(plan.units, plan.topology, plan.channels, plan.frontend, plan.start_step, prediction)
    return data_of(sync.attach(model, predicted)).model


def test_trainings_have_the_name_of_their_model():
    assert values_of(run_ranks(2, named)) == ["Network"] * 2
