"""Files of machines: what is written is read again, and whatever is wrong with a file is named."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gckernels import Identity
from gckernels.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.planner.machines.description import Description
from gckernels.planner.machines.files import (
    description_to_json,
    load_machine,
    machine_from_text,
    machine_names,
)
from gckernels.planner.machines.machine import MachineError, Overheads, Shared
from gckernels.planner.machines.profile import Profile, Stamp
from gckernels.planner.machines.scaling import scaled
from gckernels.sync.programs.stages import StageKind
from gckernels.sync.programs.steps import Level, Place
from gckernels.sync.programs.topology import Topology

SHIPPED = machine_names()


def description(name: str) -> Description:
    """A shipped description."""
    machine = load_machine(name)
    assert isinstance(machine, Description)
    return machine


RECORD = description_to_json(description("espresso-pcie"))


def at(record: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The object of a dotted path, and the last key."""
    *keys, last = path.split(".")
    for key in keys:
        record = record[key]
    return record, last


def changed(path: str, value: Any) -> str:
    """The text of a valid file in which one entry is another."""
    record = copy.deepcopy(RECORD)
    inside, last = at(record, path)
    inside[last] = value
    return json.dumps(record)


def without(path: str) -> str:
    """The text of a valid file in which one entry is missing."""
    record = copy.deepcopy(RECORD)
    inside, last = at(record, path)
    del inside[last]
    return json.dumps(record)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_are_read_and_written_again(name, tmp_path):
    machine = load_machine(name)
    assert isinstance(machine, Description) and machine.name == name and machine.about
    assert machine.estimated and machine.margin == 0.25
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(description_to_json(machine)))
    assert load_machine(path) == machine
    assert load_machine(str(path)) == machine


@pytest.mark.parametrize("is_one", [True, False])
def test_a_medium_is_read_and_written_again(is_one):
    machine = machine_from_text(changed("links.inter.one_medium", is_one), "my.json")
    assert machine.links[Shared.INTER].one_medium is is_one
    assert description_to_json(machine)["links"]["inter"].get("one_medium", False) is is_one


def test_there_are_the_machines_of_the_papers_and_others():
    assert {*SHIPPED} >= {"espresso-nvlink", "espresso-pcie", "hipress-v100", "utility-p3-8xlarge"}
    assert {*SHIPPED} >= {"h100-400gbit", "two-sites-1gbit", "lab"}


@pytest.mark.parametrize("name", SHIPPED)
def test_ranks_have_the_memory_of_their_device_or_a_part_of_their_host(name):
    machine = load_machine(name)
    assert machine.memory_nbytes == (None if machine.gpu is None else machine.gpu.memory_nbytes)
    assert scaled(machine, codec_speed=2.0).memory_nbytes == machine.memory_nbytes
    on_host = replace(machine, gpu=None, copies=None, codecs={}, host=replace(machine.host, memory_nbytes=8e9))
    assert on_host.memory_nbytes == 8e9 / machine.topology.devices


