"""The wire: gRPC services, authentication, admission, and the life of each request from its first frame to its settlement.

Wires `inference` (tokens) and `metering` (money) together; they do not know each other.
"""
