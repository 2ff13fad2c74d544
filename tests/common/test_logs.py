"""Log lines without values of rows."""

from __future__ import annotations

import logging
import sys

import psycopg
import pytest

from common.incidents import log_incident
from common.logs import JsonLines, TextLines, without_details
from metering.store.db import psycopg_conninfo

NAME = "alice-5ecf1a70"


def violation(database_url: str) -> Exception:
    """Return an error of the database whose details have the name."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute("CREATE TEMPORARY TABLE named (name text UNIQUE)")
        connection.execute("INSERT INTO named VALUES (%s)", [NAME])
        with pytest.raises(psycopg.errors.UniqueViolation) as error:
            connection.execute("INSERT INTO named VALUES (%s)", [NAME])
    assert NAME in str(error.value), "otherwise there is nothing to remove"
    return error.value


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_no_line_has_the_values_of_a_row(
    database_url: str, formatter: logging.Formatter, capsys: pytest.CaptureFixture[str]
) -> None:
    error = violation(database_url)
    try:
        try:
            raise error
        except psycopg.Error as cause:
            raise ValueError("no room") from cause
    except ValueError:
        record = logging.LogRecord(
            "weir", logging.ERROR, "", 0, "failed: %s, %r", (error, error), sys.exc_info()
        )
    line = formatter.format(record)
    log_incident(error)

    assert NAME not in line
    assert "duplicate key value" in line
    assert "ValueError: no room" in line
    assert NAME not in capsys.readouterr().out


def test_a_text_without_details_is_kept() -> None:
    assert without_details("DETAIL: at the start\nand more") == "DETAIL: at the start\nand more"
