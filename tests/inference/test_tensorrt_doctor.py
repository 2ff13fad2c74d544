"""The doctor's questions, put to the stand-in: it answers as it is written down, and what could not work is called bad."""

from __future__ import annotations

import pytest

from inference.adapters import tensorrt_doctor as doctor
from inference.adapters.findings import Observation, Verdict
from inference.limits import EngineLimits
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.tensorrt_core import double_imported
from tests.inference.tensorrt_hosted import OPTIONS

KILLED = "After a worker process is killed, do its sequence and the library's health check stay silent"
LIMITS = EngineLimits(context_window_tokens=2048, step_token_count_max=64, running_sequence_count_max=2)


def examine(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, faults: str) -> dict[str, Observation]:
    monkeypatch.setattr(doctor, "SILENCE_S", 0.5)
    with double_imported(monkeypatch, faults):
        found = doctor.examine(str(tiny.directory), 400, LIMITS, OPTIONS)
    return {observation.question.partition("?")[0]: observation for observation in found}


def test_a_machine_that_does_what_is_written_down(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(tiny, monkeypatch, "")

    assert len(found) == len(doctor.QUESTIONS) + 2
    assert [each for each in found.values() if each.verdict is not Verdict.EXPECTED] == []
    assert found["Does it cache prompts, separated by salt"].seen.startswith("cold 0, again 320")
    assert "silence" in found[KILLED].seen


def test_a_machine_on_which_the_engine_would_not_work(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SUBMITTED", doctor.SUBMITTED | {"tenant"})
    found = examine(tiny, monkeypatch, "lonely,mute_abort")

    assert found["Does `generate_async` accept the adapter's arguments"].verdict is Verdict.BAD
    assert found["Does an abort after the first token end it as cancelled"].verdict is Verdict.OTHER
    assert "no worker process" in found[KILLED].seen
