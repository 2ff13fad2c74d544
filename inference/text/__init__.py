"""Between text and token ids: tokenizers, chat templates, and text out of tokens while they come."""
