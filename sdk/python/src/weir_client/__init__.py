"""Python client of Weir, the metered LLM inference service."""
