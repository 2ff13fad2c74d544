"""Python client of Weir, the metered LLM inference service.

`Client` and `AsyncClient` generate; `AdminClient` and `BillingClient` (and their `Async` twins) manage and report. Errors derive
from `WeirError`. The README tells the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from weir_client.aio import AsyncClient
from weir_client.connection import DEFAULT_ADDRESS
from weir_client.embedding import Embedding, EmbedInput, EmbedOptions, EmbedResult
from weir_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    ErrorDetails,
    ExceededQuota,
    FailedPrecondition,
    FieldViolation,
    IncompleteGeneration,
    Internal,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionViolation,
    QuotaExceeded,
    QuotaViolation,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir_client.generation import AsyncGeneration
from weir_client.limits import Limits
from weir_client.models import Model, ModelTask, ModelVersion, Price
from weir_client.money import PICOS_PER_UNIT, Money
from weir_client.options import AttachOptions, GenerateOptions, Message, Prompt
from weir_client.quote import Quote
from weir_client.receipts import (
    Fault,
    Receipt,
    ReceiptChain,
    ReceiptInvalid,
    ReceiptKey,
    ReceiptMonth,
    ReceiptProblem,
    ReceiptStep,
    public_keys,
    verify_receipt,
)
from weir_client.sync import Client, GenerationStream
from weir_client.tools import Tool, ToolCall, ToolCallDelta
from weir_client.values import (
    Admitted,
    Choice,
    Delta,
    Event,
    FinishReason,
    Generation,
    GenerationState,
    KeyRestrictions,
    Partial,
    Progress,
    QuotaDimension,
    QuotaStatus,
    QuotaSubject,
    Result,
    Resumed,
    Stage,
    Timings,
    TokenCount,
    TokenLogprob,
    TokenLogprobs,
    Usage,
    UsageUpdate,
)

if TYPE_CHECKING:
    from weir_client.accounts import (
        ApiKey,
        AuditEntry,
        BillingProfile,
        CreatedApiKey,
        MonthReport,
        MonthReportLine,
        Organization,
        Project,
        Reconciliation,
        RequestCounts,
        RotatedApiKey,
        TokenKind,
    )
    from weir_client.admin import AsyncAdminClient
    from weir_client.admin_sync import AdminClient
    from weir_client.alerts import (
        Alert,
        AlertDelivery,
        AlertDeliveryState,
        AlertInvoice,
        AlertWebhook,
        CreatedAlertWebhook,
    )
    from weir_client.billing import AsyncBillingClient
    from weir_client.billing_sync import BillingClient
    from weir_client.billing_terms import (
        AppliedPrice,
        CreditBalance,
        CreditGrant,
        Plan,
        PlanAssignment,
        PlanList,
        PriceList,
        PriceVersion,
        SimulatedCustomer,
    )
    from weir_client.bills import (
        Adjustment,
        AdjustmentState,
        ClosedMonth,
        CreditNoteSummary,
        DocumentFormat,
        Invoice,
        InvoiceLine,
        InvoicePayment,
        Month,
        MonthCharge,
        MonthState,
        MonthVerification,
        Obstacle,
        PaymentState,
        PrepaidCredit,
    )
    from weir_client.live import (
        AppliedConfiguration,
        ChangeAction,
        ConfigurationChange,
        ConfigurationMistake,
        FieldChange,
        KilledRequest,
        KillResult,
        LiveOrganization,
        LiveRequest,
        LiveView,
        RecordedRequest,
        RequestPhase,
    )
    from weir_client.receipt_client import AsyncReceiptClient, ReceiptClient
    from weir_client.receipt_months import ReceiptVerdict, verify_receipts
    from weir_client.replicas import (
        DrainedReplica,
        Replica,
        ReplicaDrain,
        ReplicaList,
        ReplicaState,
        UndrainedReplica,
    )
    from weir_client.usage import (
        MonthExportFormat,
        MonthFile,
        UsageForecast,
        UsageGrouping,
        UsagePage,
        UsageRow,
        UsageShare,
    )

# What manages and reports. A program that only generates does not wait for it: it takes half as long to load as all the rest.
_MANAGING = (
    "accounts",
    "admin",
    "admin_sync",
    "alerts",
    "billing",
    "billing_sync",
    "billing_terms",
    "bills",
    "live",
    "receipt_client",
    "receipt_months",
    "replicas",
    "usage",
)

__all__ = [
    "DEFAULT_ADDRESS",
    "PICOS_PER_UNIT",
    "Aborted",
    "Adjustment",
    "AdjustmentState",
    "AdminClient",
    "Admitted",
    "Alert",
    "AlertDelivery",
    "AlertDeliveryState",
    "AlertInvoice",
    "AlertWebhook",
    "AlreadyExists",
    "ApiKey",
    "AppliedConfiguration",
    "AppliedPrice",
    "AsyncAdminClient",
    "AsyncBillingClient",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncReceiptClient",
    "AttachOptions",
    "AuditEntry",
    "BillingClient",
    "BillingProfile",
    "Cancelled",
    "ChangeAction",
    "Choice",
    "Client",
    "ClosedMonth",
    "ConfigurationChange",
    "ConfigurationMistake",
    "CreatedAlertWebhook",
    "CreatedApiKey",
    "CreditBalance",
    "CreditGrant",
    "CreditNoteSummary",
    "DeadlineExceeded",
    "Delta",
    "DocumentFormat",
    "DrainedReplica",
    "EmbedInput",
    "EmbedOptions",
    "EmbedResult",
    "Embedding",
    "ErrorDetails",
    "Event",
    "ExceededQuota",
    "FailedPrecondition",
    "Fault",
    "FieldChange",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationState",
    "GenerationStream",
    "IncompleteGeneration",
    "Internal",
    "InvalidRequest",
    "Invoice",
    "InvoiceLine",
    "InvoicePayment",
    "KeyRestrictions",
    "KillResult",
    "KilledRequest",
    "Limits",
    "LiveOrganization",
    "LiveRequest",
    "LiveView",
    "Message",
    "Model",
    "ModelTask",
    "ModelVersion",
    "Money",
    "Month",
    "MonthCharge",
    "MonthExportFormat",
    "MonthFile",
    "MonthReport",
    "MonthReportLine",
    "MonthState",
    "MonthVerification",
    "NotFound",
    "Obstacle",
    "Organization",
    "Partial",
    "PaymentState",
    "PermissionDenied",
    "Plan",
    "PlanAssignment",
    "PlanList",
    "PreconditionViolation",
    "PrepaidCredit",
    "Price",
    "PriceList",
    "PriceVersion",
    "Progress",
    "Project",
    "Prompt",
    "QuotaDimension",
    "QuotaExceeded",
    "QuotaStatus",
    "QuotaSubject",
    "QuotaViolation",
    "Quote",
    "Receipt",
    "ReceiptChain",
    "ReceiptClient",
    "ReceiptInvalid",
    "ReceiptKey",
    "ReceiptMonth",
    "ReceiptProblem",
    "ReceiptStep",
    "ReceiptVerdict",
    "Reconciliation",
    "RecordedRequest",
    "Replica",
    "ReplicaDrain",
    "ReplicaList",
    "ReplicaState",
    "RequestCounts",
    "RequestPhase",
    "ResourceExhausted",
    "Result",
    "Resumed",
    "RotatedApiKey",
    "SimulatedCustomer",
    "Stage",
    "Timings",
    "TokenCount",
    "TokenKind",
    "TokenLogprob",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "UndrainedReplica",
    "Usage",
    "UsageForecast",
    "UsageGrouping",
    "UsagePage",
    "UsageRow",
    "UsageShare",
    "UsageUpdate",
    "WeirError",
    "public_keys",
    "verify_receipt",
    "verify_receipts",
]


if not TYPE_CHECKING:  # for type checkers each name stands above, and a wrong one is an error

    def __getattr__(name: str) -> object:
        """Loads what is asked for the first time."""
        if name in __all__:
            for module in _MANAGING:
                found = vars(import_module(f"{__name__}.{module}")).get(name)
                if found is not None:
                    return globals().setdefault(name, found)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
