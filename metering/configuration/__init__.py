"""Declarative configuration as one document: differences, apply, export."""
