"""Code shared by api, inference and metering: incidents, backoff, and the environment of child processes."""
