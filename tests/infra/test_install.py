"""Set-up deletes only directories that it made, and shows pip's messages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pip
import pytest

from infra.install import LOCK, Progress, create, install, install_torch_for_cpus


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
        install(venv, "tools", "--dry-run", "not a requirement")


PIP_LINES = [
    ("", "looking for packages"),
    ("Collecting torch==2.13.0 (from weir-server==0.1.0)", "looking for packages, 1 found"),
    (
        "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (188.9 MB)",
        "downloading torch-2.13.0; 0 MB so far",
    ),
    ("Progress 94000000 of 188900000", "downloading torch-2.13.0 94 of 189 MB; 94 MB so far"),
    ("Progress 188900000 of 188900000", "downloading torch-2.13.0 189 of 189 MB; 189 MB so far"),
    (
        "Using cached numpy-2.4.1-cp311-cp311-manylinux_2_27_x86_64.whl (18 MB)",
        "downloading numpy-2.4.1; 189 MB so far",
    ),
    ("Collecting sympy>=1.13.3 (from torch)", "looking for packages, 2 found"),
    (
        "Processing ./wheels/sympy-1.14.0-py3-none-any.whl",
        "downloading sympy-1.14.0; 189 MB so far",
    ),
    ("Installing collected packages: torch, numpy, sympy", "unpacking 0 of 3 packages"),
]


def test_progress_follows_the_lines_of_pip(tmp_path: Path) -> None:
    progress = Progress(tmp_path, "part 3 of 3")

    for line, shown in PIP_LINES:
        progress.read(line)
        assert str(progress) == f"part 3 of 3: {shown}"

    (tmp_path / "lib/python3.11/site-packages/numpy-2.4.1.dist-info").mkdir(parents=True)
    assert str(progress) == "part 3 of 3: unpacking 1 of 3 packages"
    assert (progress.installed_count, progress.downloaded_bytes) == (3, 188_900_000)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no CUDA")
@pytest.mark.parametrize("is_offered", [True, False])
def test_without_a_gpu_torch_without_cuda_is_taken_where_pip_finds_it(
    is_offered: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real pip looks into a directory, and nowhere else."""
    offered = tmp_path / "offered"
    offered.mkdir()
    (version,) = re.findall(r"^torch==(\S+)$", LOCK.read_text(), re.MULTILINE)
    if is_offered:
        make_wheel(offered, "torch", f"{version}+cpu")
    make_wheel(offered, "torch", version)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    monkeypatch.setattr("infra.install.has_nvidia_gpu", lambda: False)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")

    install_torch_for_cpus(venv)

    found = [path.name for path in venv.glob("lib/python*/site-packages/torch-*")]
    assert found == ([f"torch-{version}+cpu.dist-info"] if is_offered else [])
    assert ("several GB" in capsys.readouterr().out) is not is_offered


def make_wheel(directory: Path, name: str, version: str) -> None:
    """Write the smallest wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    with ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
