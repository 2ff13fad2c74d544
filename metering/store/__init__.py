"""PostgreSQL access: bounded connections, group commit, schema upgrades, the embedded server."""
