"""Launchers: servers of models that are started and stopped by demand."""
