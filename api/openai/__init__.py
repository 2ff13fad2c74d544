"""HTTP API for OpenAI's clients, on its own port, over the same admission and engines as gRPC."""
