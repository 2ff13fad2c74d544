"""The lock file holds only names and versions that any machine can install."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from infra import lock_dependencies
from infra.install import DOCS_LOCK, LOCK, ROOT
from infra.lock_dependencies import pins


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
    monkeypatch: pytest.MonkeyPatch, keep: bool
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
    assert lock_dependencies.resolve("26.3", keep) == (["joserfc==1.8.0"], [])

    [pip, weir, docs] = steps
    assert pip == (("pip==26.3",), "off")
    assert ("-c" in weir[0], str(LOCK) in weir[0], str(DOCS_LOCK) in docs[0]) == (keep,) * 3


def bare_name(requirement: str) -> str:
    """Return the name of a requirement without extras, version and marker."""
    for mark in "[<>=!~; ":
        requirement = requirement.split(mark)[0]
    return requirement.lower().replace("_", "-")
