"""`AdminService`: tenants, keys, quotas, prices, terms, configurations, and what runs."""
