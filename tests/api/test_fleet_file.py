"""Fleet file: its contents, and the errors for errors in it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from api.core.settings import Settings
from api.fleet.fleet import build_serving
from api.fleet.fleet_file import FleetTarget, FleetVersion, parse_fleet, read_fleet
from common.gpus import visible_gpus
from common.settings import SettingInvalid
from tests.inference.checkpoints import make_checkpoint
from tests.inference.encoder_checkpoints import make_random_encoder

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reference" / "fleet.md"
BASE = Path("/srv/weir")

# A file, in which \n ends a line, and below it the errors that it gets.
MISTAKES = r"""
(empty)
    line 1: the file: write a mapping with the keys models,
    models: is missing
models:
    models: write a mapping
models: {}
    models: is empty: name a model
models: [chat]
    models: write a mapping
modles: {chat: {directory: d}}
    modles: unknown key: did you mean `models`?
    models: is missing
models:\n  chat: {directory: d}\n  chat: {directory: e}
    line 3: models.chat: written before, in line 2: give it once
models: {chat: {}}
    models.chat.directory: is missing
models: {chat@v1: {directory: d}}
    models.chat@v1: cannot be the name of a model
models: {chat: {directory: d, weight: 1}}
    models.chat.weight: unknown key
models: {chat: {directory: d, engine: vllm}}
    engine: must be one of torch, tensorrt, remote, encoder, remote-encoder, simulated, not 'vllm'
models: {chat: {directory: d, replicas: 2}}
    models.chat.replicas: write a mapping
models: {chat: {directory: d, replicas: {min: 3, max: 2}}}
    models.chat.replicas: must have a max of at least its min, which is 3
models: {chat: {directory: d, replicas: {max: 0}}}
    models.chat.replicas.max: must be a whole number from 1 to 256, not '0'
models: {chat: {directory: d, policy: fastest}}
    models.chat.policy: must be one of prefix_aware, least_loaded, round_robin
models: {chat: {directory: d, memory_bytes: 3 apples}}
    memory_bytes: must be a number of bytes, such as 24GiB
models: {chat: {directory: d, idle_timeout_s: nan}}
    idle_timeout_s: must be a number from 0 to 604800, not 'nan'
models: {m: {engine: remote, targets: [{address: "vllm://a:1", endpoint_slices: {service: B_}}]}}
    models.m.targets[0].endpoint_slices.namespace: is missing
    models.m.targets[0].endpoint_slices.service: must match
models: {m: {engine: remote, targets: [{address: "vllm://a:1", endpoint_slices: b}]}}
    models.m.targets[0].endpoint_slices: write a mapping
models: {m: {engine: remote, targets: [{address: "openai+https://a:1", endpoint_slices: {}}]}}
    models.m.targets[0].endpoint_slices: is not for openai+https
models: {chat: {directory: d, fallback: []}}
    models.chat.fallback: must name 1 to 4 models
models: {chat: {directory: d, fallback: code}, code: {directory: d}}
    models.chat.fallback: write a list
models:\n  chat: {directory: d, fallback: [coed]}\n  code: {directory: d}
    line 2: models.chat.fallback[0]: must name a model that generates, or its version
models:\n  chat:\n    directory: d\n    fallback:\n    - code\n    - code\n  code: {directory: d}
    line 6: models.chat.fallback[1]: names 'code' again
models: {chat: {directory: d, fallback: [embed]}, embed: {directory: d, engine: encoder}}
    models.chat.fallback[0]: must name a model that generates
models: {embed: {directory: d, engine: encoder, fallback: [chat]}, chat: {directory: d}}
    models.embed.fallback: is for models that generate
models:\n  chat: {directory: d, fallback: [chat]}
    line 2: models.chat.fallback[0]: leads back to 'chat' (chat, chat)
models:\n  a: {directory: d, fallback: [b@v]}\n  b: {versions: {v: {directory: d}}, fallback: [a]}
    line 2: models.a.fallback[0]: leads back to 'a' (a, b, a)
    line 3: models.b.fallback[0]: leads back to 'b' (b, a, b)
models: {chat: {directory: d, share_prefixes: true}}
    models.chat.share_prefixes: is for remote engines
models: {chat: {directory: d, targets: [a:1]}}
    models.chat.targets: is for remote engines
models: {chat: {directory: d, engine: remote}}
    models.chat.targets: is missing
models: {chat: {directory: d, engine: remote, targets: ['vllm://a:1', 'vllm://a:1']}}
    targets: must name each address once
