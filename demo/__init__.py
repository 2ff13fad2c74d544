"""Corpus and training of the demo model, a hotel-search copilot in `inference/demo_model/`."""
