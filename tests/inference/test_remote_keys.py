"""Keys of protected remote servers: files, headers, rotation, and that no key is ever shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.core.settings import Settings
from api.fleet.fleet import build_serving
from common.settings import SettingInvalid
from inference.adapters.remote_settings import KeyFile, KeyUnusable, Service
from inference.errors import EngineStartFailed
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import RemoteWorld, connected, remote_engine, remote_settings
from tests.inference.running import make_request
from tests.inference.worker_engines import prompt, run, until
from tests.remote_servers.serving import ServerProcess

SERVICES = [Service.TRTLLM, Service.VLLM, Service.SGLANG, Service.OPENAI_HTTP]
KEY, NEXT_KEY = "sk-first-0123456789", "sk-second-9876543210"


def key_file(path: Path, content: str, mode: int = 0o600) -> Path:
    """Write a file in one step, as a rotation does."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    fresh.chmod(mode)
    fresh.replace(path)
    return path


@pytest.fixture
def keyed(remote_server: ServerProcess) -> Iterator[ServerProcess]:
    yield remote_server
    remote_server.require_key("")


@pytest.mark.parametrize("service", [*SERVICES])
@pytest.mark.parametrize(
    ("header", "content", "value"),
    [
        ("authorization", f"{KEY}\n", f"Bearer {KEY}"),
        ("Authorization", f"Basic {KEY}", f"Basic {KEY}"),
        ("API-Key", KEY, KEY),
    ],
)
async def test_a_server_gets_its_key_in_its_header(
    tiny: TinyCheckpoint,
    keyed: ServerProcess,
    service: Service,
    tmp_path: Path,
    header: str,
    content: str,
    value: str,
) -> None:
    keyed.require_key(value, header.lower())
    key = KeyFile(key_file(tmp_path / "key", content), header)
    settings = remote_settings(tiny, keyed, service, key=key)
    async with connected(RemoteWorld(keyed, settings)) as engine:
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3


@pytest.mark.parametrize("service", [Service.VLLM, Service.OPENAI_HTTP])
async def test_a_rotated_key_is_used_without_a_restart_and_no_key_is_ever_shown(
    tiny: TinyCheckpoint,
    keyed: ServerProcess,
    service: Service,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server repeats wrong keys in its errors."""
    keyed.require_key(f"Bearer {KEY}")
    path = key_file(tmp_path / "key", KEY)
    settings = remote_settings(tiny, keyed, service, key=KeyFile(path))
    async with remote_engine(settings) as engine:
        keyed.require_key(f"Bearer {NEXT_KEY}")
        await until(lambda: "does not accept the key in" in engine.condition().reason)
        reason = engine.condition().reason
        key_file(path, NEXT_KEY)
        await until(engine.healthy)
        path.write_text("")  # a file that is being written
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3

    assert f"{path} is empty" in caplog.text
    for shown in (reason, caplog.text, repr(settings)):
        assert KEY not in shown
        assert NEXT_KEY not in shown
    assert "UNAUTHENTICATED" in reason


async def test_a_missing_key_names_its_setting(tiny: TinyCheckpoint, keyed: ServerProcess) -> None:
    keyed.require_key(f"Bearer {KEY}")
    for service in SERVICES:
        async with remote_engine(remote_settings(tiny, keyed, service), started=False) as engine:
            with pytest.raises(EngineStartFailed, match="WEIR_REMOTE_KEY_FILES"):
                await engine.start()


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0o600, "cannot be read: No such file"),
        ("", 0o600, "is empty"),
        (" \n", 0o600, "is empty"),
        ("one\ntwo", 0o600, "one line"),
        ("k\u00e9y", 0o600, "printable ASCII"),
        ("k" * 9000, 0o600, "at most 8192"),
        (KEY, 0o604, "mode 0604, so that every user"),
        (KEY, 0o666, "chmod 600"),
        ("a directory", 0o700, "Is a directory"),
        ("a pipe", 0o600, "not a regular file"),
    ],
)
def test_a_file_that_cannot_hold_a_key_is_refused_with_the_remedy(
    tmp_path: Path, content: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "key"
    if content == "a directory":
        path.mkdir()
    elif content == "a pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(content)
        path.chmod(mode)

    with pytest.raises(KeyUnusable, match=message) as refused:
        KeyFile(path).header()
    assert str(path) in str(refused.value)
    assert KEY not in str(refused.value)


def test_a_key_is_read_again_when_its_file_changes_and_kept_when_it_breaks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path / "key", KEY)
    key = KeyFile(path)
    seen = [key.header()]
    for change in (
        lambda: key_file(path, NEXT_KEY),
        lambda: path.chmod(0o644),
        path.unlink,
        lambda: key_file(path, KEY),
    ):
        change()
        seen += [key.header(), key.header()]

    first, second = ({"authorization": f"Bearer {each}"} for each in (KEY, NEXT_KEY))
    assert seen == [first, *[second] * 6, first, first]
    assert len(caplog.records) == 2, "one warning a change"


@pytest.mark.parametrize("name", ["Host", "grpc-timeout", "key-bin", "a b", "", "Content-Type"])
def test_a_header_with_another_meaning_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name of a header"):
        KeyFile(tmp_path / "key", name)


def fleet(tmp_path: Path, tiny: TinyCheckpoint, **target: str) -> Settings:
    """Return settings with a fleet file of one remote engine."""
    targets = [{"address": "vllm://host:1"} | target]
    models = {"m": {"engine": "remote", "directory": str(tiny.directory), "targets": targets}}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"models": models}))
    return Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml"))


def test_each_target_of_a_fleet_has_its_own_key(tmp_path: Path, tiny: TinyCheckpoint) -> None:
    key_file(tmp_path / "key", KEY)
    targets = {"key_file": "key", "key_header": "api-key"}
    [replica] = build_serving(fleet(tmp_path, tiny, **targets)).engines["m"].replicas  # type: ignore[attr-defined]
    assert replica.engine._settings.key.header() == {"api-key": KEY}
    for wrong, message in (
        ({"key_file": "none"}, "the key of m for vllm://host:1: .*none cannot be read"),
        ({"key_header": "api-key"}, "key_header: needs a key_file"),
        ({"key_file": "key", "key_header": "host"}, "key_header: must be the name of a header"),
    ):
        with pytest.raises(SettingInvalid, match=message):
            build_serving(fleet(tmp_path, tiny, **wrong))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_key_files": {"other": Path("key")}}, "WEIR_REMOTE_KEY_FILES names other"),
        ({"remote_key_header": "te"}, "WEIR_REMOTE_KEY_HEADER must be the name of a header"),
        ({"remote_key_files": {"m": Path("/nowhere")}}, "/nowhere cannot be read"),
    ],
)
def test_keys_that_cannot_be_used_prevent_the_start(
    tmp_path: Path, tiny: TinyCheckpoint, changes: dict[str, Any], message: str
) -> None:
    usual = {"remote_key_files": {"m": key_file(tmp_path / "key", KEY)}}
    settings = Settings.of(
        home=tmp_path,
        engine="remote",
        models={"m": tiny.directory},
        remote_targets={"m": "openai+https://host:1"},
        **(usual | changes),
    )
    with pytest.raises(SettingInvalid, match=message):
        build_serving(settings)
