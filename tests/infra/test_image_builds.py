"""The image without torch, as `infra/build_image.py` builds it, and the services of compose.yaml
started in it as the user of the image.

The tests prove the build steps, the commands and what the image contains, but not the base image
that the Dockerfile names, nor the limits that Docker sets: read-only root, capabilities, networks.

`WEIR_TEST_IMAGES=build` builds the image (minutes). Another value is the directory of an earlier
build.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from inference.adapters.remote_settings import Service as Wire
from infra.architecture import ROOT
from infra.build_image import BUILD_MAX_S, IMAGE, DownloadFailed, Images, build, missing
from infra.lock_dependencies import IMAGE_LOCK, read_hashes
from metering.proof.fsck import CHECKS, fsck
from metering.store import embedded_postgres
from metering.store.db import psycopg_conninfo
from tests.conftest import new_home, remove_home, scratch
from tests.inference.real_servers import running
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import server_process
from tests.service import MODEL, Service, make_model, until, wait_for

GIVEN = os.environ.get("WEIR_TEST_IMAGES", "")
pytestmark = [
    pytest.mark.skipif(not GIVEN, reason="WEIR_TEST_IMAGES is not set: `make test-images` sets it"),
    pytest.mark.timeout(2 * BUILD_MAX_S),
]

ADDRESS = "127.0.0.31"  # of every service, on the ports of compose.yaml
PASSWORDS = dict.fromkeys(("POSTGRES", "WEIR_APPLICATION", "REDIS"), "secret")
ABSENT = {"torch", "triton", "transformers"}
ADDED = {"weir-server", "weir-client"}
BROUGHT = {"pip", "setuptools", "wheel"}  # by the base image


@dataclass(frozen=True)
class Container:
    """Container of the image."""

    images: Images
    name: str

    @property
    def root(self) -> Path:
        """Its file system."""
        return Path(self.images.run("mount", self.name))

    def inside(self, environment: Mapping[str, str], *command: str) -> list[str]:
        """Return a command that runs one in the container, as its user."""
        settings = [
            part for name, value in environment.items() for part in ("-e", f"{name}={value}")
        ]
        return self.images.command(
            "run", "--isolation", "chroot", *settings, self.name, "--", *command
        )


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    """Yield a container of the image that was given, or is built now."""
    with ExitStack() as stack:
        if GIVEN != "build":
            images = Images(Path(GIVEN))
        else:
            if lacking := missing():
                pytest.fail(f"WEIR_TEST_IMAGES=build needs {lacking}")
            directory = Path(tempfile.mkdtemp(prefix="weir-images-", dir=scratch()))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            try:
                images = build(directory)
            except DownloadFailed as failure:
                pytest.skip(str(failure))
        name = images.run("from", "--pull-never", IMAGE)
        stack.callback(images.run, "rm", name)
        yield Container(images, name)


def test_the_image_is_small_and_lists_what_it_has(container: Container) -> None:
    """Prints its size beside that of torch, the largest part that it lacks."""
    root = container.root
    listed = json.loads((root / "srv/weir.cdx.json").read_text())
    names = {each["name"].lower().replace("_", "-") for each in listed["components"]}
    pinned = {
        (name.lower().replace("_", "-"), version)
        for name, version in (pin.split("==") for pin in read_hashes(IMAGE_LOCK.read_text()))
    }
    versions = {
        (each["name"].lower().replace("_", "-"), each["version"]) for each in listed["components"]
    }

    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert {"weir-server", "weir-client", "grpcio", "psycopg"} <= names
    assert not ABSENT & names
    assert pinned <= versions
    assert {name for name, _ in versions - pinned} <= ADDED | BROUGHT
    assert not list(root.glob("usr/local/lib/python3*/*-packages/torch"))
    assert not (root / "tools").exists()
    assert shutil.which("g++", path=str(root / "usr/bin")) is None
    subprocess.run(["du", "-sm", str(root)], check=True)


def compose() -> dict[str, Any]:
    """Return the services of compose.yaml with variables expanded, at the address of the test."""
    values = {f"{name}_PASSWORD": value for name, value in PASSWORDS.items()}
    values["WEIR_STRIPE_WEBHOOK_SECRET"] = "whsec_secret"

    def expanded(found: re.Match[str]) -> str:
        return values.get(found[1]) or (found[2] or "").removeprefix(":-").partition(":?")[0]

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        if not isinstance(value, str):
            return value
        text = re.sub(r"\$\{([A-Z_]+)(:[-?][^}]*)?\}", expanded, value)
        text = text.replace("@postgres/", f"@{ADDRESS}/").replace("@redis:", f"@{ADDRESS}:")
        return text.replace("0.0.0.0:", f"{ADDRESS}:").replace("//127.0.0.1:", f"//{ADDRESS}:")

    services: dict[str, Any] = changed(yaml.safe_load((ROOT / "compose.yaml").read_text()))
    return dict(services["services"])


def command_of(service: Mapping[str, Any]) -> list[str]:
    """Return the whole command of a service."""
    return [*service.get("entrypoint", ["weir"]), *service["command"]]


async def test_the_services_of_compose_work_in_the_image(
    container: Container, tmp_path: Path
) -> None:
    services = compose()
    model = make_model(tmp_path / "model")
    home = new_home()
    with ExitStack() as stack:
        stack.callback(remove_home, home)
        server = embedded_postgres.start(home / "postgres", {"listen_addresses": ADDRESS})
        with psycopg.connect(psycopg_conninfo(server.url), autocommit=True) as connection:
            connection.execute("CREATE ROLE weir SUPERUSER LOGIN")
        redis = [*services["redis"]["command"], "--bind", ADDRESS, "--dir", str(tmp_path)]
        stack.enter_context(running(redis, tmp_path / "redis.log", "Ready to accept"))

        migrate = services["migrate"]
        done = await asyncio.to_thread(
            subprocess.run,
            container.inside(migrate["environment"], *command_of(migrate)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

        upstream = stack.enter_context(
            server_process(model, make_certificates(tmp_path / "certificates"))
        )
        engine = {
            "WEIR_ENGINE": "remote",
            "WEIR_REMOTE_TARGETS": f"{MODEL}={upstream.target(Wire.TRTLLM)}",
        }
        for name in ("api", "worker", "stripe-webhooks"):
            each = services[name]
            environment = each["environment"] | (engine if name == "api" else {})
            process = begin(
                container.inside(environment, *command_of(each)), tmp_path / f"{name}.log"
            )
            stack.callback(end, process, tmp_path / f"{name}.log")

        health = services["api"]["healthcheck"]["test"][1:]
        await until(
            lambda: (
                subprocess.run(container.inside({}, *health), capture_output=True).returncode == 0
            ),
            "the health check of the api",
            poll_s=1,
        )
        service = Service(tmp_path / "unused", server.url, model)
        service.address = f"{ADDRESS}:8443"
        tenant = await service.tenant()
        wait_for(service.serving, "the api to serve")
        async with service.stream(tenant.secret) as stream:
            finished = await stream.finished(await stream.begin())
        await until(
            lambda: all(event["rated_at"] for event in service.database.events(tenant)),
            "the worker to rate",
        )
        with socket.create_connection((ADDRESS, 8377)):
            pass
        verdicts = list(fsck(server.url, CHECKS))

    assert finished.usage.billed_token_count == 20
    assert [each.check.name for each in verdicts if each.violation_count] == []


def begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the container."""
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def end(process: subprocess.Popen[bytes], log: Path) -> None:
    """Terminate a command in the container; print its log, which pytest shows if a test fails."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    print(log.name, log.read_text(errors="replace")[-3000:])
