"""Format of log lines of Python's `logging`, one for all processes that write into one log."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

# The lines of a PostgreSQL error after its message, in a text or in the `repr` of an error. They
# have values of rows: names that a customer gave its users must not be in a log.
DETAILS = re.compile(
    r"(?:\n|\\n)DETAIL: .*?(?=(?:\n|\\n){2}(?:The above|During handling)|\Z)", re.DOTALL
)


def without_details(text: str) -> str:
    """Remove the values of rows from the text of an error or traceback."""
    return DETAILS.sub("", text) if "DETAIL: " in text else text


class TextLines(logging.Formatter):
    """Formatter for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Implement `logging.Formatter`."""
        return without_details(super().format(record))


class JsonLines(logging.Formatter):
    """Formatter of one JSON object a line, with the members that structlog's events have."""

    def format(self, record: logging.LogRecord) -> str:
        """Implement `logging.Formatter`."""
        line = {
            "event": without_details(record.getMessage()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
        }
        if record.exc_info:
            line["exception"] = without_details(self.formatException(record.exc_info))
        return json.dumps(line, sort_keys=True, ensure_ascii=False)


def configure_logging(minimum: int) -> None:
    """Log to stderr: text on a terminal, JSON lines elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        TextLines("%(levelname)s %(name)s %(message)s") if sys.stderr.isatty() else JsonLines()
    )
    logging.basicConfig(level=minimum, handlers=[handler])
