"""Order in which `make test` shares out the files of the tests among its processes."""

from __future__ import annotations

import pytest

from tests.conftest import next_file

FAULTS, E2E, API = "tests/faults/test_a.py", "tests/e2e/test_b.py", "tests/api/test_c.py"


@pytest.mark.parametrize(
    ("queue", "worker", "file"),
    [
        ((FAULTS, E2E, API), 0, FAULTS),
        ((E2E, API), 2, E2E),
        ((FAULTS, E2E, API), 1, API),
        ((FAULTS, API), 3, API),
        ((API,), 0, API),
        ((FAULTS, E2E), 1, FAULTS),
    ],
)
def test_every_other_worker_prefers_tests_that_wait(
    queue: tuple[str, ...], worker: int, file: str
) -> None:
    assert next_file(queue, worker) == file
