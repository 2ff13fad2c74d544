"""The wire: gRPC services, authentication, admission, and the life of each request from its first frame to its settlement.

Wires `inference` (tokens) and `metering` (money) together; they do not know each other.
"""

import os

# No child of ours goes on as a gRPC process: all of them execute a program. gRPC's own preparation for the other case runs at every
# start of a child, and has been seen to crash the child where another thread was in a call. It must be off before grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
