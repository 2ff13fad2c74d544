"""Code shared by api, inference and metering: incidents, and the environment of child processes."""
