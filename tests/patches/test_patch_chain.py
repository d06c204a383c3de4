"""Publishers and followers: equal bit for bit, or an error that says what to do."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from torch import nn

from gckernels import patches
from gckernels.patches.format.changes import Change
from patch_stores import Cut, Memory, Unreliable, moments
from patch_weights import DTYPES, bits, changed, equal, random_bits


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": (torch.randn(700, 3, generator=generator) * 0.02).bfloat16(),
        "b": random_bits(torch.int8, (50,), generator),
        "c": random_bits(torch.float32, (5,), generator).view(torch.int32),
    }


def blank(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def step(tensors, seed: int, share: float = 0.02) -> None:
    """Change the tensors in place."""
    for name, tensor in changed(tensors, share, torch.Generator().manual_seed(seed)).items():
        tensors[name].copy_(tensor)


def brought(follower) -> int | None:
    """Fetch and apply; the version where the way began."""
    staged = follower.fetch()
    if staged is None:
        return follower.version
    follower.apply(staged)
    return staged.base


def followed(tensors, store):
    """``(publisher, replica, follower)`` of tensors in an empty store; the replica has version 0."""
    publisher = patches.publish(tensors, store)
    replica = blank(tensors)
    follower = patches.follow(replica, store)
    brought(follower)
    return publisher, replica, follower


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return Memory() if request.param == "memory" else patches.Folder(tmp_path / "store")


def test_followers_have_the_published_bits(store):
    tensors = weights()
    publisher = patches.publish(tensors, store, anchor_every=4)
    replica, late = blank(tensors), blank(tensors)
    follower = patches.follow(replica, store)
    assert follower.version is None and follower.digest is None
    for version in range(1, 11):
        assert brought(follower) == (None if version == 1 else version - 2)
        assert equal(replica, tensors) and follower.fetch() is None
        assert follower.digest == publisher.digest == patches.digest(replica)
        step(tensors, version)
        assert publisher.publish() == publisher.version == version
    newcomer = patches.follow(late, store)
    assert brought(newcomer) is None and newcomer.version == 10 and equal(late, tensors)


def test_nothing_is_there_before_the_first_version():
    replica, store = blank(weights()), Memory()
    follower = patches.follow(replica, store)
    assert follower.fetch() is None and follower.version is None
    patches.publish(weights(), store)
    assert brought(follower) is None and follower.version == 0 and equal(replica, weights())


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(0, 3)}, {"a": torch.ones(())}], ids=["none", "empty", "one"])
def test_hardly_any_weights(tensors):
    """Nothing changes in these versions."""
    publisher = patches.publish(tensors, store := Memory(), dtype=torch.float16)
    replica = {name: tensor.half() * 0 for name, tensor in tensors.items()}
    follower = patches.follow(replica, store)
    for version in range(3):
        brought(follower)
        assert follower.version == version and equal(replica, {name: t.half() for name, t in tensors.items()})
        publisher.publish()


def test_every_kind_of_pattern_travels():
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): random_bits(dtype, (40, 3), generator) for dtype in DTYPES if dtype != torch.float32}
    tensors["-0"], tensors["empty"] = torch.tensor([-0.0, 0.0, torch.nan, -torch.inf]).half(), torch.zeros(0, 2).half()
    publisher = patches.publish(tensors, store := Memory())
    replica = blank(tensors)
    follower = patches.follow(replica, store)
    for seed in range(3):
        brought(follower)
        assert equal(replica, tensors)
        step(tensors, seed, share=0.3)
        publisher.publish()


def test_a_replica_that_is_behind_gets_all_changes_in_one():
    tensors, store = weights(), Memory()
    publisher, replica, follower = followed(tensors, store)
    before = {name: tensor.clone() for name, tensor in replica.items()}
    for seed in range(5):
        step(tensors, seed)
        publisher.publish()
    step(tensors, 4)  # takes back what the step before did: the change of the lowest bits
    publisher.publish()
    staged = follower.fetch()
    assert staged.base == 0 and staged.version == 6 and equal(replica, before)
    seen = {name: tensor.clone() for name, tensor in before.items()}
    for name, indices, values in staged.changes():
        assert (indices.diff() > 0).all() and values.dtype == seen[name].dtype
        assert not torch.equal(bits(seen[name].view(-1)[indices]), bits(values))
        seen[name].view(-1)[indices] = values
    assert equal(seen, tensors)
    follower.apply(staged)
    assert equal(replica, tensors)


def test_changes_of_an_anchor_are_all_elements():
    tensors, store = weights(), Memory()
    patches.publish(tensors, store)
    seen = blank(tensors)
    for name, indices, values in patches.follow(blank(tensors), store).fetch().changes():
        seen[name].view(-1)[indices] = values
    assert equal(seen, tensors)


def test_apply_refuses_another_base_before_it_writes():
    tensors, store = weights(), Memory()
    publisher, replica, follower = followed(tensors, store)
    step(tensors, 0)
    publisher.publish()
    first = follower.fetch()
    follower.apply(first)
    with pytest.raises(patches.PatchError, match="fetched for version 0, and the replica has 1"):
        follower.apply(first)
    assert equal(replica, tensors) and follower.version == 1
    step(tensors, 1)
    publisher.publish()
    second = follower.fetch()
    step(replica, 1)  # somebody writes where the patch writes
    before = {name: tensor.clone() for name, tensor in replica.items()}
    with pytest.raises(patches.PatchError, match="is not what it was when the patch was read"):
        follower.apply(second)
    assert equal(replica, before)


def test_other_weights_than_those_of_the_version_lead_to_an_anchor_or_an_error():
    tensors, store = weights(), Memory()
    publisher, replica, follower = followed(tensors, store)
    replica["a"].view(torch.int16)[::7] ^= 0x0100  # other exponents, so other classes
    step(tensors, 0)
    publisher.publish()
    assert brought(follower) is None and equal(replica, tensors)


def test_a_failure_inside_apply_leaves_no_version(monkeypatch):
    tensors, store = weights(), Memory()
    publisher, replica, follower = followed(tensors, store)
    step(tensors, 0)
    publisher.publish()
    staged, calls = follower.fetch(), []

    def fails(change):
        calls.append(change)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Change, "write", fails)
        with pytest.raises(RuntimeError):
            follower.apply(staged)
    assert follower.version is None and follower.digest is None
    assert brought(follower) is None and equal(replica, tensors) and follower.version == 1


@pytest.mark.parametrize("anchor_every", [1, 3])
def test_nothing_is_pruned_that_the_newest_version_needs(tmp_path, anchor_every):
    tensors, store = weights(), patches.Folder(tmp_path)
    publisher = patches.publish(tensors, store, anchor_every=anchor_every)
    followers = []
    for version in range(1, 12):
        replica = blank(tensors)
        followers.append((patches.follow(replica, store), replica))
        assert brought(followers[-1][0]) is None and equal(replica, tensors)
        step(tensors, version)
        publisher.publish()
        bases = []
        for follower, replica in followers:
            bases.append(brought(follower))
            assert equal(replica, tensors)
        assert bases == [version - 1] * version
    numbers = [int(name.split("-")[1].split(".")[0]) for name in store.names() if name.startswith("patch-")]
    newest = 11 - 11 % anchor_every
    assert min(numbers) == newest - anchor_every, "the anchor before the last one is the oldest version"
    slow, replica = patches.follow(blank(tensors), store), None
    assert slow.fetch().version == 11


def test_a_slow_replica_takes_an_anchor_where_patches_are_gone(tmp_path):
    tensors, store = weights(), patches.Folder(tmp_path)
    publisher = patches.publish(tensors, store, anchor_every=2)
    replica = blank(tensors)
    follower = patches.follow(replica, store)
    brought(follower)
    for seed in range(9):
        step(tensors, seed)
        publisher.publish()
    assert brought(follower) is None and equal(replica, tensors)


def test_a_publisher_that_starts_again_goes_on_with_the_chain(store):
    tensors = weights()
    publisher = patches.publish(tensors, store)
    step(tensors, 0)
    publisher.publish()
    replica = blank(tensors)
    follower = patches.follow(replica, store)
    brought(follower)
    resumed = weights(seed=5) | {"a": tensors["a"].clone()}  # from a checkpoint: other weights than the last version
    step(resumed, 1)
    again = patches.publish(resumed, store)
    assert again.version == 1 and again.digest == publisher.digest
    assert again.publish() == 2
    assert brought(follower) == 1 and equal(replica, resumed)


def test_two_publishers_do_not_mix():
    one, other, store = weights(), weights(), Memory()
    publishers = [patches.publish(tensors, store) for tensors in (one, other)]
    step(one, 1)
    step(other, 2)
    publishers[0].publish()
    with pytest.raises(patches.PatchError, match="another publisher has written version 1"):
        publishers[1].publish()
    replica = blank(one)
    brought(patches.follow(replica, store))
    assert equal(replica, one)


def test_a_store_of_another_model_is_refused():
    patches.publish(weights(), store := Memory())
    with pytest.raises(patches.PatchError, match=r"another model: a is torch.float16 .3. here .*another folder"):
        patches.publish({"a": torch.zeros(3).half()}, store)


def test_most_of_the_weights_changed_is_an_anchor_by_itself(tmp_path):
    tensors, store = {"a": weights()["a"]}, patches.Folder(tmp_path)
    publisher = patches.publish(tensors, store)
    replica = blank(tensors)
    follower = patches.follow(replica, store)
    for seed in range(4):
        brought(follower)
        tensors["a"].copy_((torch.randn(700, 3, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16())
        publisher.publish()
        assert publisher.nbytes < 0.8 * bits(tensors["a"]).numel()
    assert brought(follower) is None and equal(replica, tensors)
    assert len(store.names()) == 6, "two versions with their objects, the layout, and latest"


def test_failures_of_the_store_at_any_call(tmp_path):
    """The next call of the publisher goes on, and all replicas are equal, whatever was written."""
    for number in range(14):
        for is_done in (False, True):
            folder = patches.Folder(tmp_path / f"{number}{is_done}")
            tensors = weights()
            publisher = patches.publish(tensors, folder, anchor_every=2)
            replica = blank(tensors)
            follower = patches.follow(replica, folder)
            brought(follower)
            publisher._store = Unreliable(folder, 1 + number, is_done)
            failed = False
            for seed in range(4):
                step(tensors, seed)
                try:
                    publisher.publish()
                except Cut:
                    failed = True
                    break
            brought(follower)
            assert patches.digest(replica) == follower.digest
            publisher._store = folder
            step(tensors, 77)
            version = publisher.publish()
            assert brought(follower) is not None and follower.version == version and equal(replica, tensors)
            late = blank(tensors)
            brought(patches.follow(late, folder))
            assert equal(late, tensors)
            assert failed or number > 10


def test_a_follower_whose_store_fails_stays_where_it_is():
    tensors, store = weights(), Memory()
    publisher, replica, follower = followed(tensors, store)
    step(tensors, 0)
    publisher.publish()
    for number, is_done in moments(0, 8, until=5):
        follower._store = Unreliable(store, number, is_done)
        try:
            assert follower.fetch() is not None
        except Cut:
            assert follower.version == 0 and patches.digest(replica) == follower.digest
    follower._store = store
    assert brought(follower) == 0 and equal(replica, tensors)


def test_damage_in_the_store_is_an_error_or_a_way_around(tmp_path):
    tensors, store = weights(), Memory()
    publisher = patches.publish(tensors, store)
    step(tensors, 0)
    publisher.publish()
    whole = dict(store.objects)
    for name in sorted(whole):
        for place in range(0, len(whole[name]), 1 + len(whole[name]) // 25):
            store.objects = dict(whole)
            damaged = bytearray(whole[name])
            damaged[place] ^= 0x21
            store.objects[name] = bytes(damaged)
            replica = blank(tensors)
            try:
                follower = patches.follow(replica, store)
                brought(follower)
                assert follower.version in (0, 1) and patches.digest(replica) == follower.digest
            except (patches.PatchError, ValueError):
                assert equal(replica, blank(tensors))
    for name in whole:
        store.objects = {other: data for other, data in whole.items() if other != name}
        replica = blank(tensors)
        try:
            brought(patches.follow(replica, store))
            assert equal(replica, tensors) or (name == "latest" and equal(replica, blank(tensors)))
        except patches.PatchError as error:
            assert name in str(error) and equal(replica, blank(tensors))


def test_a_key_protects_all_objects():
    tensors, store = weights(), Memory()
    publisher = patches.publish(tensors, store, key=b"secret")
    step(tensors, 0)
    publisher.publish()
    for key in (None, b"other"):
        replica = blank(tensors)
        with pytest.raises(patches.PatchError, match="key"):
            patches.follow(replica, store, key=key).fetch()
    brought(patches.follow(replica, store, key=b"secret"))
    assert equal(replica, tensors)


class Tied(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.head = nn.Linear(8, 30, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight


def test_modules_with_masters_in_fp32():
    """The casts are made while the weights are encoded; buffers are published, and tied weights once."""
    torch.manual_seed(0)
    model, replica = Tied(torch.float32), Tied(torch.bfloat16)
    publisher = patches.publish(model, store := Memory())
    follower = patches.follow(replica, store)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for version in range(3):
        brought(follower)
        for name, tensor in model.state_dict().items():
            mine = replica.state_dict()[name]
            assert torch.equal(mine, tensor.to(mine.dtype)), name
        assert replica.head.weight is replica.embedding.weight
        model.head(model.norm(model.embedding.weight)).pow(2).sum().backward()
        optimizer.step()
        publisher.publish()
        assert publisher.version == version + 1


def test_a_replica_with_other_tensors_is_refused():
    tensors, store = weights(), Memory()
    patches.publish(tensors, store)
    more, fewer = blank(tensors) | {"d": torch.zeros(3)}, blank(tensors)
    del fewer["b"]
    for replica, words in (
        (more, "d is in the replica, and not published; names= maps"),
        (fewer, "b is published, and not in the replica"),
        (blank(tensors) | {"a": torch.zeros(700, 3)}, "a is torch.float32 .700, 3., and torch.bfloat16 .700, 3. is"),
    ):
        with pytest.raises(ValueError, match=words):
            patches.follow(replica, store)
    with pytest.raises(TypeError, match="a module or tensors by name"):
        patches.follow(3, store)
    model, untied = Tied(torch.bfloat16), Tied(torch.bfloat16)
    patches.publish(model, other := Memory())
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"head.weight is not the same memory as embedding.weight"):
        patches.follow(untied, other)


def test_names_lead_into_fused_tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, 6, generator=generator).bfloat16() for name in ("q", "k", "v")}
    publisher = patches.publish(tensors, store := Memory())
    fused, by_columns = torch.zeros(12, 6).bfloat16(), torch.zeros(4, 18).bfloat16()
    parts = dict(zip(("q", "k", "v"), fused.split(4), strict=True))
    follower = patches.follow({}, store, names=parts.__getitem__)
    brought(follower)
    step(tensors, 0)
    publisher.publish()
    brought(follower)
    assert torch.equal(fused, torch.cat([*tensors.values()]))
    parts = dict(zip(("q", "k", "v"), by_columns.split(6, dim=1), strict=True))
    with pytest.raises(ValueError, match="q and k lie in ranges of memory that overlap"):
        patches.follow({}, store, names=parts.__getitem__)


def test_wrong_arguments_are_refused():
    for settings, words in (
        ({"anchor_every": 0}, "anchor_every must be a positive integer, got 0"),
        ({"dtype": torch.float32}, "dtype must be a floating-point type of 8 or 16 bits, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            patches.publish(weights(), Memory(), **settings)
    publisher = patches.publish(tensors := weights(), Memory())
    tensors["d"] = torch.zeros(3)
    with pytest.raises(ValueError, match="the model has changed: d is"):
        publisher.publish()


def _publish_for_ever(path) -> None:
    torch.set_num_threads(1)
    drawn = random.Random(time.time_ns())
    tensors = weights()
    publisher = patches.publish(tensors, patches.Folder(path), anchor_every=3)
    while True:
        step(tensors, drawn.randrange(10**6))
        publisher.publish()


def _follow_for_ever(path) -> None:
    torch.set_num_threads(1)
    replica = blank(weights())
    follower = patches.follow(replica, patches.Folder(path))
    while True:
        brought(follower)
        assert follower.version is None or patches.digest(replica) == follower.digest


def _killed(work, path, after_s: float) -> None:
    """Run ``work`` in a child process, kill it, and see that nothing else has ended it."""
    child = os.fork()
    if not child:
        try:
            work(path)
        finally:
            os._exit(3)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the process has ended by itself, with an error"


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path, kills):
    """A publisher and a reader are killed again and again. After each, an old replica and a new one are equal."""
    drawn, store = random.Random(0), patches.Folder(tmp_path)
    replica = blank(weights())
    patches.publish(weights(), warm := Memory()).publish()  # compiles, which children have no time for
    brought(patches.follow(replica, warm))
    follower, versions = patches.follow(replica, store), [-1]
    for number in range(kills):
        work = _follow_for_ever if number % 5 == 4 and versions[-1] >= 0 else _publish_for_ever
        _killed(work, tmp_path, drawn.uniform(0.005, 0.15))
        brought(follower)
        late = blank(weights())
        newcomer = patches.follow(late, store)
        brought(newcomer)
        assert equal(late, replica) and newcomer.version == follower.version
        if follower.version is not None:
            assert patches.digest(replica) == follower.digest
            versions.append(follower.version)
    assert versions == sorted(versions) and versions[-1] > kills / 10
    tensors = weights(seed=9)
    patches.publish(tensors, store).publish()
    brought(follower)
    assert equal(replica, tensors)
