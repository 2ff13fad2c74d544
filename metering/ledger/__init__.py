"""Double-entry ledger, billing months, and the rating of usage events into it."""
