"""Environment of child processes: the needed variables, and no secrets of the parent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from common.processes import inherited
from inference.safety import classifiers
from inference.workers.process import CHILD_ENVIRONMENT, SPARE_MODULE, open_worker
from inference.workers.protocol import FAMILY

pytestmark = pytest.mark.usefixtures("executed_workers")

SECRETS = {
    "STRIPE_API_KEY": "sk_live_1",
    "WEIR_STRIPE_WEBHOOK_SECRET": "whsec_1",
    "WEIR_DATABASE_URL": "postgresql://u:p@h/d",
    "PGPASSWORD": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "secret",
    "HF_TOKEN": "hf_1",
    "OPENAI_API_KEY": "sk-1",
    "GITHUB_TOKEN": "gh",
}
NEEDED = {
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "1",
    "OMP_NUM_THREADS": "2",
    "WEIR_NATIVE": "0",
    "LD_LIBRARY_PATH": "/lib",
}


def test_a_child_inherits_only_the_variables_that_it_needs() -> None:
    assert inherited({**SECRETS, **NEEDED, "PATH": "/bin"}) == {**NEEDED, "PATH": "/bin"}


@pytest.mark.parametrize(
    ("module", "environment"),
    [
        (SPARE_MODULE, CHILD_ENVIRONMENT),
        ("inference.safety.classifier_worker", classifiers.CHILD_ENVIRONMENT),
    ],
)
async def test_the_environment_of_a_running_child_has_no_secret(
    module: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    async with open_worker(module, environment) as worker:
        async with asyncio.timeout(60):
            while not (  # noqa: ASYNC110
                reported := await asyncio.to_thread(Path(f"/proc/{worker.pid}/environ").read_bytes)
            ):
                await asyncio.sleep(0.01)  # until the child has begun
        names = {entry.partition(b"=")[0].decode() for entry in reported.split(b"\0") if entry}

    assert not names & SECRETS.keys()
    assert {"PATH"} <= names <= {*os.environ, *environment, FAMILY}
