"""Token selection from logits: rules, grammars, sampling."""
