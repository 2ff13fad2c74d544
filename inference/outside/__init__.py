"""Sequences on engines that are not ours: each answers with a stream of its own, and is trusted with no more than it must."""
