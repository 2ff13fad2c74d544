"""Orders to running requests, and who runs what."""
