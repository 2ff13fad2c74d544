"""Line of `make test` for programs: the tests that need a second run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_terminal_summary

STATS = {"failed": ["b.py::y", "a.py::x"], "error": ["a.py::x"], "passed": ["c.py::z"]}


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"numprocesses": 3}, ["second runs: 2 a.py::x b.py::y"]),
        ({"lf": True}, ["second runs: 3 a.py::x b.py::y c.py::z"]),
        ({}, []),
    ],
    ids=["many processes", "failed tests alone", "any other run"],
)
def test_the_line_counts_and_names_tests(options: dict[str, Any], printed: list[str]) -> None:
    reports = {
        outcome: [SimpleNamespace(nodeid=each) for each in ids] for outcome, ids in STATS.items()
    }
    lines: list[str] = []
    reporter: Any = SimpleNamespace(stats=reports, write_line=lines.append)
    config: Any = SimpleNamespace(getoption=options.get)

    pytest_terminal_summary(reporter, config)

    assert lines == printed