def test_names_that_do_not_exist_list_those_that_do():
    with pytest.raises(MachineError, match=r"'espresso'.*no such file.*espresso-nvlink, espresso-pcie"):
        load_machine("espresso")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[1, 2]", b"{", b'{"a": NaN}', b"[" * 100000, b"1" * 5000])
def test_files_that_are_no_json_are_refused(content, tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(MachineError, match=r"machine\.json(: | must be an object )"):
        load_machine(path)
    with pytest.raises(MachineError, match="cannot be read"):
        load_machine(tmp_path)


@pytest.mark.parametrize("name", ["no\0name", "x" * 5000])
def test_names_that_no_file_can_have_are_refused(name):
    with pytest.raises(MachineError):
        load_machine(name)


def test_every_truncation_is_refused():
    text = json.dumps(RECORD)
    for size in range(0, len(text) - 1, 37):
        with pytest.raises(MachineError, match=r"m\.json: no JSON, or cut off, .*gckernels profile"):
            machine_from_text(text[:size], "m.json")


FAULTS = [
    ("format", "gckernels plan", "format must be one of gckernels machine, gckernels profile, got 'gckernels plan'"),
    ("version", 2, "version must be the integer 1, got 2"),
    ("version", True, "version must be the integer 1, got True"),
    ("name", "", "name must be a text of 1 to 1000 characters, got ''"),
    ("name", 5, "name must be a text, got 5"),
    ("topology", 8, "topology must be an object with machines, devices, got 8"),
    ("topology.machines", 0, "topology.machines must be an integer from 1 to 1048576, got 0"),
    ("topology.machines", 2.0, "topology.machines must be an integer"),
    ("topology.racks", 2, "topology must be an object with no other keys than machines, devices, got one with 'racks'"),
    ("device.kind", "tpu", "device.kind must be one of gpu, cpu, got 'tpu'"),
    ("device.kind", "cpu", "device must be an object with no other keys than kind, got one with 'codec_efficiency'"),
    ("device.memory_byte_per_s", -1, "device.memory_byte_per_s must be .* number above 0 and at most 1e\\+18, got -1"),
    ("device.memory_byte_per_s", 0, "device.memory_byte_per_s must be a finite number above 0"),
    ("device.memory_byte_per_s", True, "device.memory_byte_per_s must be a finite number above 0.*got True"),
    ("device.memory_byte_per_s", 10**400, "device.memory_byte_per_s must be .*got an integer of 1329 bits"),
    ("device.memory_nbytes", 0, "device.memory_nbytes must be a finite number above 0 and at most 1e\\+18, got 0"),
    ("device.memory_nbytes", None, "device.memory_nbytes must be a finite number above 0"),
    ("device.codec_efficiency", 1.1, "device.codec_efficiency must be .* number above 0 and at most 1, got 1.1"),
    ("host.cores", "48", "host.cores must be a finite number above 0 .*got '48'"),
    ("host.call_s", -1e-9, "host.call_s must be a finite number from 0 up"),
    ("links.inter.shared_by", 0, "links.inter.shared_by must be an integer from 1"),
    ("links.inter.one_medium", 1, "links.inter.one_medium must be true or false, got 1"),
    ("links.intra.one_medium", True, "links.intra.one_medium: only links between machines can be one medium"),
    ("links.between", {}, "links must be an object with no other keys than inter, intra, got one with 'between'"),
    ("links.inter", None, "links.inter must be an object with .*, got None"),
    ("copies.latency_s", [], "copies.latency_s must be a finite number from 0 up .*got a list of 0"),
    ("overheads.step_s", 1, "overheads must be an object with no other keys than stage_s, .*got one with 'step_s'"),
    ("codecs.EFSign", {}, "codecs must be an object with no other keys than BlockFP8, .*got one with 'EFSign'"),
    ("codecs.DGC.encode", [[1, 2]], "codecs.DGC.encode must be a list of at least two pairs"),
    ("codecs.DGC.encode", [[1, 2], [3]], r"codecs.DGC.encode\[1\] must be a pair"),
    ("codecs.DGC.encode", [[1, 2], [1, 3]], r"codecs.DGC.encode\[1\] must be of more bytes .*, got \[1, 3\]"),
    ("codecs.DGC.decode", [[1, 2], [3, 1]], r"codecs.DGC.decode\[1\] must be .*no fewer seconds.*, got \[3, 1\]"),
    ("codecs.DGC.recode", [], "codecs.DGC must be an object with no other keys than encode, decode, got one with 'rec"),
    ("sources.copies", 3, r"sources\['copies'\] must be a text, got 3"),
    ("sources.nothing", "a book", r"sources\['nothing'\] must be the source of a number in this file, got a path"),
    ("speed", 3, "must be an object with no other keys than format, .*, got one with 'speed'"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS, ids=lambda each: str(each)[:40])
def test_wrong_entries_are_named(path, value, message):
    with pytest.raises(MachineError, match=f"^my.json:? {message}.*; "):
        machine_from_text(changed(path, value), "my.json")


@pytest.mark.parametrize(
    "path", ["name", "topology.devices", "device", "device.launch_s", "host.cores", "links", "links.inter.efficiency"]
)
def test_missing_entries_are_named(path):
    around, _, last = path.rpartition(".")
    with pytest.raises(MachineError, match=f"^my.json:? ?{around} must be an object with .*, got none with {last};"):
        machine_from_text(without(path), "my.json")


@pytest.mark.parametrize("link", ["inter", "intra"])
def test_links_that_the_topology_needs_must_be_there(link):
    record = json.loads(without(f"links.{link}"))
    record["sources"] = {key: value for key, value in record["sources"].items() if not key.startswith(f"links.{link}")}
    with pytest.raises(MachineError, match=f"links.{link}: is missing; 8 "):
        machine_from_text(json.dumps(record), "my.json")


def test_every_number_needs_a_source():
    for path in RECORD["sources"]:
        record = copy.deepcopy(RECORD)
        del record["sources"][path]
        with pytest.raises(
            MachineError, match=rf"sources must be an object that says where {path}[.\w]* comes from, got none with"
        ):
            machine_from_text(json.dumps(record), "my.json")


def test_a_source_covers_the_numbers_inside_it():
    record = copy.deepcopy(RECORD)
    kept = {key: value for key, value in record["sources"].items() if not key.startswith("links.")}
    record["sources"] = {**kept, "links": "one book"}
    machine = machine_from_text(json.dumps(record), "my.json")
    assert isinstance(machine, Description) and next(iter(machine.links.values())).shared_by == 8
    record["sources"] = {**kept, "lin": "no prefix of a name"}
    with pytest.raises(MachineError, match=r"where links\.inter.bandwidth_bit_per_s comes from"):
        machine_from_text(json.dumps(record), "my.json")


def test_repeated_keys_are_refused():
    text = json.dumps(RECORD).replace('"name":', '"name": "other", "name":', 1)
    with pytest.raises(MachineError, match="the key 'name' occurs twice"):
        machine_from_text(text, "my.json")


def test_the_documented_example_has_every_key_and_is_valid():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "machines.md").read_text()
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    machine = machine_from_text(example, "the page")
    assert isinstance(machine, Description) and not machine.codecs.keys() - {"EFSignSGD"}
    written = description_to_json(machine)
    assert written == json.loads(example) and written.keys() >= RECORD.keys()
    assert all(f"`{name}`" in page for name in SHIPPED)
    for path in _keys({key: value for key, value in written.items() if key not in ("codecs", "sources")}):
        shown = re.sub(r"^links\.\w+\.", "links.*.", path)
        assert f"`{shown}`" in page, shown


def _keys(value: dict[str, Any], path: str = "") -> Iterator[str]:
    """The dotted paths of everything in an object that is no object."""
    for key, inside in value.items():
        if isinstance(inside, dict):
            yield from _keys(inside, f"{path}{key}.")
        else:
            yield path + key


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1e300,
    -1e-300,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    10**30,
    10**400,
    [[0, 0], [1, 1]],
]


def damaged(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with something in it replaced, left out or added."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {other: inside for other, inside in value.items() if other != key}
            case 1:
                return value | {chance.choice(["x", *value, "sources.x"]): chance.choice(JUNK)}
        return value | {key: damaged(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        index = chance.randrange(len(value))
        return [*value[:index], damaged(value[index], chance), *value[index + chance.randrange(2) :]]
    return chance.choice(JUNK)


PROFILE = Profile(
    "two ranks",
    Topology(2),
    Shared.CORES,
    1.0,
    Overheads(),
    (CollectiveCurve("AllReduce", Level.FLAT, Place.DEVICE, Curve((1e3, 1e6), (1e-4, 1e-2), (1e-4, 1e-3), 0.05)),),
    (CodecModel(Identity(), StageKind.ENCODE, Place.DEVICE, Coefficients(1e-5), 1.0, 16, 1 << 20, 2),),
    (CopyCurve(Shared.CORES, Curve((1e3,), (1e-6,), (1e-6,))),),
    {Level.FLAT: 0.9},
    {"codec": 1.0},
    ("two at once",),
    Stamp(("here",), "cpu", "gloo", "2", "1", "2026-11-22", 1.0),
)


def test_a_profile_is_read_and_its_errors_name_the_file(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert load_machine(path) == PROFILE
    path.write_text(json.dumps(PROFILE.to_json() | {"cores": -1}))
    with pytest.raises(MachineError, match=r"profile\.json: cores must be .*got -1"):
        load_machine(path)


@pytest.mark.parametrize("kind", ["of devices", "of hosts", "profile"])
def test_damaged_files_raise_machine_errors_alone(kind):
    """Damage that leaves a valid file is rare, and then the machine has prices."""
    chance = random.Random(kind)
    records = {
        "of devices": RECORD,
        "of hosts": description_to_json(description("lab")),
        "profile": PROFILE.to_json(),
    }
    whole = json.dumps(records[kind])
    refused = 0
    for _ in range(1000):
        if chance.random() < 0.3:  # bytes
            first = chance.randrange(len(whole))
            junk = "".join(chance.choices('0{}[]",:-.eE \n\u00e9', k=chance.randrange(4)))
            text = whole[:first] + junk + whole[first + chance.randrange(4) :]
        else:
            text = json.dumps(damaged(json.loads(whole), chance))
        try:
            machine = machine_from_text(text, "f")
        except MachineError as error:
            refused += 1
            assert str(error).startswith(("f: ", "f must be "))
        else:
            assert machine.capacities
    assert 500 < refused < 1000
