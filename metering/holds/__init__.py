"""Holds: charges of running requests to their quotas; taken, extended, and ended exactly once."""
