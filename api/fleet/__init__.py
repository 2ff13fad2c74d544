"""Configuration and construction of the models and engines of a process."""
