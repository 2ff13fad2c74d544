"""Canonical document of a fleet: the same fleet again, and its differences from another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.fleet.fleet_document import changes_between, document_of
from api.fleet.fleet_file import (
    Fleet,
    FleetInvalid,
    FleetModel,
    FleetTarget,
    FleetVersion,
    parse_document,
)
from api.fleet.running_fleet import check_launchers
from common.settings import SettingInvalid
from tests.api.test_fleet_file import MISTAKES

NAMES = st.sampled_from(["chat", "code", "1", "true", "null", "a.b", "x:y", "e5"])
WORDS = st.sampled_from(["v1", "v2", "7", "no", "v.3"])
REGIONS = ("eu", "us", "no")
DIRECTORIES = st.sampled_from([Path("/m/a"), Path("/m/with space"), Path("/m/ü: #1")])
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 5.0, 1e6])
CONFIGS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["max_batch_size", "speculative_config", "yes"]),
    st.one_of(st.integers(-5, 5), st.booleans(), st.text(max_size=4), st.lists(st.integers())),
    max_size=2,
)


@st.composite
def targets(draw: st.DrawFn) -> tuple[FleetTarget, ...]:
    found = {}
    for port in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
        key = draw(st.sampled_from([None, Path("/keys/one")]))
        header = draw(st.sampled_from(["", "api-key"])) if key else ""
        address = f"vllm://host-{port}:{port}"
        found[address] = FleetTarget(address, draw(st.sampled_from(["", *REGIONS])), key, header)
    return tuple(found.values())


LAUNCHERS = """
{kind: process, command: [vllm, serve, --port, '{port}'], environment: {A: b}, keep_running: true}
{kind: process, command: [x], address: 'sglang://[::1]:{port}', stop_timeout_s: 2, pool: gpus,
 units: 4, sleeping_units: 1, sleep: {url: 'http://[::1]:{port}', level: 2}, stop_after_s: 90}
{kind: command, start: [a], stop: [b, '{number}'], sleep: [c], wake: [d], service: trtllm}
{kind: command, start: [a], stop: [b], status: [s], address: 'vllm://a-{number}:1',
 key_file: /keys/one, key_header: api-key, cost_per_hour: 1.25, start_timeout_s: 9}
{kind: kubernetes, group: apps, version: v1, resource: deployments, namespace: n, name: x,
 address: 'vllm://x:1', count: 3, field: spec.replicas, kubeconfig: /etc/kube}
{kind: kubernetes, version: v1, resource: r, namespace: n, name: x, address: 'vllm://x-{number}:1',
 state_directory: /var/lib/x}
"""


def launched(launcher: str) -> Fleet:
    content = f"""
pools: {{gpus: {{max: 8}}}}
models: {{chat: {{engine: remote, directory: /m, replicas: {{min: 0, max: 1}},
                 idle_timeout_s: 60, launcher: {launcher}}}}}
