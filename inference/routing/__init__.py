"""Routing of requests: models by name, replicas by load, engines started on demand."""
