"""The gRPC front: calls and streams of the inference service."""