"""
    return parse_document(content, None)


@pytest.mark.parametrize("launcher", re.split(r"\n(?=\{)", LAUNCHERS.strip()))
def test_a_document_has_the_whole_launcher(launcher: str) -> None:
    fleet = launched(launcher)

    assert parse_document(document_of(fleet), None) == fleet
    assert fleet.models[0].versions[0].launcher is not None


def test_a_call_brings_no_launcher(tmp_path: Path) -> None:
    """It runs commands on the server. One that the present fleet has may stay, and change place."""
    present, other = (launched(f"{{kind: process, command: [{each}]}}") for each in ("x", "y"))

    check_launchers(present, present)
    with pytest.raises(SettingInvalid, match="'chat' has a launcher that the present fleet"):
        check_launchers(other, present)


@st.composite
def versions(draw: st.DrawFn, name: str) -> FleetVersion:
    weight = draw(NUMBERS) if name else 1.0
    if draw(st.booleans()):
        directory = draw(st.one_of(st.none(), DIRECTORIES))
        found = draw(targets())
        return FleetVersion(
            name,
            "remote",
            directory,
            weight,
            replica_count_min=len(found),
            replica_count_max=len(found),
            targets=found,
            share_prefixes=draw(st.booleans()),
        )
    engine = draw(st.sampled_from(["torch", "tensorrt", "simulated"]))
    count_min, more = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    return FleetVersion(
        name,
        engine,  # type: ignore[arg-type]
        draw(DIRECTORIES),
        weight,
        region=draw(st.sampled_from(["", *REGIONS])),
        replica_count_min=count_min,
        replica_count_max=max(count_min + more, 1),
        idle_timeout_s=draw(st.sampled_from([None, 0.0, 600.0])),
        memory_bytes=draw(st.sampled_from([0, 1 << 30])),
        engine_config=draw(CONFIGS) if engine == "tensorrt" else {},
        gpus=() if engine == "simulated" else draw(st.sampled_from([(), ("0",), ("1", "2")])),
    )


@st.composite
def models(draw: st.DrawFn, name: str) -> FleetModel:
    labels = draw(st.one_of(st.just([""]), st.lists(WORDS, min_size=1, max_size=3, unique=True)))
    found = [draw(versions(label)) for label in labels]
    if not sum(each.weight for each in found):
        found[0] = replace(found[0], weight=1.0)
    policy = draw(st.sampled_from(["prefix_aware", "least_loaded", "round_robin"]))
    return FleetModel(name, tuple(found), policy, draw(NUMBERS) % 600)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    found = tuple(draw(models(name)) for name in names)
    aliases = draw(st.dictionaries(st.sampled_from(["latest", "no"]), st.sampled_from(names)))
    regions = {name: tuple(each for each in REGIONS if each != name)[:1] for name in REGIONS}
    regions |= {"mars": ()}
    memory_bytes = draw(st.sampled_from([None, 1 << 36]))
    return Fleet(found, aliases, regions, memory_bytes, draw(st.sampled_from([(), ("0", "1")])))


@given(fleets())
def test_the_document_of_a_fleet_is_the_fleet(fleet: Fleet) -> None:
    document = document_of(fleet)

    again = parse_document(document, None)

    assert again == fleet
    assert document_of(again) == document


@given(fleets(), fleets())
def test_there_are_differences_exactly_if_the_documents_differ(a: Fleet, b: Fleet) -> None:
    """The order counts: requests are drawn by it."""
    changes = changes_between(a, b)

    assert bool(changes) is (document_of(a) != document_of(b))
    assert not changes_between(a, a)


def test_a_difference_names_its_path() -> None:
    one = "models: {a: {versions: {v1: {directory: /m}, v2: {directory: /n}}}}"
    other = """
models:
  a: {versions: {v2: {directory: /n, weight: 3}, v1: {directory: /m}}}
  b: {engine: remote, targets: ["vllm://h:1"]}
"""

    changes = changes_between(parse_document(one, None), parse_document(other, None))

    assert [(each.path, each.before, each.after) for each in changes] == [
        ("models.a.versions (order)", ["v1", "v2"], ["v2", "v1"]),
        ("models.a.versions.v2.weight", None, 3.0),
        ("models.b", None, {"engine": "remote", "targets": {"vllm://h:1": {}}}),
    ]


@pytest.mark.parametrize(
    "relative",
    [
        "directory: here",
        "directory: /m, engine: remote, targets: [{address: 'vllm://a:1', key_file: k}]",
    ],
)
def test_a_relative_path_needs_a_folder(relative: str) -> None:
    content = f"models: {{chat: {{{relative}}}}}"

    with pytest.raises(FleetInvalid, match="must be absolute"):
        parse_document(content, None)
    [model] = parse_document(content, Path("/srv")).models

    assert model.versions[0].directory is not None
    assert model.versions[0].directory.is_absolute()


def test_each_mistake_of_a_file_is_found_in_a_document() -> None:
    """The call has the parser of the file, so it finds the same mistakes, in the same lines."""
    contents = [line for line in MISTAKES.strip().splitlines() if not line.startswith("    ")]
    for content in contents:
        text = "" if content == "(empty)" else content.replace("\\n", "\n")
        with pytest.raises(FleetInvalid) as caught:
            parse_document(text, Path("/srv"))
        assert all(each.line >= 1 and each.message for each in caught.value.errors)


def test_a_fallback_is_part_of_the_document_and_of_differences() -> None:
    content = "models: {a: {directory: d, fallback: [b]}, b: {directory: d}, c: {directory: d}}"
    fleet, other = (
        parse_document(each, Path("/m")) for each in (content, content.replace("[b]", "[c, b]"))
    )

    assert parse_document(document_of(fleet), None) == fleet
    [change] = changes_between(fleet, other)
    assert (change.path, change.before, change.after) == ("models.a.fallback", ["b"], ["c", "b"])
