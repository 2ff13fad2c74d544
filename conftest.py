"""Settings of every test: no outside connections, own environment, no gRPC fork handlers."""

import os

# Triton reads it when it is imported, and other packages import Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

import api  # noqa: F401  # sets variables that must be set before grpc is imported

pytest_plugins = ["tests.plugins.loopback_only", "tests.plugins.same_environment"]
