"""Organizations, projects and API keys: who may use the service."""
