"""Which scopes each call needs: the one table. A call that is not in it is refused, and a test compares it with the contract.

Health checks and reflection are open to everybody: they tell what the published contract and a load balancer's log tell, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum


class Scope(StrEnum):
    """What a key may be good for."""

    INFERENCE = "inference"  # to use models and to look up one's own requests and quotas
    ADMIN = "admin"  # of the whole service: everything but models
    BILLING = "billing"  # finance: reads usage and bills of its own organization, changes nothing, sees no prompt and no key


MODELS = frozenset({Scope.INFERENCE})
ADMINS = frozenset({Scope.ADMIN})
READERS = frozenset({Scope.BILLING, Scope.ADMIN})
ANY = frozenset(Scope)

BY_SERVICE: Mapping[str, Mapping[frozenset[Scope], tuple[str, ...]]] = {
    "weir.v1.InferenceService": {
        MODELS: ("Generate", "CountTokens", "ListModels", "GetQuota", "Quote", "GetGeneration", "Embed"),
    },
    "weir.v1.AdminService": {
        ADMINS: (
            *("CreateOrganization", "ListOrganizations", "SetBillingProfile", "CreateProject", "ListProjects"),
            *("CreateApiKey", "RotateApiKey", "UpdateApiKey", "RevokeApiKey", "ListApiKeys"),
            *("SetQuota", "RaiseQuota", "DeleteQuota", "ListQuotas"),
            *("SetPrice", "ListPrices", "WithdrawPrice", "SimulatePrices"),
            *("CreatePlan", "ListPlans", "AssignPlan"),
            *("GrantCredit", "ListCreditGrants", "GetCreditBalance", "SetPrepaid"),
            "ListAuditEntries",
            *("ListLiveRequests", "GetRequest", "KillRequest", "EndOverdueHolds"),
            *("ListReplicas", "DrainReplica", "UndrainReplica"),
            *("SetAlertWebhook", "ListAlertWebhooks", "DeleteAlertWebhook", "TestAlertWebhook"),
            *("ApplyConfiguration", "ExportConfiguration"),
        ),
    },
    "weir.v1.BillingService": {
        READERS: (
            *("GetMonthReport", "GetUsage", "GetForecast", "ExportMonth", "GetMonthDocument"),
            *("ListMonths", "VerifyMonth", "GetReconciliation", "GetInvoice", "ListAdjustments", "ListAlerts"),
        ),
        ADMINS: ("CloseMonth", "CreateAdjustment", "CreateCreditNote", "ApproveAdjustment", "RejectAdjustment"),
    },
    "weir.v1.ReceiptService": {
        ANY: ("ListReceiptKeys",),  # public keys are no secret
        READERS: ("ListReceipts", "GetReceiptMonth"),
    },
}


def _by_method() -> Iterator[tuple[str, frozenset[Scope]]]:
    for service, groups in BY_SERVICE.items():
        for scopes, names in groups.items():
            yield from ((f"/{service}/{name}", scopes) for name in names)


# By the path of the call, as gRPC names it; any one of the scopes is enough.
SCOPES: Mapping[str, frozenset[Scope]] = dict(_by_method())
