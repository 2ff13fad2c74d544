"""The embedded engine on one GPU: `check` compares its results, `measure` its speed.

They import `inference` alone, so they run without PostgreSQL, gRPC, or an installation of Weir, and
on torch 2.11 as well as on the pinned version.
"""
