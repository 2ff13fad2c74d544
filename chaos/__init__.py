"""Fault injection for a separate Weir under load, and an audit that every token is counted once."""

import api  # noqa: F401  # sets variables that must be set before grpc is imported
