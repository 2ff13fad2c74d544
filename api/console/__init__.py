"""The console: a page for admins, developers and finance over the calls of the contract. See ADR 0041 and docs/console.md."""
