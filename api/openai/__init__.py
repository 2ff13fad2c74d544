"""HTTP API for OpenAI's and Anthropic's clients, on its own port; same admission and engines as
gRPC.
"""
