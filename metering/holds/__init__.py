"""The claims of running requests on their quotas: taken, extended and ended once, through every failure."""
