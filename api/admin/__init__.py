"""`AdminService`: tenants, keys, quotas, prices, configurations, running requests, replicas."""
