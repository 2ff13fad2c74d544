"""The Llama family in plain torch: one function from a batch to logits, over paged keys and values."""
