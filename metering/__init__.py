"""Money: quotas, holds, usage events, prices, ledger and reports, with PostgreSQL as the truth.

Counts what it is told; knows nothing of the wire or of engines. Must never import `api`, `inference`, grpc or torch.
"""
