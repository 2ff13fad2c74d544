"""Environment variables that a test changes have their former values again when it ends.

Some imports set variables. With another environment, servers and workers of all later tests are
executed, which takes seconds of CPU each, and not forked (`tests/forks.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.forks import decisive


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = decisive(os.environ)
    yield
    after = decisive(os.environ)
    for name in before.keys() | after.keys():
        if name not in before:
            del os.environ[name]
        elif after.get(name) != before[name]:
            os.environ[name] = before[name]
