"""Llama-family decoder in plain torch: from a batch to logits, with paged keys and values."""
