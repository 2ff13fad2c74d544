"""The crash kit: a whole Weir of its own, under load, whose parts are killed; afterwards every token is accounted for."""
