"""Web console, built on the RPCs of the API. See ADR 0041 and docs/how-to/console.md."""
