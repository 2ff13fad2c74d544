"""Embedding models in a fleet file: versions, replicas, remote servers and aliases."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.core.settings import Settings
from api.fleet.fleet import Serving, build_serving
from common.settings import SettingInvalid
from inference.routing.router import ModelMismatch, ReplicaCounts, Router
from tests.inference.checkpoints import make_checkpoint
from tests.inference.encoder_checkpoints import make_random_encoder

FLEET = """
models:
  search:
    versions:
      v1:
        {{engine: encoder, directory: {directory}, weight: 3, replicas: {{min: 0, max: 3}},
         memory_bytes: 1MiB}}
      v2: {{engine: encoder, directory: {directory}}}
  far:
    engine: remote-encoder
    directory: {directory}
    targets: ["vllm://10.0.0.1:1", "trtllm://10.0.0.2:1"]
aliases: {{minilm: search, next: search@v2}}
"""
REGIONS = """
regions: {{eu: [us], us: []}}
models:
  local: {{engine: encoder, directory: {directory}}}
  far:
    engine: remote-encoder
    directory: {directory}
    targets: ["vllm://10.0.0.1:1", {{address: "vllm://10.0.0.2:1", region: us}}]
  chat:
    engine: remote
    directory: {checkpoint}
    targets: ["vllm://10.0.0.3:1", {{address: "vllm://10.0.0.4:1", region: eu}}]
  own: {{directory: {checkpoint}}}
"""


@pytest.fixture
def router(tmp_path: Path) -> Router:
    directory = make_random_encoder(tmp_path / "encoder")
    (tmp_path / "fleet.yaml").write_text(FLEET.format(directory=directory))
    serving = build_serving(Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml")))
    return Router(serving.engines, serving.encoders, serving.catalog)


def test_versions_aliases_and_replicas_are_those_of_the_file(router: Router) -> None:
    assert [model.name for model in router.models()] == ["far", "search"]
    assert router.aliases("search") == ["minilm", "next"]
    assert router.versions("search") == {"v1": 0.75, "v2": 0.25}
    assert router.replicas("search") == ReplicaCounts(ready=0, total=4, drained=0)
    assert [name for _, reported in router.reports() for name in [reported.name]] == [
        *("vllm://10.0.0.1:1", "trtllm://10.0.0.2:1"),
        *("search@v1#0", "search@v1#1", "search@v1#2", "search@v2#0"),
    ]
    router.drain({"search@v1": ["search@v1#1"]})
    assert router.replicas("search").drained == 1


def test_a_version_is_chosen_by_id_and_billed_by_canonical_name(router: Router) -> None:
    names = ("search", "minilm", "search@v2", "next", "far")
    routes = {name: router.route_encoder(name, "a") for name in names}

    assert {name: route.model for name, route in routes.items()} == {
        **dict.fromkeys(("search", "minilm", "search@v2", "next"), "search"),
        "far": "far",
    }
    assert routes["next"].served == routes["search@v2"].served == "search@v2"
    assert routes["search"] == routes["minilm"]
    served = [router.route_encoder("search", str(number)).served for number in range(400)]
    assert 250 < served.count("search@v1") < 350
    assert router.canonical_name("next") == "search"
    assert router.canonical_name("search@v9") == "search@v9"
    router.check_canonical_name("search")
    with pytest.raises(ModelMismatch, match="serves Embed"):
        router.route("minilm", "a")


def serving_in(tmp_path: Path, region: str, of_database: str = "") -> Serving:
    """Build the fleet of a process in a region."""
    paths = {
        "directory": make_random_encoder(tmp_path / "encoder"),
        "checkpoint": tmp_path / "checkpoint",
    }
    make_checkpoint(paths["checkpoint"], seed=1)
    (tmp_path / "fleet.yaml").write_text(REGIONS.format(**paths))
    settings = Settings.of(
        home=tmp_path,
        fleet=str(tmp_path / "fleet.yaml"),
        region=region,
        database_region=of_database,
    )
    return build_serving(settings)


def test_a_replica_is_known_to_be_on_this_machine_or_where_the_file_says(tmp_path: Path) -> None:
    """The region of a process is only assumed of a server elsewhere."""
    serving = serving_in(tmp_path, "eu")
    members = {name: [*part.terms.members.values()] for name, part in serving.parts.items()}

    assert {name: [each.known_region for each in found] for name, found in members.items()} == {
        "local": ["eu"],
        "far": ["", "us"],
        "chat": ["", "eu"],
        "own": ["eu"],
    }
    assert [each.region for each in members["chat"]] == ["eu", "eu"]


@pytest.mark.parametrize("region", ["us", ""])
def test_a_database_of_a_region_has_no_processes_elsewhere(tmp_path: Path, region: str) -> None:
    with pytest.raises(SettingInvalid, match="WEIR_DATABASE_REGION='eu': all processes of such"):
        serving_in(tmp_path, region, "eu")
