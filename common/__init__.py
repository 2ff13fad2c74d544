"""Code shared by api, inference and metering: incidents, backoff, processes, environment."""
