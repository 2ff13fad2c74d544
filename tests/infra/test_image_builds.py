"""The image without torch, built by Buildah from its Dockerfile, and the services of compose.yaml
started in it as the user of the image.

No registry is asked: the base is Debian's own Python in a file system that debootstrap makes, where
the Dockerfile names an image of the same Debian. So the tests prove the build steps, the commands
and what the image contains, but not that base image, nor the limits that Docker sets: read-only
root, capabilities, networks. pip's configuration of this machine applies in the build.

`WEIR_TEST_IMAGES=build` makes the image (minutes). Another value is a directory of Buildah that has
it, of an earlier run.
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
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import yaml

from inference.adapters.remote_settings import Service as Wire
from infra.architecture import ROOT
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
    pytest.mark.timeout(900),
]

RELEASE = "bookworm"  # of the base image that the Dockerfile names
BASE, IMAGE = "localhost/base", "localhost/weir-api"
ADDRESS = "127.0.0.31"  # of every service, on the ports of compose.yaml
PASSWORDS = dict.fromkeys(("POSTGRES", "WEIR_APPLICATION", "REDIS"), "secret")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
ABSENT = {"torch", "triton", "transformers"}
BUILD_MAX_S = 800


@dataclass(frozen=True)
class Images:
    """Buildah with its own directory, and a container of the image."""

    directory: Path
    container: str = ""

    def command(self, *arguments: str) -> list[str]:
        """Return a command of Buildah."""
        locations = (
            "--root",
            str(self.directory / "root"),
            "--runroot",
            str(self.directory / "run"),
        )
        return ["buildah", *locations, "--storage-driver", "vfs", *arguments]

    def run(self, *arguments: str) -> str:
        """Run a command of Buildah and return its output."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=BUILD_MAX_S
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def inside(self, environment: Mapping[str, str], *command: str) -> list[str]:
        """Return a command that runs one in the container, as its user."""
        settings = [
            part for name, value in environment.items() for part in ("-e", f"{name}={value}")
        ]
        return self.command(
            "run", "--isolation", "chroot", *settings, self.container, "--", *command
        )


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    """Yield the built image."""
    if GIVEN != "build":
        built = Images(Path(GIVEN))
        yield Images(built.directory, built.run("from", "--pull-never", IMAGE))
        return
    for program in ("debootstrap", "buildah"):
        if shutil.which(program, path=PATH) is None or os.geteuid() != 0:
            pytest.fail(f"WEIR_TEST_IMAGES=build needs {program}, and root")
    directory = Path(tempfile.mkdtemp(prefix="weir-images-", dir=scratch()))
    try:
        empty = Images(directory)
        make_base(empty)
        ignored = ("--pull-never", "--layers=false", "--isolation", "chroot")
        mounts = [part for path in local_paths() for part in ("--volume", f"{path}:{path}:ro")]
        file = str(ROOT / "infra" / "images" / "Dockerfile")
        empty.run(
            *("bud", *ignored, *mounts, "--build-arg", f"PYTHON_IMAGE={BASE}"),
            *("--target", "api", "--tag", IMAGE, "--file", file, str(ROOT)),
        )
        yield Images(directory, empty.run("from", "--pull-never", IMAGE))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_base(images: Images) -> None:
    """Make the base image: Debian with its Python, named as in the image that it stands for."""
    tree = images.directory / "base"
    packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", packages, RELEASE, str(tree)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (tree / "usr/bin/python").symlink_to("python3")
    next(tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
    shutil.copy(AUTHORITIES, tree / AUTHORITIES.relative_to("/"))
    lines = "".join(f"{name} = {value}\n" for name, value in pip_settings().items())
    (tree / "etc/pip.conf").write_text(f"[global]\n{lines}")
    container = images.run("from", "scratch")
    images.run("add", "--quiet", container, str(tree), "/")
    images.run("config", "--env", f"PATH={PATH}", container)
    images.run("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(tree)


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine: where packages come from."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    sources = ("index-url", "extra-index-url", "find-links", "default-timeout")
    return {name: value for name, value in found if name in sources}


def local_paths() -> list[str]:
    """Return directories of this machine that pip's settings name."""
    words = " ".join(pip_settings().values()).replace("\\n", " ").split()
    paths = [Path(urlsplit(word).path) for word in words]
    return sorted({str(path) for path in paths if path.is_absolute() and path.is_dir()})


def test_the_image_is_small_and_lists_what_it_has(images: Images) -> None:
    """Prints its size beside that of torch, the largest part that it lacks."""
    root = Path(images.run("mount", images.container))
    listed = json.loads((root / "srv/weir.cdx.json").read_text())
    names = {each["name"].lower().replace("_", "-") for each in listed["components"]}
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements/constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    versions = {each["name"]: each["version"] for each in listed["components"]}

    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert {"weir-server", "weir-client", "grpcio", "psycopg"} <= names
    assert not ABSENT & names
    assert not [name for name in pinned.keys() & versions if pinned[name] != versions[name]]
    assert not list(root.glob("usr/local/lib/python3*/*-packages/torch"))
    assert not (root / "sbom").exists()
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


async def test_the_services_of_compose_work_in_the_image(images: Images, tmp_path: Path) -> None:
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
            images.inside(migrate["environment"], *command_of(migrate)),
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
            process = begin(images.inside(environment, *command_of(each)), tmp_path / f"{name}.log")
            stack.callback(end, process, tmp_path / f"{name}.log")

        health = services["api"]["healthcheck"]["test"][1:]
        await until(
            lambda: subprocess.run(images.inside({}, *health), capture_output=True).returncode == 0,
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
