"""From logits to the next tokens: rules, grammars, chance and beams."""
