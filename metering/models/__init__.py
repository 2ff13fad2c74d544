"""The tables that several packages read, by subject. They declare what the domain forbids: CHECK, UNIQUE and foreign keys.

Triggers stand in the migrations. Append-only tables (`usage_events` but for what rating sets, `price_versions`, `audit_log`) are
guarded by them, so that a correction can only be a new row. The tables of one package alone are beside it: those of the ledger in
`billing/models.py`, those of receipts in `receipts/models.py`.

Imported from here, never from the modules inside: so whoever knows one table knows all that it refers to.
"""

from __future__ import annotations

from metering.models.base import Base, one_of
from metering.models.holds import Hold, HoldState
from metering.models.prices import PriceVersion, ServiceTier, TokenKind
from metering.models.quotas import Quota, QuotaCounter, QuotaDimension, QuotaSubject, RuleChange
from metering.models.tenants import ApiKey, ApiKeyUse, AuditEntry, BillingProfileRow, Organization, Project
from metering.models.usage import Outcome, UsageEvent, unrated_usage

__all__ = [
    "ApiKey",
    "ApiKeyUse",
    "AuditEntry",
    "Base",
    "BillingProfileRow",
    "Hold",
    "HoldState",
    "Organization",
    "Outcome",
    "PriceVersion",
    "Project",
    "Quota",
    "QuotaCounter",
    "QuotaDimension",
    "QuotaSubject",
    "RuleChange",
    "ServiceTier",
    "TokenKind",
    "UsageEvent",
    "one_of",
    "unrated_usage",
]
