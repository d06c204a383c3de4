"""``diff``, ``apply`` and ``merge``: the same bits, or an error before anything is written."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch

from gckernels import patches
from patch_weights import DTYPES, bits, changed, equal, random_bits, trained
from processes import output_of

SHAPES = ((31, 40), (7,), (), (0, 3), (3, 1, 5))


def every_kind(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind and of many shapes, with any patterns."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{str(dtype)[6:]}.{number}": random_bits(dtype, shape, generator)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_the_result_has_the_same_bits(share):
    old = every_kind()
    new = changed(old, share, torch.Generator().manual_seed(1))
    replica = copied(old)
    assert patches.apply(patches.diff(old, new), replica) is None
    assert equal(replica, new) and patches.digest(replica) == patches.digest(new)


def test_any_pattern_becomes_any_other():
    old, new = every_kind(1), every_kind(2)
    data, replica = patches.diff(old, new), copied(old)
    patches.apply(data, replica)
    assert equal(replica, new)
    assert len(data) < 1.02 * sum(bits(each).numel() for each in old.values()) + 200


def test_chunks_run_over_the_borders_of_tensors():
    """Many small tensors take hardly more than a large one."""
    old, new = trained(2**17, 1e-6, torch.Generator().manual_seed(0))
    apart = [{f"{number:04}": part for number, part in enumerate(each.split(300))} for each in (old, new)]
    sizes = [len(patches.diff({"": old}, {"": new})), len(patches.diff(*apart))]
    assert sizes[0] == sizes[1]


def test_large_and_tiny_tensors():
    generator = torch.Generator().manual_seed(0)
    old, new = trained(2**21 + 77, 1e-6, generator)
    tensors = {"a": old, "b": torch.ones(1).bfloat16(), "c": torch.zeros(0).bfloat16(), "d": torch.tensor(3)}
    later = tensors | {"a": new, "b": torch.full((1,), -0.0).bfloat16()}
    replica = copied(tensors)
    patches.apply(patches.diff(tensors, later), replica)
    assert equal(replica, later)


def test_no_change_takes_an_empty_patch():
    old = every_kind()
    assert len(patches.diff(old, copied(old))) < 180


def test_nothing_at_all():
    patches.apply(patches.diff({}, {}), {})


def test_merged_patches_do_what_both_do():
    first = every_kind()
    second = changed(first, 0.1, torch.Generator().manual_seed(1))
    third = changed(second, 0.1, torch.Generator().manual_seed(2))
    parts = patches.diff(first, second), patches.diff(second, third)
    replica, before = copied(first), copied(first)
    merged = patches.merge(*parts, first)
    assert equal(first, before), "merge writes nothing"
    patches.apply(merged, replica)
    assert equal(replica, third)
    with pytest.raises(patches.PatchError, match="second does not begin where first ends"):
        patches.merge(parts[1], parts[0], second)


def test_a_merged_patch_is_shorter():
    generator = torch.Generator().manual_seed(0)
    masters, steps = torch.randn(2**18, generator=generator) * 0.02, []
    for _ in range(4):
        steps.append({"w": masters.bfloat16()})
        masters = masters + 5e-7 * torch.randn(2**18, generator=generator)
    parts = [patches.diff(*pair) for pair in itertools.pairwise(steps)]
    merged = patches.merge(patches.merge(parts[0], parts[1], steps[0]), parts[2], steps[0])
    assert merged == patches.diff(steps[0], steps[3])
    assert len(merged) < 0.9 * sum(map(len, parts))


def test_another_base_is_refused_before_anything_is_written():
    old = every_kind()
    new = changed(old, 0.1, torch.Generator().manual_seed(1))
    data = patches.diff(old, new)
    for replica in (copied(new), changed(old, 0.002, torch.Generator().manual_seed(3))):
        before = copied(replica)
        with pytest.raises(patches.PatchError, match="their digest is another one"):
            patches.apply(data, replica)
        assert equal(replica, before)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["damaged", "sealed anew"])
def test_damage_of_any_byte_is_noticed(is_sealed):
    """Also where the seal is right, so that the decoder itself must notice; versions are the chain's affair."""
    generator = torch.Generator().manual_seed(0)
    old = {"a": torch.randn(150, generator=generator).bfloat16(), "b": random_bits(torch.int8, (40,), generator)}
    new = changed(old, 0.2, generator)
    data = patches.diff(old, new)
    for place in range(len(data) - 32 * is_sealed):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            if is_sealed:
                damaged[-32:] = hashlib.sha256(damaged[:-32]).digest()
            replica = copied(old)
            try:
                patches.apply(bytes(damaged), replica)
                assert is_sealed and (8 <= place < 24 or equal(replica, new)), place
            except patches.PatchError:
                assert equal(replica, old), place


