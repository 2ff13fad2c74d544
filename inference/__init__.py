"""Tokens: engines, their scheduling and caching, and the protocol through which the rest of Weir drives them.

Knows nothing of tenants, quotas, money or the wire. Must never import `api` or `metering`.
"""
