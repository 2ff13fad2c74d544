"""What a directory in Hugging Face's layout says and holds: its settings, and its tensors where they lie."""
