"""Web console over the calls of the contract. See ADR 0041 and docs/how-to/console.md."""
