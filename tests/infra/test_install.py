"""Set-up deletes only directories that it made, and shows pip's messages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.install import create, install


def test_a_directory_that_is_no_virtual_environment_is_left_alone(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")

    with pytest.raises(SystemExit, match="is not a virtual environment"):
        create(tmp_path)

    assert treasure.read_text() == "mine"


def test_a_broken_virtual_environment_is_replaced_and_a_working_one_kept(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("home = nowhere\n")

    create(venv)
    made = (venv / "pyvenv.cfg").stat()
    create(venv)

    assert (
        subprocess.run(
            [venv / "bin" / "python", "-m", "pip", "--version"], capture_output=True
        ).returncode
        == 0
    )
    assert (venv / "pyvenv.cfg").stat().st_mtime_ns == made.st_mtime_ns


def test_refusals_by_pip_are_shown(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    # Debian's pip refuses to install outside a virtual environment.
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", venv)
    (venv / "lib").symlink_to(Path(sys.prefix) / "lib")

    with pytest.raises(SystemExit, match="Invalid requirement"):
        install(venv, "--dry-run", "not a requirement")
