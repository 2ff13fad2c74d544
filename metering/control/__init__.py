"""Commands to running requests and replicas, and the live view of all processes."""
