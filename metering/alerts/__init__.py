"""Alerts on used limits and low credit: found from rows, and delivered once."""
