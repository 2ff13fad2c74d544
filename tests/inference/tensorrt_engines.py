"""TensorRT-LLM engines over the double, for tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.adapters.tensorrt_settings import TensorRtOptions, TensorRtSettings
from tests.conftest import new_database
from tests.inference.checkpoints import TinyCheckpoint
from tests.service import Service, running

DOUBLE = Path(__file__).parent.parent / "tensorrt_double"
OPTIONS = TensorRtOptions(block_tokens=16, abort_drain_s=0.5, canary_timeout_s=20.0)


def tensorrt_settings(
    checkpoint: TinyCheckpoint,
    *,
    faults: str = "",
    version: str = "",
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> TensorRtSettings:
    """Return settings with small pools and short pauses. faults: for `TENSORRT_DOUBLE`."""
    environment = {"TENSORRT_DOUBLE": faults, "OMP_NUM_THREADS": "1"} | (
        {"TENSORRT_DOUBLE_VERSION": version} if version else {}
    )
    defaults: dict[str, Any] = {
        "step_token_count_max": 256,
        "running_sequence_count_max": 16,
        "restart_delay_s_min": 0.05,
    }
    settings = TensorRtSettings(
        directory=checkpoint.directory, name="tiny", options=replace(OPTIONS, **(options or {}))
    )
    return replace(settings, environment=environment, **(defaults | changes))


def find_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes find the double."""
    root = str(Path(__file__).parent.parent.parent)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, (str(DOUBLE), root, os.environ.get("PYTHONPATH", "")))),
    )


@contextlib.contextmanager
def tensorrt_service(
    home: Path, model: Path, postgres_server: str, template_database: str, **settings: Any
) -> Iterator[Service]:
    """Yield a server whose engine is the double."""
    with (
        new_database(postgres_server, template=template_database) as url,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        find_double(monkeypatch)
        settings |= {
            "engine": "tensorrt",
            "tensorrt_batch_max": 8,
            "tensorrt_python": sys.executable,
        }
        with running(Service(home, url, model, **settings)) as service:
            yield service
