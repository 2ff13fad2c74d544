"""Engines: scheduling, caching and execution of models, and the protocol by which the rest of Weir
uses them.

Independent of tenants, quotas, money and the wire. Must never import `api` or `metering`.
"""
