"""Changes of the environment end with the test that made them."""

from __future__ import annotations

import os

import pytest

from tests.forks import ENVIRONMENT, decisive


@pytest.mark.parametrize("number", range(2))
def test_changes_of_a_test_end_with_it(number: int) -> None:
    assert decisive(os.environ) == decisive(ENVIRONMENT), "as servers of forked processes need it"

    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["PATH"] += os.pathsep + "/nowhere"
    del os.environ["TRITON_INTERPRET"]