models: {chat: {directory: d, engine: remote, targets: [nowhere]}}
    targets[0]: must be trtllm://host:port
models: {chat: {directory: d, engine: remote, targets: ['vllm://a:1'], replicas: {max: 2}}}
    models.chat.replicas: is for engines that Weir starts itself
models: {chat: {directory: d, launcher: {kind: process, command: [x]}}}
    models.chat.launcher: is for remote engines
pools: {gpus: {}}\nmodels: {chat: {directory: d}}
    pools.gpus: `max` is missing
models: {chat: {directory: d, region: eu}}
    models.chat.region: 'eu' is not a region of this file: list the regions
regions: {eu: [mars]}\nmodels: {chat: {directory: d}}
    regions.eu[0]: 'mars' is not a region of this file: the regions are eu
regions: {eu: [eu]}\nmodels: {chat: {directory: d}}
    regions.eu: must name other regions, each once
models: {chat: {versions: {v1: {directory: d, weight: 0}}}}
    must have at least one version with a weight above 0
models: {chat: {versions: {v1: {directory: d, weight: -1}}}}
    models.chat.versions.v1.weight: must be a number from 0
models: {chat: {versions: {v1: {directory: d}}, directory: e}}
    models.chat.directory: unknown key
models: {chat: {directory: d}}\naliases: {latest: chta}
    aliases.latest: must name a model
    did you mean 'chat'?
models: {chat: {directory: d}}\naliases: {latest: chat@v2}
    aliases.latest: must name a model, or a version
models: {chat: {directory: d}}\naliases: {chat: chat}
    aliases.chat: is the name of a model
