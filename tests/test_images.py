"""Images and compose.yaml, checked by their files. `make test-images` builds one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from inference.adapters.tensorrt_settings import VERSION
from infra import build_image
from infra.build_image import BuildFailed, DownloadFailed
from tests.inference.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "infra" / "images"
ADDED_FOR_WORKER = {"msgspec"}
# Third-party modules of the worker that NVIDIA's image has: requirements of torch, transformers.
IN_IMAGE_OF_TENSORRT = {"jinja2", "markupsafe", "numpy", "tokenizers"}

IMPORTS = """
import importlib.abc, sys
allowed = set(sys.argv[2:])

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in allowed:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Guard())
import inference.doctor.tensorrt_questions
import inference.adapters.tensorrt_worker
from inference.text.text_decoder import TextDecoder
from inference.text.tokenizer import Tokenizer
known = Tokenizer(__import__("pathlib").Path(sys.argv[1]))
TextDecoder(known.backend, known.special_token_ids, sys.argv[1] + "/tokenizer.json")
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import raises
from pathlib import Path
import api.serving
from api.core.settings import Settings
from api.fleet.fleet import build_serving
model = Path(sys.argv[1])
settings = Settings.of(home=model, models={"m": model}, engine="tensorrt")
assert list(build_serving(settings).engines) == ["m"]
"""
FULL_VERSION = re.compile(r"[a-z0-9./-]+:\d+\.\d+(\.\d+)?(-[a-z]+)*(@sha256:[0-9a-f]{64})?")


def instructions(name: str) -> list[str]:
    """Return the instructions of a Dockerfile, each on one line."""
    text = (IMAGES / name).read_text().replace("\\\n", " ")
    return [
        re.sub(r"\s+", " ", line) for line in text.splitlines() if line and not line.startswith("#")
    ]


def extras(lines: list[str]) -> set[str]:
    (installed,) = [line for line in lines if "weir_server-*.whl)[" in line]
    found = re.search(r'(?:-e "\.|weir_server-\*\.whl\))\[([a-z,]+)\]"', installed)
    assert found is not None, installed
    return set(found[1].split(","))


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_image_has_every_extra_that_it_can_use() -> None:
    known = project()["optional-dependencies"].keys()

    assert extras(instructions("Dockerfile")) == known - {"tensorrt"}


def test_the_server_of_the_tensorrt_image_has_all_requirements_but_torch() -> None:
    [line] = [line for line in instructions("tensorrt.Dockerfile") if "tomllib" in line]
    script = re.search(r'python3 -c "(.*?)" > /wheels/server.txt', line)
    assert script is not None

    printed = subprocess.run(
        [sys.executable, "-c", script[1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    extras = project()["optional-dependencies"]
    wanted = {*project()["dependencies"], *(each for name in extras for each in extras[name])}
    assert wanted - set(printed) == {"weir-client==0.0.0", "torch==2.13.0", *extras["safety"]}
    assert set(printed) < wanted


def test_the_worker_of_the_tensorrt_image_has_the_supported_library_and_what_it_lacks() -> None:
    lines = instructions("tensorrt.Dockerfile")
    [worker] = [line for line in lines if "--system-site-packages" in line]
    added = re.search(r"install --no-deps -c /srv/constraints.txt (.*) /srv/wheels/weir_s", worker)

    assert f"ARG TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:{VERSION}" in lines
    assert "/srv/worker/bin/python" in "".join(
        line for line in lines if "WEIR_TENSORRT_PYTHON" in line
    )
    assert added is not None
    assert set(added[1].split()) == ADDED_FOR_WORKER


def test_the_worker_imports_only_what_its_interpreter_has(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    allowed = {"common", "inference", *ADDED_FOR_WORKER, *IN_IMAGE_OF_TENSORRT}

    def imports(names: set[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IMPORTS, str(tmp_path), *names]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    found = imports(allowed)
    assert found.returncode == 0, found.stderr
    for name in ADDED_FOR_WORKER:
        assert "is not installed here" in imports(allowed - {name}).stderr, "the guard must act"


def test_the_server_needs_no_torch_without_an_embedded_engine(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_the_image_has_the_wheels_and_the_native_library_that_a_stage_before_it_builds() -> None:
    lines = instructions("Dockerfile")
    compiled = lines.index("RUN python -m inference.native.build")
    (built,) = [index for index, line in enumerate(lines) if " wheel --no-build-iso" in line]
    first_image = lines.index("FROM ${PYTHON_IMAGE} AS api")
    copied = lines.index("COPY --from=wheels /wheels /srv/wheels")
    (installed,) = [index for index, line in enumerate(lines) if "-r /srv/image.txt" in line]

    assert any("g++" in line for line in lines[:compiled])
    assert not any("g++" in line for line in lines[first_image:])
    assert compiled > lines.index("COPY inference inference"), "which would otherwise hide it"
    assert compiled < built < first_image < copied < installed
    assert [line for line in lines[first_image:] if line.startswith("COPY ")] == [
        "COPY requirements/image.txt /srv/image.txt",
        lines[copied],
        "COPY requirements/constraints.txt /srv/constraints.txt",
    ], "no sources"


def test_the_image_without_torch_has_packages_with_known_hashes_only() -> None:
    """Wheels of Weir itself are built in the stage before, without an environment of their own."""
    lines = instructions("Dockerfile")
    runs = [line for line in lines[: lines.index("FROM api")] if line.startswith("RUN ")]
    installs = [part for line in runs for part in re.findall(r"pip (?:install|wheel)[^&]*", line)]

    assert len(installs) == 4
    for each in installs:
        hashed = re.fullmatch(r"pip install --require-hashes -r \S+ ?", each)
        own = "--no-deps" in each and set(re.findall(r"\S+\.whl|sdk/python|\s\.$", each))
        assert hashed or own, each
        assert "wheel" not in each.split()[1] or "--no-build-isolation" in each


def test_a_base_of_other_packages_than_recorded_is_refused() -> None:
    """A changed, a missing and an additional package, and no record."""
    recorded = IMAGES / "debian-amd64.txt"
    found = {line[66:]: line[:64] for line in recorded.read_text().splitlines() if line[0] != "#"}
    first, second, *_ = found
    build_image.compare(recorded, found)

    for changed, expected in [
        (found | {first: "0" * 64}, f"not recorded: {'0' * 64}  {first}"),
        (
            {name: found[name] for name in found if name != second},
            f"recorded: {found[second]}  {second}",
        ),
        (found | {"xz_1_amd64.deb": "1" * 64}, f"not recorded: {'1' * 64}  xz_1_amd64.deb"),
    ]:
        with pytest.raises(BuildFailed) as raised:
            build_image.compare(recorded, changed)
        assert expected in str(raised.value).partition("--record\n")[2].splitlines()
    with pytest.raises(BuildFailed, match=r"other packages than infra/images/debian-sparc\.txt"):
        build_image.compare(IMAGES / "debian-sparc.txt", found)


def test_a_base_is_compared_before_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> str:
        ran.append(command)
        if "--download-only" in command:
            archives = tmp_path / "base/var/cache/apt/archives"
            archives.mkdir(parents=True)
            (archives / "dpkg_1_amd64.deb").write_bytes(b"planted")
        return "amd64\n"

    monkeypatch.setattr(build_image, "run", run)
    with pytest.raises(BuildFailed, match=r"not recorded: [0-9a-f]{64}  dpkg_1_amd64\.deb"):
        build_image.make_base(build_image.Images(tmp_path))

    assert "--download-only" in ran[-1]


@pytest.mark.parametrize(
    ("name", "images"), [("Dockerfile", 2), ("tensorrt.Dockerfile", 1)], ids=["torch", "tensorrt"]
)
def test_images_run_as_a_user_without_rights(name: str, images: int) -> None:
    stages: list[list[str]] = []
    for line in instructions(name):
        if line.startswith("FROM "):
            stages.append([])
        elif stages:
            stages[-1].append(line)

    for lines in stages[-images:]:
        assert [line for line in lines if line.startswith("USER ")][-1] == "USER weir"
        assert lines.index("USER weir") > max(
            index for index, line in enumerate(lines) if line.startswith("RUN ")
        )


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_an_image_copies_what_is_there_and_not_ignored(name: str) -> None:
    ignored = {
        line.rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line[:1] not in ("", "#", "!")
    }
    copied = [
        part
        for line in instructions(name)
        if line.startswith("COPY ") and "--from" not in line
        for part in line.split()[1:-1]
    ]

    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert Path(path).parts[0] not in ignored, path
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {each.strip("*") for each in setuptools["packages"]["find"]["include"]} <= set(copied)


def services() -> dict[str, dict[str, Any]]:
    """Return the services of compose.yaml, with anchors resolved and variables unexpanded."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
        "services"
    ]
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "tensorrt.Dockerfile"])
def test_base_images_have_full_versions_and_can_be_pinned_by_digest(name: str) -> None:
    lines = instructions(name)

    (argument,) = [line.removeprefix("ARG ") for line in lines if line.startswith("ARG ")]
    variable, image = argument.split("=")
    # Stage that only names the base image: Dependabot updates FROM, but no build arguments.
    named = {
        found[2]: found[1]
        for line in lines
        if (found := re.fullmatch(r"FROM ([^$ ]+) AS (\S+)", line))
    }
    base = named.pop(image, image)
    assert FULL_VERSION.fullmatch(base), base
    assert ("@sha256:" in base) == (name == "Dockerfile"), base
    assert not named
    assert {line.split()[1] for line in lines if line.startswith("FROM $")} == {f"${{{variable}}}"}


