"""Processing of one request, from its start frame to its settlement."""
