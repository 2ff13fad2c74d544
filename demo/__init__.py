"""Corpus and training of the demo model, a small hotel-search copilot. Its weights and card are in `inference/demo_model/`."""
