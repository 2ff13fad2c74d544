"""Code shared by api, inference and metering: incidents, backoff, strict YAML, processes and what child processes inherit."""
