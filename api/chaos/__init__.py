"""Fault injection for a separate Weir under load, and an audit that every token is counted once."""
