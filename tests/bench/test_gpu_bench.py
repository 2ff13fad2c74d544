"""Programs for a GPU: they run to their end on a CPU, with tiny models and Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

import torch

from bench.gpu import check, measure

INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter
TIMEOUT_S = 300.0  # 20 times the time on two idle cores

PLANTED = """
import os
import sys
from bench.gpu import check, measure

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
    status = check.main()
    print({"grpc", "sqlalchemy", "aiohttp", "weir"} & sys.modules.keys())
    raise SystemExit(status)
"""


@INTERPRETED
def test_the_checks_pass_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch, and with short answers."""
    command = ["bench.gpu.check", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(check, "OUTPUT_TOKENS", 2)
    monkeypatch.setattr(
        check, "answers", lambda name: (each(torch.device(name)) for each in check.QUESTIONS)
    )

    assert check.main() == 0, capsys.readouterr().out

    results = json.loads((tmp_path / "check.json").read_text())["results"]
    assert [each["passed"] for each in results].count(True) == 3
    assert all(each["passed"] is not False for each in results)


def test_a_question_that_ends_its_process_leaves_the_others(tmp_path: Path) -> None:
    """And neither program needs the modules of a server."""
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
    _, *answered, needed = ended.stdout.splitlines()
    answers = [line.rpartition(" (")[0] for line in answered]
    assert needed == "set()"
    assert answers == [
        "FAIL Does it die? the process ended with status -6",
        "PASS Does it answer? yes",
        "FAIL Does it raise? RuntimeError: CUDA error: device-side assert triggered",
        "PASS Does it answer? yes",
    ]


@INTERPRETED
def test_every_figure_has_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ("--shape", "tiny", "--batches", "2", "--contexts", "20", "--prompts", "8")
    brief = ("--steps", "1", "--repeats", "1", "--no-transformers")
    command = ["bench.gpu.measure", "--device", "cpu", "--out", str(tmp_path), *tiny, *brief]
    monkeypatch.setattr(sys, "argv", command)

    measure.main()

    rows = json.loads((tmp_path / "measure.json").read_text())["rows"]
    assert [(row["what"], row["size"]) for row in rows] == [
        ("decode", "batch 2, context 20"),
        ("decode by temperature", "batch 2, context 20"),
        ("decode by top_p", "batch 2, context 20"),
        ("prompt", "8"),
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