@pytest.mark.parametrize("name", ["postgres", "redis"])
def test_images_of_compose_have_full_versions_and_can_be_pinned_by_digest(name: str) -> None:
    found = re.fullmatch(r"\$\{[A-Z]+_IMAGE:-(.*)\}", services()[name]["image"])

    assert found is not None
    assert FULL_VERSION.fullmatch(found[1]), found[1]


def test_compose_builds_on_the_base_image_of_the_dockerfile() -> None:
    (argument,) = [
        line.removeprefix("ARG ") for line in instructions("Dockerfile") if line.startswith("ARG ")
    ]

    assert services()["api"]["build"]["args"] == {
        "PYTHON_IMAGE": f"${{{argument.replace('=', ':-')}}}"
    }


def test_only_the_migration_connects_as_the_owner_of_the_tables() -> None:
    found = services()
    owner = found["postgres"]["environment"]["POSTGRES_USER"]
    users = {
        name: urlsplit(
            re.sub(r"\$\{[^}]*\}", "secret", each["environment"]["WEIR_DATABASE_URL"])
        ).username
        for name, each in found.items()
        if "WEIR_DATABASE_URL" in each.get("environment", {})
    }

    role = users["api"]
    assert role != owner
    assert users == {"migrate": owner, "api": role, "worker": role, "stripe-webhooks": role}
    assert found["migrate"]["command"] == ["migrate", "--grant", role]
    assert [name for name, each in found.items() if "POSTGRES_PASSWORD" in str(each)] == [
        "postgres",
        "migrate",
    ]


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
    assert "VOLUME /var/lib/weir" in instructions("Dockerfile"), (
        "the home of every service is writable"
    )
    assert "WEIR_HOME=/var/lib/weir" in " ".join(instructions("Dockerfile"))


