"""Fixtures of the engine's tests: one tiny checkpoint per session, and one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.real_servers import SHAPE, RealServers
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import ServerProcess, server_process


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Return a random two-layer checkpoint with grouped heads and a context of 2,048 tokens."""
    return make_checkpoint(
        tmp_path_factory.mktemp("tiny") / "checkpoint", seed=11, shape=LlamaShape()
    )


@pytest.fixture(scope="session")
def _remote_process(
    tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    certificates = make_certificates(tmp_path_factory.mktemp("remote") / "certificates")
    with server_process(tiny.directory, certificates) as server:
        yield server


@pytest.fixture
def remote_server(_remote_process: ServerProcess) -> Iterator[ServerProcess]:
    """Yield a shared, faultless server of both services on that checkpoint."""
    _remote_process.go_wrong()
    yield _remote_process
    _remote_process.go_wrong()


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServers]:
    """Yield the servers on one checkpoint."""
    folder = tmp_path_factory.mktemp("real")
    checkpoint = make_checkpoint(folder / "checkpoint", seed=3, shape=SHAPE)
    with contextlib.ExitStack() as stack:
        yield RealServers(checkpoint, folder, stack)
