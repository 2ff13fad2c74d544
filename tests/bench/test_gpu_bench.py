"""Programs for a GPU: they run to their end on a CPU, with tiny models and Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux alone")
TIMEOUT_S = 300.0  # 20 times the time on two idle cores

PLANTED = """
import os
from bench.gpu import check

def dies(device):
    "Does it die?"
    os.abort()

def raises(device):
    "Does it raise?"
    raise RuntimeError("CUDA error: device-side assert triggered")

def answers(device):
    "Does it answer?"
    return True, "yes"

check.QUESTIONS = dies, answers, raises, answers
if __name__ == "__main__":
    raise SystemExit(check.main())
"""


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
    )


def test_the_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    ended = run("bench.gpu.check", "--out", str(tmp_path))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads((tmp_path / "check.json").read_text())["results"]
    assert [each["passed"] for each in results].count(True) == 3
    assert all(each["passed"] is not False for each in results)


def test_a_question_that_ends_its_process_leaves_the_others(tmp_path: Path) -> None:
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    root = str(Path(__file__).resolve().parents[2])

    ended = subprocess.run(
        [sys.executable, str(program), "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root},
        timeout=TIMEOUT_S,
    )

    assert ended.returncode == 1
    answers = [line.rpartition(" (")[0] for line in ended.stdout.splitlines()[1:]]
    assert answers == [
        "FAIL Does it die? the process ended with status -6",
        "PASS Does it answer? yes",
        "FAIL Does it raise? RuntimeError: CUDA error: device-side assert triggered",
        "PASS Does it answer? yes",
    ]


def test_every_figure_has_its_floor(tmp_path: Path) -> None:
    tiny = ("--shape", "tiny", "--batches", "1,2", "--contexts", "20", "--prompts", "8")
    brief = ("--steps", "1", "--repeats", "1", "--no-transformers")

    ended = run("bench.gpu.measure", *tiny, *brief, "--out", str(tmp_path))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "measure.json").read_text())["rows"]
    assert [(row["what"], row["size"]) for row in rows] == [
        ("decode", "batch 1, context 20"),
        ("decode", "batch 2, context 20"),
        ("decode by temperature", "batch 2, context 20"),
        ("decode by top_p", "batch 2, context 20"),
        ("prompt", "8"),
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)


def test_they_need_no_server() -> None:
    program = (
        "import sys, bench.gpu.check, bench.gpu.measure;"
        " print({'grpc', 'sqlalchemy', 'aiohttp', 'weir'} & sys.modules.keys())"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert ended.stdout.strip() == "set()"
