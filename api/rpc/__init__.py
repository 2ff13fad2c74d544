"""gRPC services for inference: calls and streams."""
