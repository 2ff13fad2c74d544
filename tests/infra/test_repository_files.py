"""Configuration of the repository: CI, forms, updates, container, versions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.architecture import repository

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PATHS = [source.path for source in repository()]
FORMS = ("bug", "feature")
PROCEDURES = (
    "CONTRIBUTING.md",
    "docs/releasing.md",
    ".github/pull_request_template.md",
    ".devcontainer/devcontainer.json",
)


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def make_targets() -> set[str]:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    return targets | set(checks())


def checks() -> list[str]:
    found = re.search(r"^CHECKS := (.*)$", MAKEFILE, re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_every_yaml_file_of_the_repository_can_be_read() -> None:
    names = [
        path
        for path in PATHS
        if path.endswith((".yaml", ".yml"))
        and path.startswith((".", "infra/", "compose"))
        and "/templates/" not in path  # of Helm
    ]

    assert {
        ".github/workflows/ci.yml",
        ".github/dependabot.yml",
        ".pre-commit-config.yaml",
        "compose.yaml",
    } <= set(names)
    for name in names:
        assert isinstance(load(name), dict), name


def test_ci_runs_the_script_that_developers_run() -> None:
    workflow = load(".github/workflows/ci.yml")
    job = workflow["jobs"]["all"]

    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    (checkout,) = [
        step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert checkout["with"]["fetch-depth"] == 0, (
        "the check of commit messages would read one commit only"
    )


def test_ci_may_only_read_and_pins_every_action() -> None:
    workflow = load(".github/workflows/ci.yml")
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())

    assert workflow["permissions"] == {"contents": "read"}
    assert all(
        "permissions" not in job and job["timeout-minutes"] for job in workflow["jobs"].values()
    )
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_ci_runs_versions_that_are_supported() -> None:
    job = load(".github/workflows/ci.yml")["jobs"]["all"]
    chosen = {key: value for step in job["steps"] for key, value in step.get("with", {}).items()}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "requires-python"
    ].removeprefix(">=")
    node = json.loads((ROOT / "sdk/typescript/package.json").read_text())["engines"][
        "node"
    ].removeprefix(">=")

    assert chosen["python-version"] == oldest
    assert int(chosen["node-version"]) >= float(node)


def test_pre_commit_runs_the_checks_of_make_check() -> None:
    configuration = load(".pre-commit-config.yaml")
    (local,) = configuration["repos"]
    hooks = local["hooks"]

    assert local["repo"] == "local", "hooks from elsewhere would bring versions of their own"
    assert [hook["id"] for hook in hooks] == checks()
    assert configuration["default_stages"] == ["pre-commit"]
    for hook in hooks:
        assert hook["entry"] == f"make {hook['id']}"
        assert hook["language"] == "system"
        assert (hook["pass_filenames"], hook["always_run"]) == (False, True)
        assert hook.get("stages", ["pre-commit"]) == [
            "pre-push" if hook["id"] == "commits-check" else "pre-commit"
        ]
    assert configuration["default_install_hook_types"] == ["pre-commit", "pre-push"]


def test_dependency_updates_cover_every_manifest() -> None:
    covered = {
        (update["package-ecosystem"], directory)
        for update in load(".github/dependabot.yml")["updates"]
        for directory in update.get("directories", [update.get("directory")])
    }
    ecosystems = {
        "pyproject.toml": "pip",
        "package.json": "npm",
        "Dockerfile": "docker",
        "compose.yaml": "docker-compose",
    }
    manifests = {
        (ecosystem, "/" + str(Path(path).parent).removeprefix("."))
        for path in PATHS
        for name, ecosystem in ecosystems.items()
        if Path(path).name == name
    }

    assert covered == manifests | {("github-actions", "/")}


def test_dependency_updates_come_weekly_in_one_group() -> None:
    for update in load(".github/dependabot.yml")["updates"]:
        assert update["schedule"] == {"interval": "weekly"}
        (group,) = update["groups"].values()
        assert group == {"patterns": ["*"]}


@pytest.mark.parametrize("name", FORMS)
def test_an_issue_form_has_what_github_wants(name: str) -> None:
    form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]

    assert {"name", "description", "body"} <= form.keys()
    assert {field["type"] for field in form["body"]} <= {
        "markdown",
        "input",
        "textarea",
        "dropdown",
        "checkboxes",
    }
    assert len(set(ids)) == len(ids) > 0
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_vulnerabilities_are_led_away_from_public_issues() -> None:
    chooser = load(".github/ISSUE_TEMPLATE/config.yml")

    assert chooser["blank_issues_enabled"] is False
    (link,) = chooser["contact_links"]
    assert "SECURITY.md" in link["about"]
    policy = (ROOT / "SECURITY.md").read_text()
    assert link["url"] in policy
    assert re.findall(r"\S+@\S+", policy) == [], "reports go through GitHub, and to no address"


def test_the_development_container_has_a_supported_python() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "requires-python"
    ].removeprefix(">=")

    assert container["image"].startswith(f"python:{oldest}-")
    assert container["postCreateCommand"] == "make setup-dev"


@pytest.mark.parametrize("name", PROCEDURES)
def test_make_targets_that_a_page_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    commands = re.findall(r"(?:`|^|\")make ((?:[A-Z_]+=\S+ )*)([a-z -]+)", text, re.MULTILINE)

    assert commands
    for _, targets in commands:
        assert set(targets.split()) <= make_targets(), targets
