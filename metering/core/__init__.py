"""Errors, money, tables that several packages share, and the audit log: imports nothing else of metering."""
