"""Metrics and health checks over HTTP, for operators. Reads the process; nothing of the process imports it."""
