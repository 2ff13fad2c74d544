"""Who uses the service: organizations, projects, API keys, and the log of who changed what."""
