"""The way to PostgreSQL: connections and their bounds, group commit, schema upgrades, the embedded server."""
