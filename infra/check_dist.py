"""Install the packages of `make dist` into clean environments and run a request through each.

Run as `make dist-check`. The server's wheel, the client's wheel and the npm package each get an
environment of their own: the first starts the server, the second runs every command and program of
docs/quickstart.md against it, the third the first program of sdk/typescript/README.md. Then pip
resolves the extras. The dependencies that a wheel declares are linked from the environment of the
checkout, which pip has filled from the lock; unpacking torch and the others again takes a minute.
Needs Node.js and the package indexes that pip and npm are configured for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LOCK = ROOT / "requirements" / "constraints.txt"
EXTRAS = {
    "weir_client": "cli,receipts",
    "weir_server": "otel,remote,safety,tensorrt",
}
SERVER_ONLY = ("api", "celery", "inference", "metering", "numpy", "psycopg", "sqlalchemy", "torch")
REQUESTS = 6  # of the organization `demo`: two by the command, three by Python, one by Node.js
STARTED_S = 120.0
BILLED_S = 30.0
STEP_S = 600.0
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def package(pattern: str) -> str:
    """Find the one file in `dist` that matches the pattern. Raises: SystemExit."""
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{DIST} must have one {pattern}, but has {len(found)}: run make dist")
    return str(found[0])


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises: SystemExit with the output if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{done.stdout}\n{' '.join(map(str, command))} failed with status {done.returncode}"
        )
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Copy the environment, without variables that lead to this checkout or to a server."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEIR_", "PYTHON")) and name != "VIRTUAL_ENV"
    } | {"NO_COLOR": "1"}


def install(venv: Path, extra: str, *wheels: str) -> None:
    """Create a virtual environment that has only the wheels and their requirements."""
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in requirements_of(extra, *wheels):
        link(distribution(name), packages)
    pip(venv, "install", "--quiet", "--no-deps", *wheels)
    pip(venv, "check")


def requirements_of(extra: str, *wheels: str) -> set[str]:
    """Collect the distributions that the wheels require with an extra, and what those require."""
    lines = []
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
        lines += [(line, extra) for line in metadata.get_all("Requires-Dist", [])]
    found: dict[tuple[str, str], None] = {}
    while lines:
        line, of_extra = lines.pop()
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for each in ("", *requirement.extras):
            if (name, each) not in found and not name.startswith("weir-"):
                found[name, each] = None
                lines += [(line, each) for line in distribution(name).requires or ()]
    return {name for name, _ in found}


def link(installed: Distribution, packages: Path) -> None:
    """Link the files of an installed distribution into the directory `packages`."""
    for file in installed.files or ():
        target, source = packages / file, Path(str(installed.locate_file(file)))
        if ".." not in file.parts and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(source)
            except FileExistsError:  # named by two distributions
                pass
            except OSError:  # on another file system
                shutil.copy2(source, target)


def pip(venv: Path, *arguments: str | Path) -> None:
    """Run the checkout's pip on the virtual environment `venv`."""
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", venv)
    run(*command, *arguments, cwd=venv.parent)


def install_node_package(project: Path) -> None:
    """Create a Node.js project with the TypeScript client and the first program of its README."""
    project.mkdir()
    (project / "package.json").write_text('{"private": true, "type": "module"}')
    (project / "answer.js").write_text(blocks(ROOT / "sdk/typescript/README.md", "ts")[0][1])
    run("npm", "install", "--no-audit", "--no-fund", package("*.tgz"), cwd=project)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Find the code blocks of a page in some languages. Return language and content of each."""
    return [found for found in BLOCK.findall(page.read_text()) if found[0] in languages]


@contextmanager
def server(venv: Path, home: Path) -> Iterator[None]:
    """Run `weir up` of a virtual environment on a free port, and wait until it accepts requests."""
    settings = {"WEIR_HOME": str(home), "WEIR_LISTEN": "127.0.0.1:0"}
    log = home.with_suffix(".log")
    with log.open("wb") as output:
        up = subprocess.Popen(
            [venv / "bin" / "weir", "up"],
            cwd=home,
            env=clean_environment() | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        ready = wait_for(
            lambda: up.poll() is not None or (home / "connection.json").exists(), STARTED_S
        )
        if not ready or up.poll() is not None:
            raise SystemExit(f"{log.read_text()}\nweir up of the wheel did not start")
        yield
    finally:
        up.terminate()
        up.wait(STEP_S)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `condition` is true or the time is over. Return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return true


def quickstart(python: Path) -> str:
    """Build a shell script of the quickstart's commands and programs, after the set-up."""
    found = blocks(ROOT / "docs" / "quickstart.md", "sh", "python")
    return "set -eu\n" + "".join(
        f"{python} - <<'END'\n{code}END\n" if language == "python" else code
        for language, code in found
    )


def request_count(client: Path, cwd: Path, home: dict[str, str]) -> int:
    """Count the billed requests of the organization `demo` in this month."""
    month = f"{datetime.now(UTC):%Y-%m}"
    # Without --org, a line on standard error would say which organization was assumed.
    command = ("weir", "month", "show", month, "--org", "demo", "--json")
    report = run(client / command[0], *command[1:], cwd=cwd, env=home)
    count = json.loads(report)["request_counts"]["total_count"]
    assert isinstance(count, int)
    return count


def check(scratch: Path) -> None:
    """Install the packages, run them, and resolve their extras. Raises: SystemExit on failure."""
    server_venv, client_venv, project = (scratch / name for name in ("server", "client", "node"))
    wheel, client_wheel = package("weir_server-*.whl"), package("weir_client-*.whl")
    with timed("installed"), ThreadPoolExecutor() as pool:
        installs = (
            pool.submit(install, server_venv, "", client_wheel, wheel),
            pool.submit(install, client_venv, "cli", client_wheel),
            pool.submit(install_node_package, project),
        )
        for each in installs:
            each.result()

    code = f"from importlib.util import find_spec; print(*filter(find_spec, {SERVER_ONLY}))"
    if beside := run(client_venv / "bin" / "python", "-c", code, cwd=scratch).strip():
        raise SystemExit(f"the client's wheel brings packages of the server: {beside}")

    home, client = scratch / "home", client_venv / "bin"
    home.mkdir()
    environment = {
        "WEIR_HOME": str(home),
        "PATH": f"{client}{os.pathsep}{os.environ['PATH']}",
    }
    with timed("a request through each"), server(server_venv, home):
        print(run("bash", "-c", quickstart(client / "python"), cwd=scratch, env=environment))
        values = json.loads((home / "connection.json").read_text())
        connection = {"WEIR_ADDRESS": values["address"], "WEIR_API_KEY": values["api_key"]}
        print(run("node", "answer.js", cwd=project, env=connection))
        if not wait_for(lambda: request_count(client, scratch, environment) == REQUESTS, BILLED_S):
            raise SystemExit(f"the month of `demo` does not have {REQUESTS} requests")

    with timed("extras resolved"):
        for name, extras in EXTRAS.items():
            wheel = f"{package(f'{name}-*.whl')}[{extras}]"
            pip(server_venv, "install", "--quiet", "--dry-run", "--constraint", LOCK, wheel)


@contextmanager
def timed(what: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - started_s:.0f} s", flush=True)


def main() -> int:
    """Run all checks and return the exit status."""
    if shutil.which("npm") is None:
        raise SystemExit("Node.js with npm is not installed")
    with tempfile.TemporaryDirectory(prefix="weir-dist-") as directory:
        scratch = Path(directory)
        scratch.chmod(0o755)  # PostgreSQL has its own account if this runs as root
        check(scratch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
