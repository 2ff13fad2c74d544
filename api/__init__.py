"""gRPC services, authentication, admission, and the life of each request from its first frame to
its settlement.

Connects `inference` (tokens) and `metering` (money), which are independent of each other.
"""

import os

# Children of this process never continue as gRPC processes: all of them execute a program. gRPC
# prepares for the other case at every start of a child, and that preparation has crashed a child
# while another thread was in a call. It must be off before grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
