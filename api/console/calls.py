"""The calls of the contract that the console's page may make: a closed list, answered by the very handlers that gRPC calls.

Nothing is decided here. Keys, scopes, limits, throttle and audit are the handlers' own; errors become statuses in the interceptor's
guard. All of them read, but for `KillRequest`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from api.core.interceptor import Failed, guarded, writing
from api.server import Servicers

OFFERED: Mapping[str, tuple[str, ...]] = {
    "AdminService": (
        *("ListOrganizations", "ListApiKeys", "ListQuotas", "ListAuditEntries"),
        *("ListLiveRequests", "ListReplicas", "GetRequest", "KillRequest"),
    ),
    "BillingService": (
        *("GetUsage", "GetForecast", "ListMonths", "GetMonthReport", "GetMonthDocument", "ExportMonth"),
        *("GetInvoice", "VerifyMonth", "GetReconciliation", "ListAdjustments"),
    ),
    "InferenceService": ("ListModels", "GetQuota", "GetGeneration"),
    "ReceiptService": ("GetReceiptMonth",),
}


@dataclass(frozen=True, slots=True)
class OfferedCall:
    """One of them. path: as gRPC names it. answer: the guarded handler; of a call with a stream of messages it writes them."""

    path: str
    request_type: type[Message]
    answer: Callable[[Any, Any], Awaitable[Any]]
    is_file: bool


def offered_calls(servicers: Servicers, failed: Failed) -> dict[str, OfferedCall]:
    """By `Service/Method`. failed: told of each that ends with an error."""
    answering: Mapping[str, object] = {
        "AdminService": servicers.admin,
        "BillingService": servicers.billing,
        "InferenceService": servicers.inference,
        "ReceiptService": servicers.receipts,
    }
    return {name: _offered(name, answering, failed) for name in names()}


def names() -> Iterator[str]:
    """`Service/Method` of all of them."""
    for service, methods in OFFERED.items():
        yield from (f"{service}/{method}" for method in methods)


def _offered(name: str, answering: Mapping[str, object], failed: Failed) -> OfferedCall:
    service, _, method = name.partition("/")
    described = Default().FindServiceByName(f"weir.v1.{service}").methods_by_name[method]
    path = f"/weir.v1.{name}"
    handle: Callable[..., Any] = getattr(answering[service], method)
    if described.server_streaming:
        handle = writing(handle)
    return OfferedCall(path, GetMessageClass(described.input_type), guarded(handle, path, failed), described.server_streaming)
