"""Rated usage on its way to whoever bills: batches, deliveries, Stripe, a file."""
