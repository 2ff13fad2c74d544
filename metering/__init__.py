"""Metering and billing: quotas, holds, usage events, prices, ledger, invoices and reports, stored
in PostgreSQL.

Independent of wire protocol and engines: must never import `api`, `inference`, grpc or torch.
"""
