"""Python client of Weir, the metered LLM inference service.

`Client` and `AsyncClient` generate; `AdminClient` and `BillingClient` (and their `Async` twins)
manage and report. Errors derive from `WeirError`. The README has the details.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from weir_client.generated_names import VALUES

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
    from weir_client.errors import *  # noqa: F403  # re-exports each of its classes
    from weir_client.generated_values import *  # noqa: F403
    from weir_client.generation import AsyncGeneration as AsyncGeneration
    from weir_client.money import PICOS_PER_UNIT as PICOS_PER_UNIT
    from weir_client.money import Money as Money
    from weir_client.options import AttachOptions as AttachOptions
    from weir_client.options import GenerateOptions as GenerateOptions
    from weir_client.options import Message as Message
    from weir_client.options import Prompt as Prompt
    from weir_client.options import UsageOptions as UsageOptions
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
    "generated_values": VALUES,
    "generation": "AsyncGeneration",
    "money": "Money PICOS_PER_UNIT",
    "options": "AttachOptions GenerateOptions Message Prompt UsageOptions",
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
