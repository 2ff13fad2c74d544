"""Observability for operators: request counts, durations, and OpenTelemetry spans."""