def test_shorter_and_longer_bytes_are_refused():
    old = {"a": torch.randn(50).bfloat16()}
    data = patches.diff(old, {"a": -old["a"]})
    for wrong in (b"", b"GKp1", data[:-1], data + b"\0", data[:40], bytes(len(data))):
        with pytest.raises(patches.PatchError):
            patches.apply(wrong, copied(old))


def test_a_key_is_needed_on_both_sides():
    old = {"a": torch.randn(50).bfloat16()}
    new = {"a": old["a"] + 1}
    signed, plain = patches.diff(old, new, key=b"secret"), patches.diff(old, new)
    replica = copied(old)
    for data, key in ((signed, None), (signed, b"other"), (plain, b"secret")):
        with pytest.raises(patches.PatchError):
            patches.apply(data, replica, key=key)
    assert equal(replica, old)
    patches.apply(signed, replica, key=b"secret")
    assert equal(replica, new)


def test_tensors_that_are_not_contiguous():
    generator = torch.Generator().manual_seed(0)
    old = {"a": torch.randn(20, 30, generator=generator).bfloat16(), "b": torch.randn(8, 4, generator=generator)}
    new = changed(old, 0.3, generator)
    views = {"a": old["a"].t().contiguous().t(), "b": torch.randn(8, 9)[:, 2:6].copy_(old["b"])}
    assert not views["a"].is_contiguous() and not views["b"].is_contiguous()
    assert patches.diff(views, {name: each.t().contiguous().t() for name, each in new.items()}) == patches.diff(
        old, new
    )
    patches.apply(patches.diff(old, new), views)
    assert equal(views, new)


def test_tied_tensors_are_one():
    weight = torch.randn(2000).bfloat16()
    tied, later = {"head": weight, "embedding": weight}, weight.clone()
    later[:100] += 1
    data = patches.diff(tied, {"head": later, "embedding": later})
    assert len(data) == len(patches.diff({"embedding": weight}, {"embedding": later}))
    apart = {"head": weight.clone(), "embedding": weight.clone()}
    with pytest.raises(patches.PatchError, match="names, shapes or types"):
        patches.apply(data, apart)
    patches.apply(data, tied)
    assert torch.equal(weight, later)


def test_what_has_no_bits_of_its_own_is_refused():
    one = torch.zeros(6).bfloat16()
    wrong = {
        "expanded": {"a": one[:1].expand(6)},
        "overlap": {"a": one[:4], "b": one[2:]},
        "dense tensor": {"a": torch.zeros(3, 3).to_sparse()},
    }
    for reason, tensors in wrong.items():
        with pytest.raises(ValueError, match=reason):
            patches.digest(tensors)
    with pytest.raises(ValueError, match="dense tensor"):
        patches.digest({"a": torch.empty(3, device="meta")})
    with pytest.raises(TypeError, match="tensors must be tensors by name"):
        patches.diff({"a": 3}, {"a": 3})


def test_tensors_that_differ_in_more_than_values_are_refused():
    one = {"a": torch.zeros(6).bfloat16()}
    for other, words in (
        ({"a": torch.zeros(6).half()}, "a is torch.bfloat16 .6. here and torch.float16 .6. there"),
        ({"a": torch.zeros(2, 3).bfloat16()}, "a is torch.bfloat16 .6. here and torch.bfloat16 .2, 3. there"),
        ({"b": torch.zeros(6).bfloat16()}, "a is torch.bfloat16 .6. here and absent there"),
    ):
        with pytest.raises(ValueError, match=words):
            patches.diff(one, other)


def test_results_do_not_depend_on_threads(monkeypatch):
    import gckernels

    old, new = ({"w": each} for each in trained(3 * 2**20, 1e-6, torch.Generator().manual_seed(0)))
    found = []
    for threads in (1, 3):
        gckernels.set_num_threads(threads)
        found.append(patches.diff(old, new))
    gckernels.set_num_threads(None)
    assert found[0] == found[1]


def test_tensors_of_inference_and_parameters_can_be_written():
    old = torch.randn(100).bfloat16()
    new = old + 1
    data = patches.diff({"a": old}, {"a": new})
    with torch.inference_mode():
        for_inference = old.clone()
    parameter = torch.nn.Parameter(old.clone())
    for tensor in (for_inference, parameter):
        patches.apply(data, {"a": tensor})
        assert torch.equal(tensor, new)
    assert parameter.is_leaf and parameter.requires_grad
    parameter.sum().backward()


LOADED = """
import sys
import gckernels
assert not [name for name in sys.modules if name.startswith("gckernels.patches")]
from gckernels import patches
assert not [name for name in sys.modules if name.startswith(("gckernels.sync", "gckernels.planner", "http.server"))]
assert len(patches.__all__) <= 10
"""


def test_nothing_is_loaded_that_is_not_asked_for():
    output_of("-c", LOADED, timeout_s=100)
