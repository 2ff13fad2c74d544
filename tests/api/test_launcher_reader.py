"""Launchers in a fleet file: their values, and the errors for mistakes."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from api.fleet.fleet_file import parse_fleet
from api.fleet.launch_plan import LaunchTerms, Pool
from api.fleet.launcher_reader import FleetLauncher
from common.settings import SettingInvalid
from inference.adapters.remote_settings import Service
from inference.launchers.command import CommandLauncher, CommandTerms
from inference.launchers.kubernetes import KubernetesLauncher, KubernetesTerms
from inference.launchers.process import ProcessLauncher, ProcessTerms
from inference.launchers.vllm_sleep import SleepTerms

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reference" / "fleet.md"
FILE = Path("/srv/weir/fleet.yaml")
MODEL = "models: {chat: {directory: d, engine: remote, REST}}"
SHORT = {
    "PROCESS": "launcher: {kind: process, command: [x]",
    "SCRIPTS": "launcher: {kind: command, start: [x], stop: [y]",
    "OBJECT": "launcher: {kind: kubernetes, version: v1",
}
# Keys of a model, and below them the errors that they get.
MISTAKES = """
launcher: {command: [x]}
    models.chat.launcher: `kind` is missing
launcher: {kind: docker}
    launcher.kind: must be one of process, command, kubernetes, not 'docker'
launcher: {kind: process}
    launcher.command: is missing: list the words of the command
launcher: {kind: process, command: vllm serve}
    launcher.command: write a list
launcher: {kind: process, command: [x, '{prot}']}
    command[1]: {prot} is not a placeholder: there are {number}, {port}, {second_port}
PROCESS, start: [y]}
    launcher.start: unknown key
PROCESS}, targets: ['vllm://a:1']
    models.chat.targets: is for servers that run anyway
PROCESS}, memory_bytes: 1
    models.chat.memory_bytes: is for engines on this machine
PROCESS, address: nowhere}
    launcher.address: must be trtllm://host:port
PROCESS, pool: gpus}
    launcher.pool: is not a pool of this file; there are: none
PROCESS, units: 2}
    launcher.units: needs a pool
PROCESS, stop_after_s: 9}
    launcher.stop_after_s: is for servers that sleep
PROCESS, cost_per_hour: much}
    launcher.cost_per_hour: must be a number from 0
PROCESS, sleep: {level: 3}}
    launcher.sleep: `url` is missing
    launcher.sleep.level: must be a whole number from 1 to 2
PROCESS, key_header: api-key}
    launcher.key_header: needs a key_file
launcher: {kind: command, start: [x]}
    launcher.stop: is missing
SCRIPTS, wake: [z]}
    launcher.sleep: needs `wake`, and `wake` needs `sleep`
SCRIPTS, address: 'vllm://a:1', service: vllm}
    launcher.service: is part of `address`
replicas: {max: 2}, SCRIPTS, address: 'vllm://a:1'}
    models.chat.replicas: must have a max of 1: its launcher has one address, without {number}
launcher: {kind: kubernetes, address: 'vllm://a:1'}
    launcher: `resource` is missing
OBJECT, resource: Pods!, namespace: n, name: x, address: 'vllm://a:1'}
    launcher.resource: must match
OBJECT, resource: r, namespace: n, name: x, address: 'vllm://a-{number}:1', count: 2}
    launcher.count: is for an address of all pods
"""


@pytest.mark.parametrize("mistake", re.split(r"\n(?! )", MISTAKES.strip()))
def test_each_mistake_is_named_with_the_remedy(mistake: str) -> None:
    keys, *expected = mistake.splitlines()
    for word, text in SHORT.items():
        keys = keys.replace(word, text)

    with pytest.raises(SettingInvalid) as refused:
        parse_fleet(MODEL.replace("REST", keys), FILE)

    for error in expected:
        assert error.strip() in str(refused.value)


def test_the_example_of_the_documentation_is_read() -> None:
    [example] = re.findall(r"```yaml\n(# launched.yaml\n.*?)```", DOCUMENT.read_text(), re.S)

    fleet = parse_fleet(example, FILE)

    kinds = [
        type(version.launcher.servers)
        for model in fleet.models
        for version in model.versions
        if version.launcher is not None
    ]
    assert kinds == [ProcessTerms, CommandTerms, KubernetesTerms]


def launcher(text: str) -> FleetLauncher:
    """Read the launcher of a file with one model."""
    [model] = parse_fleet(text, FILE).models
    found = model.versions[0].launcher
    assert found is not None
    return found


def test_a_process_with_all_keys(tmp_path: Path) -> None:
    found = launcher(
        """
        pools: {gpus: {max: 8}}
        models:
          chat:
            engine: remote
            directory: models/chat
            replicas: {min: 0, max: 4}
            launcher:
              kind: process
              command: [vllm, serve, --port, "{port}", --config, '{"level": 3}']
              address: "openai+http://127.0.0.1:{port}/chat"
              environment: {CUDA_VISIBLE_DEVICES: "{number}", HOME_OF: "${HOME}"}
              start_timeout_s: 900
              stop_timeout_s: 20
              sleep: {url: "http://127.0.0.1:{port}/", level: 2}
              stop_after_s: 3600
              pool: gpus
              units: 2
              sleeping_units: 1
              cost_per_hour: 3.20
              keep_running: true
              key_file: keys/vllm
              key_header: api-key
              state_directory: state
        """
    )

    assert found == FleetLauncher(
        Service.OPENAI_HTTP,
        ProcessTerms(
            ("vllm", "serve", "--port", "{port}", "--config", '{"level": 3}'),
            "openai+http://127.0.0.1:{port}/chat",
            {"CUDA_VISIBLE_DEVICES": "{number}", "HOME_OF": "${HOME}"},
            900.0,
            20.0,
            SleepTerms("http://127.0.0.1:{port}", 2),
        ),
        LaunchTerms("gpus", 2, 1, Decimal("3.20"), can_sleep=True, stop_after_s=3600.0),
        keep_running=True,
        key_file=FILE.parent / "keys/vllm",
        key_header="api-key",
        state_directory=FILE.parent / "state",
    )
    assert parse_fleet("pools: {a: {max: 2}}\nmodels: {m: {directory: d}}", FILE).pools == {
        "a": Pool(2)
    }
    assert isinstance(found.build(tmp_path), ProcessLauncher)


def test_scripts_and_objects(tmp_path: Path) -> None:
    scripts = launcher(
        MODEL.replace("REST", SHORT["SCRIPTS"] + ", sleep: [z], wake: [w], service: sglang}")
    )
    scaled = launcher(
        MODEL.replace(
            "REST",
            SHORT["OBJECT"]
            + ", group: apps, resource: statefulsets, namespace: models, name: chat,"
            + " address: 'vllm://chat-{number}.chat.models:50051', kubeconfig: admin.conf}",
        )
    )

    assert scripts.service is Service.SGLANG
    assert scripts.terms.can_sleep
    assert scripts.servers == CommandTerms(("x",), ("y",), ("z",), ("w",), service=Service.SGLANG)
    assert scaled.servers == KubernetesTerms(
        *("apps", "v1", "statefulsets", "models", "chat"),
        address="vllm://chat-{number}.chat.models:50051",
        kubeconfig=FILE.parent / "admin.conf",
    )
    assert isinstance(scripts.build(tmp_path), CommandLauncher)
    assert isinstance(scaled.build(tmp_path), KubernetesLauncher)
