"""Which engine runs a request: models by name, replicas by load, engines started on demand."""
