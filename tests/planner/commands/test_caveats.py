"""Results say what was not measured: compressors without a price, assumed errors, prices beyond the measured sizes, and
everything that is estimated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gckernels
from command_files import LAYERS, NUMEL, run_json, run_text, small_trace, write_small_trace
from gckernels.planner.commands.common.caveats import slips_of_machine
from gckernels.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.planner.machines.files import load_machine, machine_names
from gckernels.planner.machines.machine import Overheads, Shared
from gckernels.planner.machines.profile import Profile, Stamp
from gckernels.sync import Topology
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.traces.traced_tensors import Role

SHIPPED_MACHINES = Path(__file__).parents[3] / "planner" / "machines" / "shipped"
SLOW = Curve((1e3, 1e5, 1e7), (1e-4, 1e-2, 1.0), (1e-5, 1e-4, 1e-2), error=0.03)
STAMP = Stamp(("a", "b"), "cpu", "gloo", "2.11", gckernels.__version__, "2026-01-01T00:00:00", 60.0)
BOTH_ENDS = (StageKind.ENCODE, StageKind.DECODE)


def write_profile(folder, *specs, worse=(), stamp=STAMP, link=SLOW):
    """The path of a profile that has measured compressors, some of them with a bad error."""
    codecs = [
        CodecModel(gckernels.from_spec(spec), work, Place.DEVICE, Coefficients(1e-5, element_s=1e-9), 0.9, *most, error)
        for spec in dict.fromkeys(("Identity", *specs, *worse))
        for error in [0.3 if spec in worse else 0.05]
        for work in BOTH_ENDS
        for most in [(128, 1 << 24, 2)]
    ]
    profile = Profile(
        name="two ranks",
        topology=Topology(2),
        computes_on=Shared.CORES,
        cores=1.0,
        overheads=Overheads(),
        collectives=tuple(
            CollectiveCurve(step, Level.FLAT, Place.DEVICE, link) for step in ("AllReduce", "AllGather", "AllToAll")
        ),
        codecs=tuple(codecs),
        copies=(CopyCurve(Shared.CORES, Curve((1e3, 1e6), (1e-6, 1e-4), (1e-6, 1e-4))),),
        sharing={},
        taken={},
        left_out=(),
        stamp=stamp,
    )
    path = Path(folder) / "machine.json"
    profile.save(path)
    return str(path)


@pytest.fixture
def trace(tmp_path):
    return write_small_trace(tmp_path)


@pytest.mark.parametrize("more", [(), ("--sweep",)])
def test_a_machine_without_a_price_of_any_allowed_compressor_is_refused(trace, tmp_path, capsys, more):
    machine, out = write_profile(tmp_path, "Cast16"), tmp_path / "out.json"
    code, shown, errors = run_text(
        capsys, "plan", trace, machine, "--compressors", "QSGD", "EFSignSGD", "--policy", "all", "-o", str(out), *more
    )
    assert code == 3 and shown == "" and not out.exists() and errors.count("\n") == 1
    assert f"{machine}: no reliable price for QSGD, EFSignSGD; gckernels profile --compressors QSGD EFS" in errors


def test_what_was_disturbed_makes_predictions_less_certain(trace, tmp_path, capsys):
    """Bad compressors are left out if others are good. The needs of every plan are used as they are."""
    arguments = ("--compressors", "Cast16", "EFSignSGD", "--policy", "all")
    machine = write_profile(tmp_path, "Cast16", worse=["EFSignSGD"])
    code, found = run_json(capsys, "plan", trace, machine, *arguments)
    assert code == 0 and found["allowed"] == ["Cast16"] and found["unpriced"] == ["EFSignSGD"]
    assert 0.03 <= found["margin"] < 0.06
    write_profile(tmp_path, worse=["Cast16", "Identity"])
    code, found = run_json(capsys, "plan", trace, machine, *arguments)
    assert code == 0 and found["allowed"] == ["Cast16"] and found["margin"] == pytest.approx(0.3)
    assert {row["policy"]: row["margin"] for row in found["policies"]}["none"] == pytest.approx(0.3)  # for codecs
    plan = str(tmp_path / "plan.json")
    write_profile(tmp_path, "Cast16", link=replace(SLOW, error=0.6))
    code, shown, errors = run_text(capsys, "plan", trace, machine, *arguments, "-o", plan)
    assert code == 1 and "less than the error of the prediction, 60 %" in shown
    assert "disturbed" in errors and "AllReduce flat: error 60%" in errors
    code, found = run_json(capsys, "explain", trace, machine, plan, "--messages", "0")
    assert code == 0 and found["margin"] == pytest.approx(0.6, abs=0.02)


def test_a_plan_of_good_prices_is_chosen_beside_faster_ones_of_bad_prices(trace, tmp_path, capsys):
    """A collective that was disturbed makes the plans that use it uncertain, and no others."""
    record = json.loads(Path(write_profile(tmp_path, "Cast16")).read_text())
    for each in record["collectives"]:
        if each["step"] == "AllToAll":
            each |= {"error": 50.0, "wall_s": [0.1 * seconds for seconds in each["wall_s"]]}
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(record))
    arguments = ("plan", trace, str(machine), "--compressors", "Cast16")
    code, found = run_json(capsys, *arguments)
    rows = {row["policy"]: row for row in found["policies"]}
    assert code == 0 and found["margin"] < 0.1
    assert found["step_s"] > min(row["step_s"] for row in rows.values() if row["margin"] > 1.0)


def test_compressors_without_a_price_are_named_and_left_out(trace, tmp_path, capsys):
    machine = write_profile(tmp_path, "Cast16")
    arguments = ("plan", trace, machine, "--compressors", "Cast16", "BlockQuant(bits=4)", "--policy", "all")
    code, shown, errors = run_text(capsys, *arguments)
    assert code == 0 and "Allowed compressors: Cast16.\n" in shown
    assert "no reliable price for BlockQuant(bits=4), so plans do without" in errors
    assert "gckernels profile --compressors Cast16 'BlockQuant(bits=4)' -o FILE" in errors
    _, found = run_json(capsys, *arguments)
    assert found["unpriced"] == ["BlockQuant(bits=4)"] and found["allowed"] == ["Cast16"]
    code, _, errors = run_text(capsys, *arguments[:-1], "all:BlockQuant(bits=4)")
    assert code == 3 and "no reliable price for BlockQuant(bits=4); gckernels profile" in errors


def test_an_explanation_needs_no_price_of_what_the_plan_does_not_use(trace, tmp_path, capsys):
    machine, plan = write_profile(tmp_path, "EFSignSGD"), str(tmp_path / "plan.json")
    made = run_text(capsys, "plan", trace, machine, "--compressors", "EFSignSGD", "--policy", "all", "-o", plan)
    assert made[0] == 0
    code, _, errors = run_text(capsys, "explain", trace, machine, plan, "--messages", "0")
    assert code == 0 and "no reliable price for Cast16, " in errors


SHAPELESS, ON_VECTORS = "needs the shapes of matrices, which the trace does not have", "for matrices, and all"


@pytest.mark.parametrize(
    ("change", "spec", "why"),
    [
        ({"shape": None}, "PowerSGD", SHAPELESS),
        ({"shape": None, "role": Role.VECTOR}, "EFSignSGD", ON_VECTORS),
        ({"dtype": torch.float64}, "Cast16", "gradients are of float64, it takes float32, bfloat16, float16"),
        ({"shape": (NUMEL,), "numel": NUMEL}, "PowerSGD", "no gradient has a shape for it"),
        ({}, "Identity", "it compresses nothing"),
    ],
)
def test_compressors_that_no_gradient_may_use_have_a_reason(tmp_path, capsys, change, spec, why):
    small, trace, machine = small_trace(), tmp_path / "changed.json", "two-sites-1gbit"
    replace(small, tensors=tuple(replace(each, **change) for each in small.tensors)).save(trace)
    named = ("plan", str(trace), machine, "--compressors", spec)
    code, shown, _ = run_text(capsys, *named, "--policy", "none")
    assert code == 1 and "Allowed compressors: none; only programs are chosen.\n" in shown
    assert f"No gradient may use {spec}: " in shown and why in shown
    _, found = run_json(capsys, *named, "Cast16", "--policy", "none")
    assert why in found["unusable"][spec]
    if spec != "Identity":
        code, _, errors = run_text(capsys, *named, "--policy", f"all:{spec}")
        assert code == 2 and why in errors and "allows it" not in errors


def test_numbers_in_another_unit_are_noted(tmp_path, capsys):
    trace, machine, slow = write_small_trace(tmp_path), tmp_path / "machine.json", "two-sites-1gbit"
    record = json.loads(SHIPPED_MACHINES.joinpath(f"{slow}.json").read_text())
    assert run_text(capsys, "plan", trace, slow, "--policy", "none")[2] == ""
    record["links"]["inter"]["bandwidth_bit_per_s"] = 100  # Gbit/s
    record["device"]["memory_byte_per_s"] = 900  # GB/s
    record["links"]["intra"]["latency_s"] = 10  # us
    machine.write_text(json.dumps(record))
    published = {"model": "m", "source": "a test", "order": "backward"}
    tensors = [{"name": "a", "numel": 10, "ready_us": 0}, {"name": "b", "numel": 1 << 20, "ready_us": 21}]  # ms
    Path(trace).write_text(json.dumps(published | {"tensors": tensors}))
    code, _, errors = run_text(capsys, "plan", trace, str(machine), "--policy", "none")
    assert code in (0, 1)
    assert f"{slow}: links.inter.bandwidth_bit_per_s is 100, in bits per second: 100 Gbit/s are 1e11\n" in errors
    assert f"{slow}: device.memory_byte_per_s is 900, in bytes per second: 900 GB/s are 9e11\n" in errors
    assert f"{slow}: links.intra.latency_s is 10, in seconds: 10 us are 1e-5\n" in errors
    assert "m: backward of 1,048,586 elements takes 2.1e-05 s; ready_us is in microseconds" in errors


def described(folder, memory_nbytes):
    """The path of a description of two sites whose devices have some memory."""
    record = json.loads(SHIPPED_MACHINES.joinpath("two-sites-1gbit.json").read_text())
    record["device"]["memory_nbytes"] = memory_nbytes
    path = folder / f"{memory_nbytes}.json"
    path.write_text(json.dumps(record))
    return str(path)


MODEL_NBYTES = 2 * 4 * LAYERS * (NUMEL + 512)


@pytest.mark.parametrize("sweep", [(), ("--sweep", "bandwidth=1gbit,2gbit")])
@pytest.mark.parametrize(
    ("memory_nbytes", "code", "words"),
    [
        (1e9, 0, "Compress with the plan of mergecomp: "),
        (MODEL_NBYTES + 1e6, 1, "Do not compress: it does not fit. Weights and gradients take 8.40 MB, residuals and "),
        (
            MODEL_NBYTES - 1,
            1,
            "Do not compress: it does not fit. Weights and gradients take 8.40 MB on every rank, and ",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_not_advised(trace, tmp_path, capsys, sweep, memory_nbytes, code, words):
    machine = described(tmp_path, memory_nbytes)
    arguments = ("plan", trace, machine, "--policy", "mergecomp", "--compressors", "EFSignSGD", *sweep)
    found, shown, _ = run_text(capsys, *arguments)
    assert found == code and words in shown
    assert "Memory of a rank: 8.40 MB for weights and gradients, " in shown and "; it has " in shown
    memory = run_json(capsys, *arguments)[1]["memory"]
    assert memory["model_nbytes"] == MODEL_NBYTES and memory["has_nbytes"] == memory_nbytes
    assert memory["fits"] == (code == 0) == (MODEL_NBYTES + memory["plan_nbytes"] <= memory_nbytes)
    assert memory["plan_nbytes"] > 1e6
    if sweep:
        assert shown.count("does not pay; it does not fit") == (0 if code == 0 else 2)
        assert ("Compression by mergecomp pays at no bandwidth" in shown) == (code == 1)


def test_a_model_that_does_not_fit_is_not_advised_whatever_is_faster(trace, tmp_path, capsys):
    code, shown, _ = run_text(capsys, "plan", trace, described(tmp_path, 1e6), "--policy", "none")
    assert code == 1 and "Data-parallel training needs that with any plan." in shown


def test_an_explanation_says_whether_the_plan_fits(trace, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    named = ("--policy", "all", "--compressors", "EFSignSGD")
    run_text(capsys, "plan", trace, "two-sites-1gbit", *named, "-o", plan)
    for memory_nbytes in (1e9, 1e7):
        explain = ("explain", trace, described(tmp_path, memory_nbytes), plan, "--messages")
        code, shown, _ = run_text(capsys, *explain, "0")
        assert code == 0 and "Memory of a rank: " in shown
        assert (f"{plan} does not fit. Weights and gradients take " in shown) == (memory_nbytes < 1e9)
        assert run_json(capsys, *explain, "0")[1]["memory"]["fits"] == (memory_nbytes == 1e9)


def test_buckets_count_where_gradients_are_copied_out_of_them(tmp_path, capsys):
    nbytes = []
    for copies in (False, True):
        trace = tmp_path / f"{copies}.json"
        replace(small_trace(buckets=True), copies_gradients=copies).save(trace)
        found = run_json(capsys, "plan", str(trace), "two-sites-1gbit", "--policy", "none")[1]
        nbytes.append(found["memory"]["model_nbytes"])
    assert nbytes == [MODEL_NBYTES, MODEL_NBYTES * 3 // 2]


def test_a_machine_that_does_not_say_its_memory(trace, capsys):
    shown = run_text(capsys, "plan", trace, "lab", "--policy", "all")[1]
    assert "; the machine does not say how much it has. " in shown
    found = run_json(capsys, "plan", trace, "lab", "--policy", "all")[1]["memory"]
    assert found["has_nbytes"] is None and found["fits"] is None


@pytest.mark.parametrize("name", machine_names())
def test_no_shipped_machine_has_a_slip(name):
    assert slips_of_machine(load_machine(name)) == []


def test_a_profile_of_another_release_is_refused(trace, tmp_path, capsys):
    machine = write_profile(tmp_path, "Cast16", stamp=replace(STAMP, gckernels="0.0.1"))
    code, shown, errors = run_text(capsys, "plan", trace, machine)
    assert code == 3 and shown == "" and "gckernels 0.0.1 has measured it, and this is " in errors
    assert errors.endswith("gckernels profile -o FILE measures a machine\n")


def test_prices_beyond_the_measured_sizes_are_in_the_results(tmp_path, capsys):
    small = small_trace()
    tensors = tuple(replace(each, numel=64 * each.numel, shape=None) for each in small.tensors)
    trace, machine = tmp_path / "large.json", write_profile(tmp_path, "Cast16")
    replace(small, tensors=tensors).save(trace)
    arguments = ("plan", str(trace), machine, "--policy", "none")
    _, found = run_json(capsys, *arguments)
    assert any("beyond 10000000 bytes" in reason for reason in found["assumptions"])
    assert "not measured as such: AllReduce flat beyond 10000000 bytes" in run_text(capsys, *arguments)[2]


def test_errors_that_the_trace_does_not_have_are_assumed(tmp_path, capsys):
    machine, arguments = "two-sites-1gbit", ("--compressors", "Cast16", "EFSignSGD", "--policy", "none")
    bare = write_small_trace(tmp_path)
    shown = run_text(capsys, "plan", bare, machine, *arguments)[1]
    assert "Errors are assumed, as on synthetic gradients, where the trace has none: Cast16, EFSignSGD." in shown
    small, measured = small_trace(), tmp_path / "measured.json"
    errors = {str(gckernels.EFSignSGD()): 0.6}
    replace(small, tensors=tuple(replace(each, errors=errors) for each in small.tensors)).save(measured)
    _, found = run_json(capsys, "plan", str(measured), machine, *arguments)
    assert found["assumed_errors"] == ["Cast16"]


def test_everything_from_a_description_is_called_estimated(trace, tmp_path, capsys):
    machine, plan, step = "two-sites-1gbit", str(tmp_path / "plan.json"), str(tmp_path / "step.json")
    estimated = "All times are estimated, +-25 %: the machine is described, not measured."
    for policy in ("none", "all"):  # one pays, one does not
        assert estimated in run_text(capsys, "plan", trace, machine, "--policy", policy, "-o", plan)[1]
    explain = ("explain", trace, machine, plan, "--messages", "0")
    assert estimated in run_text(capsys, *explain, "--perfetto", step)[1]
    assert f'"{plan}, estimated"' in Path(step).read_text()
    unit = (*explain, "--unit", "2.weight")
    assert estimated in run_text(capsys, *unit)[1] and run_json(capsys, *unit)[1]["estimated"]
    assert not run_json(capsys, "plan", trace, write_profile(tmp_path, "Cast16"), "--policy", "none")[1]["estimated"]


@pytest.mark.parametrize("rest_us", [None, 50_000])
def test_a_trace_of_backward_alone_promises_no_step(tmp_path, capsys, rest_us):
    tensors = [{"name": f"{each}.weight", "numel": 1 << 20, "ready_us": 1000 * each} for each in range(4)]
    record = {"model": "m", "source": "a test", "order": "backward", "tensors": tensors}
    trace, plan, machine = tmp_path / "published.json", str(tmp_path / "plan.json"), "two-sites-1gbit"
    trace.write_text(json.dumps(record | ({} if rest_us is None else {"rest_us": rest_us})))
    whole, lines = rest_us is not None, []
    for arguments in (
        ("plan", str(trace), machine, "--policy", "all", "-o", plan),
        ("plan", str(trace), machine, "--policy", "all", "--sweep"),
        ("explain", str(trace), machine, plan, "--messages", "0"),
        ("explain", str(trace), machine, plan, "--unit", "0.weight"),
    ):
        code, shown, _ = run_text(capsys, *arguments)
        assert code == 0 and ("step takes" in shown) == whole
        assert ("ackward and synchronisation take " in shown) != whole
        assert ("The trace has neither forward nor optimizer: " in shown) != whole
        assert run_json(capsys, *arguments)[1]["whole_step"] == whole
        lines.append(shown)
    assert f"forward and optimizer {'50.0 ms' if whole else 'not known'}." in lines[0]
