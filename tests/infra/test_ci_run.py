"""`.ci/run` with substitutes for `make` and the build of the image: its output, status and end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.processes import command_line as command
from common.processes import descendants
from infra.architecture import ROOT

PROGRAMS = ("debootstrap", "buildah", "redis-server", "postgres", "pgbouncer", "npm", "chromium")
SUMMARY = "===== 5 passed in 3.00s ====="
MAKE = f"""#!/usr/bin/env bash
[[ $* == checks ]] || echo "makes $*"
case "$*" in
  "$SLEEPS") if [[ $SLEEPS == test ]]; then sleep 600 & fi; sleep 600 ;; # the former ignores SIGINT
  checks) echo lint types architecture migrations-check ;;
  test) echo '{SUMMARY}' ;;
esac
[[ "$*" != "$FAILS" ]]
"""
STEPS = (
    *(
        "lint",
        "types",
        "lock-check",
        "docs",
        "dist",
        "dist-check",
        "clients",
        "peers",
        "edge",
        "images",
    ),
)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Return a folder with `.ci/run`, in which every program is there and only `make` does much."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra/build_image.py").write_text("print('built')\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "make").write_text(MAKE)
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def started(house: Path, **environment: str) -> subprocess.Popen[str]:
    scratch = house / "scratch"
    scratch.mkdir(exist_ok=True)
    paths = {"PATH": f"{house / 'bin'}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(scratch)}
    given: Mapping[str, str] = {"FAILS": "none", "SLEEPS": "none", **environment}
    return subprocess.Popen(
        [house / ".ci/run"],
        env={**os.environ, **paths, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_every_step_has_its_output_below_its_header_and_the_summary_comes_last(house: Path) -> None:
    output, _ = (run := started(house)).communicate(timeout=60)

    assert run.returncode == 0, output
    parts = {part.partition("\n")[0]: part for part in output.split("\n\n== ")}
    of_root = STEPS if os.geteuid() == 0 else STEPS[:-1]
    for step in of_root:
        assert "\nmakes " in parts[step], output
        assert f"\n== {step}: ok in " in parts[step], output
    assert not {"architecture", "migrations-check"} & set(parts), "they are among the tests"
    assert output.splitlines()[-2:] == ["all passed", SUMMARY]


@pytest.mark.parametrize(
    ("fails", "step"),
    [
        ("lint", "lint"),
        ("docs", "docs"),
        ("test-peers PEERS=--install-max-s 180 helm oidc_provider patroni", "peers"),
        ("test-peers PEERS=--install-max-s 180 envoy", "edge"),
        ("test", "tests"),
    ],
)
def test_a_failed_step_is_named_when_the_others_have_run(
    house: Path, fails: str, step: str
) -> None:
    output, _ = (run := started(house, FAILS=fails)).communicate(timeout=60)

    assert run.returncode == 1
    assert output.splitlines()[-1] == f"failed: {step}"
    assert SUMMARY in output


def test_a_failed_set_up_ends_it(house: Path) -> None:
    output, _ = (run := started(house, FAILS="setup-dev")).communicate(timeout=60)

    assert run.returncode == 1
    assert SUMMARY not in output


@pytest.mark.parametrize(
    ("sleeps", "number"),
    [("setup-dev", signal.SIGINT), ("types", signal.SIGTERM), ("test", signal.SIGHUP)],
)
def test_whoever_stops_it_stops_all_it_has_started(
    house: Path, sleeps: str, number: signal.Signals
) -> None:
    (house / "infra/build_image.py").write_text("import time; time.sleep(600)")
    run = started(house, SLEEPS=sleeps)
    deadline = time.monotonic() + 60
    while not any("sleep 600" in command(pid) for pid in descendants(run.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    below = descendants(run.pid)

    run.send_signal(number)
    run.communicate(timeout=60)

    assert run.returncode == 128 + number
    assert [command(pid) for pid in below if command(pid)] == []
    assert list((house / "scratch").iterdir()) == []
