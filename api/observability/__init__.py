"""Where the milliseconds and tokens went, for operators: what Prometheus scrapes, and spans for whoever collects them."""
