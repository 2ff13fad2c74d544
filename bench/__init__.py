"""Benchmarks: each prints a ratio against a baseline that it measures in the same run."""
