"""Receipts: what each request used and cost, chained per project and signed, so that anybody can check a bill offline."""
