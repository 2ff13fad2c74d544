"""One request from its admission to its settlement: phases, events, limits and the registry."""
