"""Quotas: rules, admission decisions, usage counters and retry-after."""
