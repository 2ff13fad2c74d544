"""Receipts: usage and cost of each request, chained per project and signed, for offline
verification of bills.
"""
