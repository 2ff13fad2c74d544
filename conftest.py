"""What holds for every test: no connection leaves this machine, and children start without gRPC's fork handlers."""

import api  # noqa: F401  # sets what must be set before anything imports grpc

pytest_plugins = ["tests.plugins.loopback_only"]
