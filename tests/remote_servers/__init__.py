"""Servers of the two services that remote engines speak, on the torch engine: real tokens, and faults on demand.

They do what the published servers are known to do, down to their oddities; `inference/adapters/` says which.
"""
