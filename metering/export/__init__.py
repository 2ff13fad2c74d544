"""Export of rated usage to a biller: batches, deliveries, Stripe, a file."""
