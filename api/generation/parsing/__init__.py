"""Parsing of frames and conversations into validated requests, used by the rest of generation."""
