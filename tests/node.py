"""Programs that tests need and a machine may lack: skipped there, required by `.ci/run`."""

from __future__ import annotations

import os
import shutil

import pytest

BROWSERS = ("chromium", "google-chrome")


def node_of(why_not: str | None) -> str:
    """Return Node's path. Without it, or with a reason, skip the test or fail if it is required."""
    node = shutil.which("node")
    if node is None or why_not is not None:
        absent(why_not or "Node.js is not installed", "WEIR_REQUIRE_NODE")
    assert node is not None
    return node


def chromium() -> str:
    """Return Chromium's path. Without it, skip the test or fail if it is required."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        absent("Chromium is not installed", "WEIR_REQUIRE_CHROMIUM")
    assert found is not None
    return found


def absent(why: str, required_by: str) -> None:
    """Skip the test, or fail if a variable of the environment requires it."""
    if os.environ.get(required_by):
        pytest.fail(why)
    pytest.skip(why)
