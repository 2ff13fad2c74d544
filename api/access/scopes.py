"""Scopes of API keys, and the scopes that each call requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

Scopes = tuple[str, ...]

# A key needs any one of these.
MODELS: Scopes = ("inference",)
ADMINS: Scopes = ("admin",)
READERS: Scopes = ("billing", "admin")
ANY: Scopes = ("inference", "billing", "admin")
# Calls by service and scopes
BY_SERVICE: Mapping[str, Mapping[Scopes, tuple[str, ...]]] = {
    "weir.v1.InferenceService": {
        MODELS: (
            *("Generate", "Embed", "CountTokens"),
            *("ListModels", "GetQuota", "Quote", "GetGeneration", "GetOwnUsage"),
        ),
    },
    "weir.v1.AdminService": {
        ADMINS: (
            *("CreateOrganization", "ListOrganizations"),
            *("SetBillingProfile", "SetQueueWeight"),
            *("CreateProject", "ListProjects"),
            *("CreateApiKey", "RotateApiKey", "UpdateApiKey", "RevokeApiKey", "ListApiKeys"),
            *("SetQuota", "OverrideQuota", "DeleteQuota", "ListQuotas"),
            *("SetPrice", "ListPrices", "WithdrawPrice", "SimulatePrices"),
            *("CreatePlan", "ListPlans", "AssignPlan"),
            *("GrantCredit", "ListCreditGrants", "GetCreditBalance", "SetPrepaid"),
            "ListAuditEntries",
            *("ListLiveRequests", "GetRequest", "KillRequest", "ExpireOverdueHolds"),
            *("ListReplicas", "DrainReplica", "UndrainReplica"),
            *("SetAlertWebhook", "ListAlertWebhooks", "DeleteAlertWebhook", "TestAlertWebhook"),
            *("ApplyConfiguration", "ExportConfiguration"),
            *("GetFleet", "ApplyFleet", "ListFleetVersions"),
            "EraseEndUser",
        ),
    },
    "weir.v1.BillingService": {
        READERS: (
            *("GetMonthReport", "GetUsage", "GetForecast", "ExportMonth", "GetMonthDocument"),
            *("ListMonths", "VerifyMonth", "GetReconciliation", "GetInvoice"),
            *("ListEndUsers", "GetEndUser"),
            *("ListAdjustments", "ListAlerts"),
            *("SetResalePrice", "ListResalePrices"),
            *("RentReplicas", "EndReplicaRental", "ListReplicaRentals"),
            *("ListResaleStatements", "GetResaleStatement"),
        ),
        ADMINS: (
            *("CloseMonth", "CreateAdjustment", "CreateCreditNote"),
            *("ApproveAdjustment", "RejectAdjustment"),
        ),
    },
    "weir.v1.ReceiptService": {
        ANY: ("ListReceiptKeys",),  # public keys are not secret
        READERS: ("ListReceipts", "GetReceiptMonth"),
    },
}


class Scope(StrEnum):
    """Scope of an API key: which calls it may make."""

    INFERENCE = "inference"  # use models; read own requests and quotas
    ADMIN = "admin"  # administration of the whole service, without use of models
    # Read usage and bills of its own organization, and set its resale prices; no prompts or keys.
    BILLING = "billing"


def _by_method() -> Iterator[tuple[str, frozenset[Scope]]]:
    for service, groups in BY_SERVICE.items():
        for scopes, names in groups.items():
            allowed = frozenset(map(Scope, scopes))
            yield from ((f"/{service}/{name}", allowed) for name in names)


# Keys: gRPC paths
SCOPES: Mapping[str, frozenset[Scope]] = dict(_by_method())
