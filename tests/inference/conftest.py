"""Fixtures of the engine's tests: one tiny checkpoint per session, and one thread, since cores are shared."""

from __future__ import annotations

import pytest
import torch

from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A random two-layer checkpoint with grouped heads and a context of 2,048 tokens."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", seed=11, shape=LlamaShape())
