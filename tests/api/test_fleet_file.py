"""The fleet file: what it says, and what it says of mistakes in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.core.settings import SettingInvalid
from api.fleet.fleet_file import FleetTarget, FleetVersion, parse_fleet, read_fleet

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reference" / "fleet.md"
BASE = Path("/srv/weir")


def parse(content: str) -> object:
    """A file in a directory of its own."""
    return parse_fleet(content, BASE / "fleet.yaml")


def test_the_shortest_file_serves_one_replica_of_one_model() -> None:
    fleet = parse_fleet("models: {chat: {directory: models/chat}}", BASE / "fleet.yaml")

    [model] = fleet.models
    assert (model.name, model.policy, model.recovery_wait_s) == ("chat", "prefix_aware", 10.0)
    assert model.versions == (FleetVersion("", "torch", BASE / "models/chat"),)
    assert (fleet.aliases, fleet.regions, fleet.memory_bytes) == ({}, {}, None)


def test_the_example_of_the_documentation_is_read() -> None:
    [example] = re.findall(r"```yaml\n(# fleet.yaml\n.*?)```", DOCUMENT.read_text(), re.S)

    fleet = parse_fleet(example, BASE / "fleet.yaml")

    chat, code = fleet.models
    assert [(version.version, version.weight) for version in chat.versions] == [("v1", 95.0), ("v2", 5.0)]
    assert (chat.versions[0].replica_count_min, chat.versions[0].replica_count_max) == (1, 4)
    assert chat.versions[0].memory_bytes == 24 * 2**30
    assert code.versions[0].targets == (FleetTarget("vllm://10.1.0.7:8001", "eu"), FleetTarget("vllm://10.2.0.7:8001", "us"))
    assert fleet.aliases == {"chat-latest": "chat", "chat-next": "chat@v2"}
    assert fleet.regions == {"eu": ("us",), "us": ("eu",)}


@pytest.mark.parametrize(
    ("content", "mistakes"),
    [
        ("", ["line 1: the file: write a mapping with the keys models,", "models: is missing"]),
        ("models:", ["models: write a mapping"]),
        ("models: {}", ["models: is empty: name a model"]),
        ("models: [chat]", ["models: write a mapping"]),
        ("modles: {chat: {directory: d}}", ["modles: unknown key: did you mean `models`?", "models: is missing"]),
        (
            "models:\n  chat: {directory: d}\n  chat: {directory: e}",
            ["line 3: models.chat: written before, in line 2: give it once"],
        ),
        ("models: {chat: {}}", ["models.chat.directory: is missing"]),
        ("models: {chat@v1: {directory: d}}", ["models.chat@v1: cannot be the name of a model"]),
        ("models: {chat: {directory: d, weight: 1}}", ["models.chat.weight: unknown key"]),
        (
            "models: {chat: {directory: d, engine: vllm}}",
            ["engine: must be one of torch, tensorrt, remote, encoder, remote-encoder, simulated, not 'vllm'"],
        ),
        ("models: {chat: {directory: d, replicas: 2}}", ["models.chat.replicas: write a mapping"]),
        (
            "models: {chat: {directory: d, replicas: {min: 3, max: 2}}}",
            ["models.chat.replicas: must have a max of at least its min, which is 3"],
        ),
        (
            "models: {chat: {directory: d, replicas: {max: 0}}}",
            ["models.chat.replicas.max: must be a whole number from 1 to 256, not '0'"],
        ),
        (
            "models: {chat: {directory: d, policy: fastest}}",
            ["models.chat.policy: must be one of prefix_aware, least_loaded, round_robin"],
        ),
        ("models: {chat: {directory: d, memory_bytes: 3 apples}}", ["memory_bytes: must be a number of bytes, such as 24GiB"]),
        ("models: {chat: {directory: d, idle_timeout_s: nan}}", ["idle_timeout_s: must be a number from 0 to 604800, not 'nan'"]),
        ("models: {chat: {directory: d, targets: [a:1]}}", ["models.chat.targets: is for remote engines"]),
        ("models: {chat: {directory: d, engine: remote}}", ["models.chat.targets: is missing"]),
        (
            "models: {chat: {directory: d, engine: remote, targets: ['vllm://a:1', 'vllm://a:1']}}",
            ["targets: must name each address once"],
        ),
        (
            "models: {chat: {directory: d, engine: remote, targets: [nowhere]}}",
            ["targets[0]: must be trtllm://host:port or"],
        ),
        (
            "models: {chat: {directory: d, engine: remote, targets: ['vllm://a:1'], replicas: {max: 2}}}",
            ["models.chat.replicas: is for engines that Weir starts itself"],
        ),
        ("models: {chat: {directory: d, region: eu}}", ["models.chat.region: 'eu' is no region of this file: list the regions"]),
        (
            "regions: {eu: [mars]}\nmodels: {chat: {directory: d}}",
            ["regions.eu[0]: 'mars' is no region of this file: the regions are eu"],
        ),
        ("regions: {eu: [eu]}\nmodels: {chat: {directory: d}}", ["regions.eu: must name other regions, each once"]),
        ("models: {chat: {versions: {v1: {directory: d, weight: 0}}}}", ["must have at least one version with a weight above 0"]),
        (
            "models: {chat: {versions: {v1: {directory: d, weight: -1}}}}",
            ["models.chat.versions.v1.weight: must be a number from 0"],
        ),
        ("models: {chat: {versions: {v1: {directory: d}}, directory: e}}", ["models.chat.directory: unknown key"]),
        ("models: {chat: {directory: d}}\naliases: {latest: chta}", ["aliases.latest: must name a model", "did you mean 'chat'?"]),
        ("models: {chat: {directory: d}}\naliases: {latest: chat@v2}", ["aliases.latest: must name a model, or a version"]),
        ("models: {chat: {directory: d}}\naliases: {chat: chat}", ["aliases.chat: is the name of a model"]),
        ("models: {chat: [", ["not valid YAML"]),
        ("models: {e: {engine: encoder, directory: d, policy: least_loaded}}", ["models.e.policy: is for models that generate"]),
        ("models: {e: {engine: remote-encoder, directory: d}}", ["models.e.targets: is missing"]),
        (
            "regions: {eu: []}\nmodels: {e: {engine: encoder, directory: d, region: eu}}",
            ["models.e.region: is for models that generate"],
        ),
        (
            "models: {e: {versions: {a: {engine: encoder, directory: d}, b: {directory: d}}}}",
            ["models.e: must have versions that all generate, or that all embed"],
        ),
    ],
)
def test_a_mistake_is_told_with_its_place_and_the_remedy(content: str, mistakes: list[str]) -> None:
    with pytest.raises(SettingInvalid) as invalid:
        parse(content)

    assert "WEIR_FLEET=" in str(invalid.value)
    for mistake in mistakes:
        assert mistake in str(invalid.value)


def test_all_mistakes_are_told_at_once_in_order() -> None:
    with pytest.raises(SettingInvalid) as invalid:
        parse("models:\n  a: {directory: d, engine: x}\n  b:\n    policy: y\naliases:\n  c: d\n")

    lines = [int(line) for line in re.findall(r"line (\d+):", str(invalid.value))]
    assert lines == [2, 4, 4, 6]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=r"WEIR_FLEET=.*missing.yaml.*cannot be read"):
        read_fleet(tmp_path / "missing.yaml")
