"""The OpenAI door: the HTTP API of OpenAI's clients, on its own port, over the same admission, engines and books as gRPC."""
