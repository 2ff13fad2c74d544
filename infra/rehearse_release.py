"""Publish a release to an index and a registry on this machine: `make release-rehearsal`.

Tags the last commit in two temporary clones and builds the packages in each, at other paths, with
another umask, and the native decoder compiled anew in one. They must be equal byte for byte. Then
serves the wheels as pip's index and the npm package as npm's registry, on the loopback, and
installs from both. `make dist-check` runs what is installed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from infra.check_dist import run
from infra.release import ROOT, build

TAG = "v9.9.9"
STEP_S = 600.0


class Repository(ThreadingHTTPServer):
    """Package index of pip at `/simple/`, and npm's registry of the packages published to it."""

    def __init__(self, wheels: list[Path]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheels = {wheel.name: wheel for wheel in wheels}
        self.published: dict[str, Any] = {}  # npm's document of each package

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request of pip or npm."""

    server: Repository

    def do_GET(self) -> None:
        """Answer with a page of the index, a wheel, npm's document, or its package."""
        path = unquote(self.path)
        last = path.rstrip("/").rpartition("/")[2]
        if last in self.server.wheels:
            self._answer(self.server.wheels[last].read_bytes())
        elif path.startswith("/simple/"):
            wheels = (each for each in self.server.wheels if project_of(each) == last)
            self._answer("".join(f'<a href="/{each}">{each}</a>' for each in wheels).encode())
        elif path[1:] in self.server.published:
            self._answer(json.dumps(self.server.published[path[1:]]).encode())
        elif package := self._attachment(path):
            self._answer(package)
        else:
            self.send_error(404)

    def do_PUT(self) -> None:
        """Keep what `npm publish` sends."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.published[unquote(self.path)[1:]] = json.loads(body)
        self._answer(b"{}")

    def _attachment(self, path: str) -> bytes | None:
        for document in self.server.published.values():
            for name, attachment in document["_attachments"].items():
                if path.endswith(f"/-/{name}"):
                    return base64.b64decode(attachment["data"])
        return None

    def _answer(self, body: bytes) -> None:
        kind = "text/html" if self.path.startswith("/simple/") else "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def project_of(wheel: str) -> str:
    """Return the name of a wheel's project, as an index writes it."""
    return wheel.partition("-")[0].replace("_", "-")


@contextmanager
def repository(wheels: list[Path]) -> Iterator[Repository]:
    """Serve wheels during the block."""
    with Repository(wheels) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def tagged_clone(directory: Path) -> Path:
    """Clone this repository with its last commit tagged as a release."""
    for command in (
        ["clone", "--quiet", str(ROOT), str(directory)],
        ["-C", str(directory), "tag", TAG],
    ):
        subprocess.run(["git", *command], check=True)
    return directory


def built_twice(scratch: Path) -> list[Path]:
    """Build the packages in two places. Raises: SystemExit if a byte differs."""
    packages = build(tagged_clone(scratch / "a"), scratch / "dist")
    before = os.umask(0o077)
    try:
        again = build(
            tagged_clone(scratch / "another"), scratch / "dist-again", native=scratch / "compile"
        )
    finally:
        os.umask(before)
    differing = [
        one.name
        for one, two in zip(packages, again, strict=True)
        if (one.name, one.read_bytes()) != (two.name, two.read_bytes())
    ]
    if differing:
        raise SystemExit(f"another build has other bytes: {', '.join(differing)}")
    return packages


def install_from_index(wheels: list[Path], index: str, scratch: Path) -> None:
    """Install the wheels by name and version with pip. Their requirements are not installed."""
    version = TAG.removeprefix("v")
    names = [f"{project_of(wheel.name)}=={version}" for wheel in wheels]
    venv = scratch / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=scratch)
    settings = {"PIP_INDEX_URL": f"{index}/simple/", "PIP_CONFIG_FILE": os.devnull}
    command = (sys.executable, "-m", "pip", "--python", venv, "install", "--no-deps", "--quiet")
    run(*command, *names, cwd=scratch, env=settings)
    code = (
        "from importlib.metadata import requires, version;"
        " print(version('weir-server'), *requires('weir-server'))"
    )
    printed = run(venv / "bin" / "python", "-c", code, cwd=scratch)
    if not printed.startswith(f"{version} weir-client=={version} "):
        raise SystemExit(
            f"the server's wheel does not require the client of its version: {printed}"
        )


def publish_and_install(package: Path, registry: str, scratch: Path) -> None:
    """Publish the npm package with npm, then install it by name into a new project."""
    project = scratch / "project"
    project.mkdir()
    host = registry.removeprefix("http:")
    (project / ".npmrc").write_text(f"@weir:registry={registry}\n{host}/:_authToken=rehearsal\n")
    (project / "package.json").write_text('{"private": true, "type": "module"}')
    run("npm", "publish", "--silent", package, cwd=project)
    run("npm", "install", "--no-audit", "--no-fund", f"@weir/client@{TAG[1:]}", cwd=project)
    run("node", "--eval", "await import('@weir/client')", "--input-type=module", cwd=project)


def main() -> int:
    """Rehearse, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="weir-rehearsal-") as directory:
        scratch = Path(directory)
        packages = built_twice(scratch)
        print(*(f"the same bytes twice: {each.name}" for each in packages), sep="\n", flush=True)
        wheels = [each for each in packages if each.suffix == ".whl"]
        (npm_package,) = (each for each in packages if each.suffix == ".tgz")
        with repository(wheels) as server:
            install_from_index(wheels, server.url, scratch)
            print("pip has installed the wheels from an index.", flush=True)
            publish_and_install(npm_package, server.url, scratch)
            print("npm has published the package, and installed it from a registry.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
