"""Embedding models: converts texts, as token ids, to vectors in a child process."""
