"""Token selection from logits: rules, grammars, sampling and beam search."""
