"""Checkpoints in Hugging Face layout: configuration files and memory-mapped tensors."""
