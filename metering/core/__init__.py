"""Errors, money, shared tables and the audit log. Imports nothing else of metering."""
