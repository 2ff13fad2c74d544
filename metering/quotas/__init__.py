"""Limits: what they are, what a request weighs on them, whether it fits, and when it will."""
