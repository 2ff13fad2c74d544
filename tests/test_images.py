"""Contents of the images and of compose.yaml, by their files: no test builds an image."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "infra" / "images"


def instructions(name: str) -> list[str]:
    """Return the instructions of a Dockerfile, each on one line."""
    text = (IMAGES / name).read_text().replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line and not line.startswith("#")]


def extras(lines: list[str]) -> set[str]:
    (installed,) = [line for line in lines if "pip install" in line]
    found = re.search(r'-e "\.\[([a-z,]+)\]"', installed)
    assert found is not None, installed
    return set(found[1].split(","))


def test_the_image_has_every_extra_that_it_can_use() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()

    assert extras(instructions("Dockerfile")) == known - {"tensorrt"}
    assert extras(instructions("tensorrt.Dockerfile")) == known - {"tensorrt", "safety"}


def test_the_image_computes_with_the_native_library() -> None:
    """It is compiled in a separate stage and copied to the loader's path."""
    lines = instructions("Dockerfile")
    build = lines.index("RUN python -m inference.native.build --out /prebuilt")
    last_stage = max(index for index, line in enumerate(lines) if line.startswith("FROM "))

    assert any("g++" in line for line in lines[:build])
    assert not any("g++" in line for line in lines[last_stage:])
    copied = lines.index("COPY --from=native /prebuilt inference/native/prebuilt")
    assert build < last_stage < copied
    assert copied > lines.index("COPY inference inference"), "which would otherwise hide it"


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_an_image_runs_as_a_user_without_rights(name: str) -> None:
    lines = instructions(name)

    assert [line for line in lines if line.startswith("USER ")] == ["USER weir"]
    assert lines.index("USER weir") > max(index for index, line in enumerate(lines) if line.startswith("RUN "))


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_an_image_copies_what_is_there_and_not_ignored(name: str) -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#", "!")}
    copied = [
        part for line in instructions(name) if line.startswith("COPY ") and "--from" not in line for part in line.split()[1:-1]
    ]

    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert Path(path).parts[0] not in ignored, path
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text().split("packages.find", 1)[1])
    assert packages is not None
    assert {each.strip().strip('"*') for each in packages[1].split(",")} <= set(copied)


FULL_VERSION = re.compile(r"[a-z0-9./-]+:\d+\.\d+(\.\d+)?(-[a-z]+)*")


def services() -> dict[str, dict[str, Any]]:
    """Return the services of compose.yaml, with anchors resolved and variables unexpanded."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_base_images_have_full_versions_and_can_be_pinned_by_digest(name: str) -> None:
    lines = instructions(name)

    (argument,) = [line.removeprefix("ARG ") for line in lines if line.startswith("ARG ")]
    variable, image = argument.split("=")
    # A stage that only names the base image: Dependabot updates FROM, but no build arguments.
    named = {found[2]: found[1] for line in lines if (found := re.fullmatch(r"FROM ([^$ ]+) AS (\S+)", line))}
    assert FULL_VERSION.fullmatch(named.pop(image, image)), image
    assert not named
    assert {line.split()[1] for line in lines if line.startswith("FROM $")} == {f"${{{variable}}}"}


@pytest.mark.parametrize("name", ["postgres", "redis"])
def test_images_of_compose_have_full_versions_and_can_be_pinned_by_digest(name: str) -> None:
    found = re.fullmatch(r"\$\{[A-Z]+_IMAGE:-(.*)\}", services()[name]["image"])

    assert found is not None
    assert FULL_VERSION.fullmatch(found[1]), found[1]


def test_compose_builds_on_the_base_image_of_the_dockerfile() -> None:
    (argument,) = [line.removeprefix("ARG ") for line in instructions("Dockerfile") if line.startswith("ARG ")]

    assert services()["api"]["build"]["args"] == {"PYTHON_IMAGE": f"${{{argument.replace('=', ':-')}}}"}


def test_only_the_migration_connects_as_the_owner_of_the_tables() -> None:
    found = services()
    owner = found["postgres"]["environment"]["POSTGRES_USER"]
    users = {
        name: urlsplit(re.sub(r"\$\{[^}]*\}", "secret", each["environment"]["WEIR_DATABASE_URL"])).username
        for name, each in found.items()
        if "WEIR_DATABASE_URL" in each.get("environment", {})
    }

    role = users["api"]
    assert role != owner
    assert users == {"migrate": owner, "api": role, "worker": role, "stripe-webhooks": role}
    assert found["migrate"]["command"] == ["migrate", "--grant", role]
    assert [name for name, each in found.items() if "POSTGRES_PASSWORD" in str(each)] == ["postgres", "migrate"]


def test_redis_asks_for_the_password_of_the_broker_url() -> None:
    found = services()
    password = "${REDIS_PASSWORD:?set a password for Redis}"

    assert found["redis"]["command"][-2:] == ["--requirepass", password]
    for name in ("api", "worker", "stripe-webhooks"):
        assert found[name]["environment"]["WEIR_BROKER_URL"] == f"redis://:{password}@redis:6379/0"
    assert not {"ports", "expose"} & (found["redis"].keys() | found["postgres"].keys())


@pytest.mark.parametrize("name", ["migrate", "api", "worker", "stripe-webhooks"])
def test_containers_of_weir_can_write_to_their_volumes_only(name: str) -> None:
    each = services()[name]

    assert each["read_only"] is True
    assert each["tmpfs"] == ["/tmp"]
    assert each["cap_drop"] == ["ALL"]
    assert each["security_opt"] == ["no-new-privileges:true"]
    assert "VOLUME /var/lib/weir" in instructions("Dockerfile"), "the home of every service is writable"
    assert "WEIR_HOME=/var/lib/weir" in " ".join(instructions("Dockerfile"))
