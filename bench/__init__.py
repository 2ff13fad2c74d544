"""Benchmarks; each prints a ratio to a baseline measured in the same run."""
