"""Frames and conversations to validated requests: the lowest floor."""
