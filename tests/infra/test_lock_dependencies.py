"""The lock files: versions that any machine can install, and hashes of the wheels of the image."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from infra import lock_dependencies
from infra.install import DOCS_LOCK, LOCK, ROOT
from infra.lock_dependencies import (
    IMAGE_BUILD_LOCK,
    IMAGE_LOCK,
    IMAGE_PYTHON_NEEDS,
    check,
    differences,
    image_requirements,
    lock_pins,
    pins,
    read_hashes,
    write_hashes,
)


def test_local_versions_and_editable_packages_are_left_out() -> None:
    freeze = (
        "# Editable install (weir==0.1.0)\n-e ./weir\ntorch==2.13.0" + "+cpu\nAlembic==1.20.1\n"
    )

    assert pins(freeze) == ["Alembic==1.20.1", "torch==2.13.0"]


def test_a_package_from_an_address_cannot_be_locked() -> None:
    with pytest.raises(ValueError, match="not a plain version"):
        pins("torch @ https://example.test/torch.whl\n")


def test_every_direct_dependency_is_in_the_lock() -> None:
    weir = tomllib.loads((ROOT / "pyproject.toml").read_text())
    client = tomllib.loads((ROOT / "sdk" / "python" / "pyproject.toml").read_text())
    run_time = [*weir["project"]["dependencies"], *client["project"]["dependencies"]]
    wanted = [*run_time, *weir["dependency-groups"]["dev"]]
    locked = {
        line.split("==")[0].lower().replace("_", "-")
        for line in LOCK.read_text().splitlines()
        if "==" in line
    }

    missing = [
        name for name in map(bare_name, wanted) if name not in locked and name != "weir-client"
    ]
    missing += [
        name
        for name in weir["dependency-groups"]["docs"]
        if name not in DOCS_LOCK.read_text().splitlines()
    ]

    assert missing == [], "run `make lock KEEP=1`"


@pytest.mark.parametrize("keep", [False, True])
def test_each_step_of_a_lock_installs_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keep: bool
) -> None:
    """The bundled pip, which may be old, installs the pinned one without reports of progress."""
    steps: list[tuple[tuple[str, ...], str]] = []

    def install(_: Path, part: str, *what: str, bar: str = "raw") -> None:
        assert not part.startswith("-")
        assert "==" not in part
        steps.append((what, bar))

    monkeypatch.setattr(lock_dependencies, "install", install)
    monkeypatch.setattr(lock_dependencies, "create", lambda _: None)
    monkeypatch.setattr(lock_dependencies, "freeze", lambda _: "joserfc==1.8.0\n")
    monkeypatch.setattr(lock_dependencies, "lock_images", lambda *_: None)
    monkeypatch.setattr(lock_dependencies, "ROOT", tmp_path)
    monkeypatch.setattr(lock_dependencies, "LOCK", tmp_path / LOCK.name)
    monkeypatch.setattr(lock_dependencies, "DOCS_LOCK", tmp_path / DOCS_LOCK.name)
    monkeypatch.setattr("sys.argv", ["lock", "--pip", "26.3", *(["--keep"] if keep else [])])
    assert lock_dependencies.main() == 0
    assert (tmp_path / LOCK.name).read_text().endswith("\njoserfc==1.8.0\n")

    [pip, weir, docs] = steps
    assert pip == (("pip==26.3",), "off")
    names = str(tmp_path / LOCK.name) in weir[0], str(tmp_path / DOCS_LOCK.name) in docs[0]
    assert ("-c" in weir[0], *names) == (keep,) * 3


@pytest.mark.parametrize("lock", [IMAGE_LOCK, IMAGE_BUILD_LOCK], ids=lambda lock: lock.stem)
def test_each_package_of_the_image_has_hashes_and_the_version_of_the_lock(lock: Path) -> None:
    locked = read_hashes(lock.read_text())
    needed = {bare_name(each) for each in image_requirements()[lock]}

    assert all(locked.values())
    assert needed <= {bare_name(pin) for pin in locked}
    assert write_hashes(locked) == lock.read_text()
    if lock == IMAGE_LOCK:
        others = {bare_name(pin) for pin in locked.keys() - set(lock_pins())}
        assert others == {bare_name(each) for each in IMAGE_PYTHON_NEEDS}, "run `make lock KEEP=1`"
        assert not {"torch", "triton", "transformers"} & {bare_name(pin) for pin in locked}


@pytest.mark.parametrize(
    "line",
    ["grpcio", "grpcio>=1.85", "grpcio==1 --hash=md5:00", f"grpcio==1 --hash=sha256:{'0' * 63}"],
)
def test_a_line_without_version_or_of_another_hash_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a pinned package with SHA-256 hashes"):
        read_hashes(line)


def test_the_check_names_each_missing_wrong_and_superfluous_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offered = {pin: frozenset({pin[:1] * 64, "0" * 64}) for pin in ("a==1", "b==1", "c==1")}
    assert differences(offered, offered) == []

    locked = {
        "a==1": frozenset({"0" * 64}),
        "b==1": offered["b==1"] - {"0" * 64} | {"9" * 64},
        "d==1": offered["c==1"],
    }
    expected = [
        f"a==1 lacks sha256:{'a' * 64}",
        f"b==1 has no wheel with sha256:{'9' * 64}",
        f"b==1 lacks sha256:{'0' * 64}",
        "c==1 is not locked",
        "d==1 is locked, but not needed",
    ]
    assert differences(locked, offered) == expected

    (tmp_path / "image.txt").write_text(write_hashes(locked))
    requirements = {tmp_path / "image.txt": ["a", "b", "c"]}
    monkeypatch.setattr(lock_dependencies, "ROOT", tmp_path)
    monkeypatch.setattr(lock_dependencies, "image_requirements", lambda: requirements)
    monkeypatch.setattr(lock_dependencies, "wheels", lambda *_: offered)
    assert check(tmp_path) == [f"image.txt: {each}" for each in expected]


def bare_name(requirement: str) -> str:
    """Return the name of a requirement without extras, version and marker."""
    for mark in "[<>=!~; ":
        requirement = requirement.split(mark)[0]
    return requirement.lower().replace("_", "-")
