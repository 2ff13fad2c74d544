"""Logs: one event per line, to standard error. Never prompt or completion text, never secrets."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Unfailing(io.TextIOBase):
    """A text stream that drops what cannot be written: a full disk must not break the work that is being logged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As much as goes."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As far as it goes."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logs(level: str) -> None:
    """Events of this level and above; readable on a terminal, JSON elsewhere."""
    minimum = LEVELS.get(level.lower(), logging.INFO)
    on_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if on_terminal else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if on_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing(sys.stderr))),
    )
    logging.basicConfig(level=max(minimum, logging.WARNING), format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
