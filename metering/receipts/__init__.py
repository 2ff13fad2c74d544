"""Receipts: usage and cost of each request, chained and signed for verification."""
