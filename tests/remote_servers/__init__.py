"""Servers of the services that remote engines use, on the torch engine: real tokens, and faults on
demand.

They behave like the published servers, including their deviations, which `inference/adapters/`
lists.
"""
