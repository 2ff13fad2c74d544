"""Money: prices, rating, the ledger, and the reports on it."""
