"""Format of log lines of Python's `logging`, one for all processes that write into one log."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """Formatter of one JSON object a line, with the members that structlog's events have."""

    def format(self, record: logging.LogRecord) -> str:
        """Implement `logging.Formatter`."""
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, sort_keys=True, ensure_ascii=False)


def configure_logging(minimum: int) -> None:
    """Log to stderr: text on a terminal, JSON lines elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(name)s %(message)s")
        if sys.stderr.isatty()
        else JsonLines()
    )
    logging.basicConfig(level=minimum, handlers=[handler])
