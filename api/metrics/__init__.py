"""Metrics and health checks over HTTP, for operators; the rest of the process does not use it."""
