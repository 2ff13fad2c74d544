"""One request, from its start frame to its settlement."""