@pytest.mark.parametrize(
    ("output", "failure"),
    [
        ("E: Couldn't download https://deb.debian.org/libc6.deb", DownloadFailed),
        ("E: Failed to fetch http://deb.debian.org/g++.deb  Connection timed out", DownloadFailed),
        ("WARNING: Retrying (Retry(total=0)) after connection broken", DownloadFailed),
        ("ERROR: No matching distribution found for grpcio==0.0.1", BuildFailed),
        ("error: 'decoder.cpp': syntax", BuildFailed),
    ],
)
def test_a_failed_download_is_another_failure_than_a_fault(
    output: str, failure: type[BuildFailed]
) -> None:
    with pytest.raises(BuildFailed, match="status 100") as raised:
        build_image.run(["sh", "-c", 'echo "$0" >&2; exit 100', output])

    assert raised.type is failure


def test_a_build_that_takes_too_long_is_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_image, "BUILD_MAX_S", 0.1)

    with pytest.raises(DownloadFailed, match="took longer"):
        build_image.run(["sleep", "30"])


def test_a_build_can_read_the_local_packages_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index names files beside it, so its parent is needed."""
    for name in ("index/simple", "index/files", "wheels"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "index" / "simple").as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels {tmp_path}/missing")

    assert build_image.local_paths() == [f"{tmp_path}/index", f"{tmp_path}/wheels"]
