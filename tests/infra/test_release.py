"""The tag of a release is the only source of the version, in every package and file that has it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from weir_cli import checkout
from weir_cli.checkout import version_of

from infra.release import ROOT, UNRELEASED, VERSIONED, npm_version, pack, stamp


@pytest.mark.parametrize(
    ("described", "expected", "of_npm"),
    [
        ("", "0.1.0.dev1563", "0.1.0-dev.1563"),
        ("v0.2.0-0-g1e038a69", "0.2.0", "0.2.0"),
        ("v0.2.0-5-g1e038a69", "0.2.1.dev5", "0.2.1-dev.5"),
        ("v1.10.3-12-gabc", "1.10.4.dev12", "1.10.4-dev.12"),
    ],
)
def test_a_tag_gives_the_version(described: str, expected: str, of_npm: str) -> None:
    assert version_of(described, 1563) == expected
    assert npm_version(expected) == of_npm


def test_a_tag_that_is_no_version_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"named like v0\.2\.0, got v2-0-gabc"):
        version_of("v2-0-gabc", 9)


@dataclass
class Installed:
    """Metadata of an installed package, as much as its version needs."""

    origin: str
    version: str = "0.0.0"

    def read_text(self, name: str) -> str:
        assert name == "direct_url.json"
        return self.origin


def test_a_checkout_has_the_version_of_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    def shown() -> str:
        return re.sub("[0-9a-f]{7,}", "COMMIT", checkout.installed_version())

    root = tmp_path / "a clone"
    root.mkdir()
    origin = {"url": root.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(checkout, "distribution", lambda _: Installed(json.dumps(origin)))
    assert shown() == "0.0.0"  # no repository

    monkeypatch.chdir(root)
    git("init", "--quiet")
    (root / "file").touch()
    git("add", ".")
    git("commit", "--quiet", "--message", "First")
    assert shown() == "0.1.0.dev1+gCOMMIT"
    git("tag", "v0.2.0")
    assert shown() == "0.2.0+gCOMMIT"
    git("commit", "--quiet", "--allow-empty", "--message", "Second")
    (root / "file").write_text("changed")
    assert shown() == "0.2.1.dev1+gCOMMIT.changed"


def test_a_package_that_is_not_a_checkout_has_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for origin in ("", '{"url": "https://weir.example.com/wheel.whl", "archive_info": {}}'):
        monkeypatch.setattr(checkout, "distribution", lambda _: Installed(origin, "0.2.0"))  # noqa: B023
        assert checkout.installed_version() == "0.2.0"


def test_the_version_is_written_into_every_package(tmp_path: Path) -> None:
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    stamp(tmp_path, "0.2.1.dev5")

    server, client = (
        tomllib.loads((tmp_path / path).read_text())["project"]
        for path in ("pyproject.toml", "sdk/python/pyproject.toml")
    )
    node, lock = (
        json.loads((tmp_path / "sdk/typescript" / name).read_text())
        for name in ("package.json", "package-lock.json")
    )
    assert "weir-client==0.2.1.dev5" in server["dependencies"]
    assert server["version"] == client["version"] == "0.2.1.dev5"
    assert node["version"] == lock["version"] == lock["packages"][""]["version"] == "0.2.1-dev.5"
    for name in VERSIONED:
        assert not re.search(rf'(?<![\d.]){re.escape(UNRELEASED)}"', (tmp_path / name).read_text())
    with pytest.raises(SystemExit, match=r"must have the version 0\.0\.0: tags have the others"):
        stamp(tmp_path, "0.3.0")


def test_an_archive_depends_on_its_content_only(tmp_path: Path) -> None:
    archives = []
    for parent, changed_s in (("a", 1), ("another", 2)):
        source = tmp_path / parent / "weir-1"
        source.mkdir(parents=True)
        (source / "file").write_text("content")
        os.utime(source / "file", (changed_s, changed_s))
        archives.append(tmp_path / f"{parent}.tar.gz")
        pack(source, archives[-1], 1_700_000_000)

    assert archives[0].read_bytes() == archives[1].read_bytes()
