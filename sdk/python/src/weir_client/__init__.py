"""Python client of Weir, the metered LLM inference service.

`Client` and `AsyncClient` generate; `AdminClient` and `BillingClient` (and their `Async` twins)
manage and report. Errors derive from `WeirError`. The README has the details.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir_client.admin import AdminClient as AdminClient
    from weir_client.admin import AsyncAdminClient as AsyncAdminClient
    from weir_client.aio import AsyncClient as AsyncClient
    from weir_client.billing import AsyncBillingClient as AsyncBillingClient
    from weir_client.billing import BillingClient as BillingClient
    from weir_client.connection import DEFAULT_ADDRESS as DEFAULT_ADDRESS
    from weir_client.embedding import Embedding as Embedding
    from weir_client.embedding import EmbedInput as EmbedInput
    from weir_client.embedding import EmbedOptions as EmbedOptions
    from weir_client.embedding import EmbedResult as EmbedResult
    from weir_client.errors import Aborted as Aborted
    from weir_client.errors import AlreadyExists as AlreadyExists
    from weir_client.errors import Cancelled as Cancelled
    from weir_client.errors import DeadlineExceeded as DeadlineExceeded
    from weir_client.errors import ErrorDetails as ErrorDetails
    from weir_client.errors import ExceededQuota as ExceededQuota
    from weir_client.errors import FailedPrecondition as FailedPrecondition
    from weir_client.errors import FieldViolation as FieldViolation
    from weir_client.errors import IncompleteGeneration as IncompleteGeneration
    from weir_client.errors import Internal as Internal
    from weir_client.errors import InvalidRequest as InvalidRequest
    from weir_client.errors import NotFound as NotFound
    from weir_client.errors import PermissionDenied as PermissionDenied
    from weir_client.errors import PreconditionViolation as PreconditionViolation
    from weir_client.errors import QuotaExceeded as QuotaExceeded
    from weir_client.errors import QuotaViolation as QuotaViolation
    from weir_client.errors import ResourceExhausted as ResourceExhausted
    from weir_client.errors import Unauthenticated as Unauthenticated
    from weir_client.errors import Unavailable as Unavailable
    from weir_client.errors import WeirError as WeirError
    from weir_client.generated_values import Adjustment as Adjustment
    from weir_client.generated_values import AdjustmentState as AdjustmentState
    from weir_client.generated_values import Alert as Alert
    from weir_client.generated_values import AlertDelivery as AlertDelivery
    from weir_client.generated_values import AlertDeliveryState as AlertDeliveryState
    from weir_client.generated_values import AlertInvoice as AlertInvoice
    from weir_client.generated_values import AlertWebhook as AlertWebhook
    from weir_client.generated_values import ApiKey as ApiKey
    from weir_client.generated_values import AppliedConfiguration as AppliedConfiguration
    from weir_client.generated_values import AppliedPrice as AppliedPrice
    from weir_client.generated_values import AuditEntry as AuditEntry
    from weir_client.generated_values import BillingProfile as BillingProfile
    from weir_client.generated_values import ChangeAction as ChangeAction
    from weir_client.generated_values import ClosedMonth as ClosedMonth
    from weir_client.generated_values import ConfigurationChange as ConfigurationChange
    from weir_client.generated_values import ConfigurationViolation as ConfigurationViolation
    from weir_client.generated_values import CreatedAlertWebhook as CreatedAlertWebhook
    from weir_client.generated_values import CreatedApiKey as CreatedApiKey
    from weir_client.generated_values import CreditBalance as CreditBalance
    from weir_client.generated_values import CreditGrant as CreditGrant
    from weir_client.generated_values import CreditNoteSummary as CreditNoteSummary
    from weir_client.generated_values import DocumentFormat as DocumentFormat
    from weir_client.generated_values import DrainedReplica as DrainedReplica
    from weir_client.generated_values import FieldChange as FieldChange
    from weir_client.generated_values import FinishReason as FinishReason
    from weir_client.generated_values import Generation as Generation
    from weir_client.generated_values import GenerationState as GenerationState
    from weir_client.generated_values import Invoice as Invoice
    from weir_client.generated_values import InvoiceLine as InvoiceLine
    from weir_client.generated_values import InvoicePayment as InvoicePayment
    from weir_client.generated_values import KeyChange as KeyChange
    from weir_client.generated_values import KeyRestrictions as KeyRestrictions
    from weir_client.generated_values import KilledRequest as KilledRequest
    from weir_client.generated_values import KillResult as KillResult
    from weir_client.generated_values import LiveOrganization as LiveOrganization
    from weir_client.generated_values import LiveRequest as LiveRequest
    from weir_client.generated_values import LiveView as LiveView
    from weir_client.generated_values import Model as Model
    from weir_client.generated_values import ModelTask as ModelTask
    from weir_client.generated_values import ModelVersion as ModelVersion
    from weir_client.generated_values import Month as Month
    from weir_client.generated_values import MonthCharge as MonthCharge
    from weir_client.generated_values import MonthExportFormat as MonthExportFormat
    from weir_client.generated_values import MonthReport as MonthReport
    from weir_client.generated_values import MonthReportLine as MonthReportLine
    from weir_client.generated_values import MonthState as MonthState
    from weir_client.generated_values import MonthVerification as MonthVerification
    from weir_client.generated_values import Obstacle as Obstacle
    from weir_client.generated_values import Organization as Organization
    from weir_client.generated_values import PaymentState as PaymentState
    from weir_client.generated_values import Plan as Plan
    from weir_client.generated_values import PlanAssignment as PlanAssignment
    from weir_client.generated_values import PlanList as PlanList
    from weir_client.generated_values import PrepaidCredit as PrepaidCredit
    from weir_client.generated_values import Price as Price
    from weir_client.generated_values import PriceList as PriceList
    from weir_client.generated_values import PriceVersion as PriceVersion
    from weir_client.generated_values import Project as Project
    from weir_client.generated_values import QuotaDimension as QuotaDimension
    from weir_client.generated_values import QuotaStatus as QuotaStatus
    from weir_client.generated_values import QuotaSubject as QuotaSubject
    from weir_client.generated_values import Quote as Quote
    from weir_client.generated_values import Reconciliation as Reconciliation
    from weir_client.generated_values import RecordedRequest as RecordedRequest
    from weir_client.generated_values import RefusedField as RefusedField
    from weir_client.generated_values import Replica as Replica
    from weir_client.generated_values import ReplicaDrain as ReplicaDrain
    from weir_client.generated_values import ReplicaList as ReplicaList
    from weir_client.generated_values import ReplicaState as ReplicaState
    from weir_client.generated_values import RequestCounts as RequestCounts
    from weir_client.generated_values import RequestPhase as RequestPhase
    from weir_client.generated_values import RotatedApiKey as RotatedApiKey
    from weir_client.generated_values import SimulatedCustomer as SimulatedCustomer
    from weir_client.generated_values import Stage as Stage
    from weir_client.generated_values import Timings as Timings
    from weir_client.generated_values import TokenKind as TokenKind
    from weir_client.generated_values import TokenLogprob as TokenLogprob
    from weir_client.generated_values import TokenLogprobs as TokenLogprobs
    from weir_client.generated_values import UndrainedReplica as UndrainedReplica
    from weir_client.generated_values import Usage as Usage
    from weir_client.generated_values import UsageForecast as UsageForecast
    from weir_client.generated_values import UsageGrouping as UsageGrouping
    from weir_client.generated_values import UsagePage as UsagePage
    from weir_client.generated_values import UsageRow as UsageRow
    from weir_client.generated_values import UsageShare as UsageShare
    from weir_client.generation import AsyncGeneration as AsyncGeneration
    from weir_client.money import PICOS_PER_UNIT as PICOS_PER_UNIT
    from weir_client.money import Money as Money
    from weir_client.options import AttachOptions as AttachOptions
    from weir_client.options import GenerateOptions as GenerateOptions
    from weir_client.options import Message as Message
    from weir_client.options import Prompt as Prompt
    from weir_client.receipt_client import AsyncReceiptClient as AsyncReceiptClient
    from weir_client.receipt_client import ReceiptClient as ReceiptClient
    from weir_client.receipt_months import ReceiptVerdict as ReceiptVerdict
    from weir_client.receipt_months import verify_receipts as verify_receipts
    from weir_client.receipts import Fault as Fault
    from weir_client.receipts import Receipt as Receipt
    from weir_client.receipts import ReceiptChain as ReceiptChain
    from weir_client.receipts import ReceiptInvalid as ReceiptInvalid
    from weir_client.receipts import ReceiptKey as ReceiptKey
    from weir_client.receipts import ReceiptMonth as ReceiptMonth
    from weir_client.receipts import ReceiptProblem as ReceiptProblem
    from weir_client.receipts import ReceiptStep as ReceiptStep
    from weir_client.receipts import ReceiptTimings as ReceiptTimings
    from weir_client.receipts import public_keys as public_keys
    from weir_client.receipts import verify_receipt as verify_receipt
    from weir_client.sync import Client as Client
    from weir_client.sync import GenerationStream as GenerationStream
    from weir_client.tools import Tool as Tool
    from weir_client.tools import ToolCall as ToolCall
    from weir_client.tools import ToolCallDelta as ToolCallDelta
    from weir_client.values import Admitted as Admitted
    from weir_client.values import Choice as Choice
    from weir_client.values import Delta as Delta
    from weir_client.values import Event as Event
    from weir_client.values import Limits as Limits
    from weir_client.values import MonthFile as MonthFile
    from weir_client.values import Partial as Partial
    from weir_client.values import Progress as Progress
    from weir_client.values import Result as Result
    from weir_client.values import Resumed as Resumed
    from weir_client.values import TokenCount as TokenCount
    from weir_client.values import UsageUpdate as UsageUpdate

# Public names by module. A module is imported when one of its names is first used: gRPC takes
# longer to load than everything else, and values and errors do not need it.
_NAMES = {
    "admin": "AdminClient AsyncAdminClient",
    "aio": "AsyncClient",
    "billing": "AsyncBillingClient BillingClient",
    "connection": "DEFAULT_ADDRESS",
    "embedding": "EmbedInput EmbedOptions EmbedResult Embedding",
    "errors": (
        "Aborted AlreadyExists Cancelled DeadlineExceeded ErrorDetails ExceededQuota"
        " FailedPrecondition FieldViolation IncompleteGeneration Internal InvalidRequest"
        " NotFound PermissionDenied PreconditionViolation QuotaExceeded QuotaViolation"
        " ResourceExhausted Unauthenticated Unavailable WeirError"
    ),
    "generated_values": (
        "Adjustment AdjustmentState Alert AlertDelivery AlertDeliveryState AlertInvoice"
        " AlertWebhook ApiKey AppliedConfiguration AppliedPrice AuditEntry BillingProfile"
        " ChangeAction ClosedMonth ConfigurationChange ConfigurationViolation"
        " CreatedAlertWebhook CreatedApiKey CreditBalance CreditGrant CreditNoteSummary"
        " DocumentFormat DrainedReplica FieldChange FinishReason Generation GenerationState"
        " Invoice InvoiceLine InvoicePayment KeyChange KeyRestrictions KillResult KilledRequest"
        " LiveOrganization LiveRequest LiveView Model ModelTask ModelVersion Month MonthCharge"
        " MonthExportFormat MonthReport MonthReportLine MonthState MonthVerification Obstacle"
        " Organization PaymentState Plan PlanAssignment PlanList PrepaidCredit Price PriceList"
        " PriceVersion Project QuotaDimension QuotaStatus QuotaSubject Quote Reconciliation"
        " RecordedRequest RefusedField Replica ReplicaDrain ReplicaList ReplicaState"
        " RequestCounts RequestPhase RotatedApiKey SimulatedCustomer Stage Timings TokenKind"
        " TokenLogprob TokenLogprobs UndrainedReplica Usage UsageForecast UsageGrouping"
        " UsagePage UsageRow UsageShare"
    ),
    "generation": "AsyncGeneration",
    "money": "Money PICOS_PER_UNIT",
    "options": "AttachOptions GenerateOptions Message Prompt",
    "receipt_client": "AsyncReceiptClient ReceiptClient",
    "receipt_months": "ReceiptVerdict verify_receipts",
    "receipts": (
        "Fault Receipt ReceiptChain ReceiptInvalid ReceiptKey ReceiptMonth ReceiptProblem"
        " ReceiptStep ReceiptTimings public_keys verify_receipt"
    ),
    "sync": "Client GenerationStream",
    "tools": "Tool ToolCall ToolCallDelta",
    "values": (
        "Admitted Choice Delta Event Limits MonthFile Partial Progress Result Resumed"
        " TokenCount UsageUpdate"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


if not TYPE_CHECKING:  # type checkers see the names imported above and reject unknown ones

    def __getattr__(name: str) -> object:
        """Import a name on its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals().setdefault(name, found)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
