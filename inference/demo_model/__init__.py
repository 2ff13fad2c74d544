"""Weights and card of the bundled models; `demo/` has their data and training."""