models: {chat: [
    not valid YAML
models: {e: {engine: encoder, directory: d, policy: least_loaded}}
    models.e.policy: is for models that generate
models: {e: {engine: remote-encoder, directory: d}}
    models.e.targets: is missing
regions: {eu: []}\nmodels: {e: {engine: encoder, directory: d, region: us}}
    models.e.region: 'us' is not a region of this file: the regions are eu
models: {e: {versions: {a: {engine: encoder, directory: d}, b: {directory: d}}}}
    models.e: must have versions that all generate, or that all embed
"""
RECIPE = {"max_batch_size": 720, "moe_config": {"backend": "TRTLLM"}}


def parse(content: str) -> object:
    """Parse a file in a new directory."""
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
    assert [(each.version, each.weight) for each in chat.versions] == [("v1", 95.0), ("v2", 5.0)]
    assert (chat.versions[0].replica_count_min, chat.versions[0].replica_count_max) == (1, 4)
    assert chat.versions[0].memory_bytes == 24 * 2**30
    assert code.versions[0].targets == (
        FleetTarget("vllm://10.1.0.7:8001", "eu"),
        FleetTarget("vllm://10.2.0.7:8001", "us"),
    )
    assert fleet.aliases == {"chat-latest": "chat", "chat-next": "chat@v2"}
    assert fleet.regions == {"eu": ("us",), "us": ("eu",)}


def test_the_pools_of_the_documentation_are_served(tmp_path: Path) -> None:
    page = DOCUMENT.parent.parent / "how-to" / "distributed-engines.md"
    [example] = re.findall(r"```yaml\n(# fleet.yaml\n.*?)```", page.read_text(), re.S)
    (tmp_path / "fleet.yaml").write_text(example)
    for name in ("large", "small"):
        make_checkpoint(tmp_path / "models" / name, seed=1)
    make_random_encoder(tmp_path / "models" / "embed")

    serving = build_serving(Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml")))

    replicas = {name: cast(Any, each).replicas for name, each in serving.engines.items()}
    targets = {
        name: [str(replica.engine._settings.target) for replica in each]
        for name, each in replicas.items()
    }
    assert targets == {
        "large": [
            "openai+http://dynamo.eu.internal:8000/large",
            "openai+http://dynamo.us.internal:8000/large",
        ],
        "small": [f"vllm://10.1.0.{number}:50051" for number in (7, 8, 9)],
    }
    assert [replica.region for replica in replicas["large"]] == ["eu", "us"]
    assert {
        (name, replica.engine._settings.share_prefixes)
        for name, each in replicas.items()
        for replica in each
    } == {("large", True), ("small", False)}
    assert list(serving.encoders) == ["embed"]
    assert serving.catalog.canonical_name("chat") == "large"


@pytest.mark.parametrize("mistake", re.split(r"\n(?! )", MISTAKES.strip()))
def test_a_mistake_is_located_and_its_remedy_named(mistake: str) -> None:
    content, *errors = mistake.splitlines()

    with pytest.raises(SettingInvalid) as invalid:
        parse(content.replace("(empty)", "").replace("\\n", "\n"))

    assert "WEIR_FLEET=" in str(invalid.value)
    for error in errors:
        assert error.strip() in str(invalid.value)


def test_a_fallback_leads_back_over_no_number_of_models() -> None:
    names = [f"m{number}" for number in range(6)]
    chain = dict(pairwise(names)) | {names[-1]: names[2]}
    lines = [f"  {name}: {{directory: d, fallback: [{chain[name]}]}}" for name in names]

    with pytest.raises(SettingInvalid) as invalid:
        parse("\n".join(["models:", *lines]))

    wrong = re.findall(r"line (\d): models.(m\d).fallback\[0\]: leads back", str(invalid.value))
    assert wrong == [("4", "m2"), ("5", "m3"), ("6", "m4"), ("7", "m5")]


def test_all_mistakes_are_reported_at_once_in_order() -> None:
    with pytest.raises(SettingInvalid) as invalid:
        parse("models:\n  a: {directory: d, engine: x}\n  b:\n    policy: y\naliases:\n  c: d\n")

    lines = [int(line) for line in re.findall(r"line (\d+):", str(invalid.value))]
    assert lines == [2, 4, 4, 6]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=r"WEIR_FLEET=.*missing.yaml.*cannot be read"):
        read_fleet(tmp_path / "missing.yaml")


def test_a_configuration_of_trtllm_serve_is_written_in_place_or_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("max_batch_size: 720\nmoe_config:\n  backend: TRTLLM\n")

    for written in ("recipe.yaml", "{max_batch_size: 720, moe_config: {backend: TRTLLM}}"):
        content = f"models: {{m: {{engine: tensorrt, directory: d, engine_config: {written}}}}}"
        [model] = parse_fleet(content, tmp_path / "fleet.yaml").models
        assert model.versions[0].engine_config == RECIPE


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("{directory: d, engine_config: {a: 1}}", "engine_config: is for TensorRT-LLM"),
        ("{engine: tensorrt, directory: d, engine_config: none.yaml}", "none.yaml cannot be read"),
        ("{engine: tensorrt, directory: d, engine_config: [a]}", "engine_config: write a mapping"),
        ("{engine: tensorrt, directory: d, engine_config: {1: a}}", "engine_config: write a map"),
    ],
)
def test_a_wrong_configuration_of_an_engine_is_refused(version: str, error: str) -> None:
    with pytest.raises(SettingInvalid, match=error):
        parse(f"models: {{m: {version}}}")


def test_a_contradiction_to_weir_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        f"models: {{m: {{engine: tensorrt, directory: {tmp_path},"
        " engine_config: {enable_chunked_prefill: false}}}"
    )
    settings = Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml"))

    with pytest.raises(SettingInvalid, match="'m': engine_config: enable_chunked_prefill must be"):
        build_serving(settings)


def test_replicas_get_gpus_of_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "fleet.yaml").write_text(
        "gpus: [0, 1, 2, 3]\n"
        "models: {m: {engine: tensorrt, directory: m, gpus: [2, 3], replicas: {max: 1},"
        " engine_config: {tensor_parallel_size: 2}}}"
    )
    settings = Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml"))
    assert "m" in build_serving(settings).engines

    (tmp_path / "fleet.yaml").write_text(
        (tmp_path / "fleet.yaml").read_text().replace("max: 1", "max: 2")
    )
    with pytest.raises(SettingInvalid, match="model 'm' needs 2 GPUs, but only 0 of 2, 3 are left"):
        build_serving(settings)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("gpus: [first]", r"gpus\[0\]: must be the number or the UUID of a GPU, not 'first'"),
        ("gpus: [1, 1]", "gpus: must name at least one GPU, each once"),
        ("gpus: []", "gpus: must name at least one GPU"),
        ("gpus: 8", "gpus: write a list"),
    ],
)
def test_wrong_gpus_are_refused(content: str, error: str) -> None:
    with pytest.raises(SettingInvalid, match=error):
        parse(f"models: {{m: {{directory: d}}}}\n{content}")


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [("0,1", ("0", "1")), ("GPU-1a, GPU-2b", ("GPU-1a", "GPU-2b")), ("", ()), ("-1", ())],
)
def test_visible_gpus_are_those_of_cuda(listed: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == gpus
