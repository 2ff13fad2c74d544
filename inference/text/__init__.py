"""Conversion between text and token ids: tokenizers, chat templates, streaming detokenization."""
