"""Organizations, projects and API keys."""
