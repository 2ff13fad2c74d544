"""Embeddings: texts of token ids to one vector each, in a child process of its own."""
