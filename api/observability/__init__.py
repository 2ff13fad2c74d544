"""Where the milliseconds and tokens went, for operators: counts of requests, and spans for whoever collects them."""
