"""One line for each way to fail: what is wrong, and what to do about it."""

from __future__ import annotations

from datetime import UTC, datetime

from weir_client import (
    AlreadyExists,
    DeadlineExceeded,
    ExceededQuota,
    IncompleteGeneration,
    InvalidRequest,
    PermissionDenied,
    QuotaDimension,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir_client.connection import is_local

from api.cli.amounts import dimension_amount, duration_text

CLOCK_ONLY_S = 6 * 3600.0  # a wait below this is told without the day on which it ends

# Fields of the API whose flag is not simply their own name with dashes.
_FLAGS = {
    "emails": "--email",
    "stop_sequences": "--stop",
    "limit_value": "VALUE",
    "prompt": "PROMPT",
    "messages": "PROMPT",
    "conversation": "PROMPT",
}
_FIELDS_WITH_FLAGS = frozenset(
    {"model", "temperature", "top_p", "top_k", "seed", "max_output_tokens", "currency_code", "lifetime", "organization", "project"}
    | {"legal_name", "address_line1", "address_line2", "city", "postal_code", "state", "country", "tax_id", "language"}
)


def explain(error: WeirError, address: str) -> str:
    """The line for an error of a call to `address`."""
    match error:
        case Unavailable() if not error.details.reason and (advice := _tls_advice(error.message)):
            return f"no secure connection to {address}: {advice}"
        case Unavailable() if not error.details.reason:
            return _no_server(address, error.message)
        case QuotaExceeded():
            return _quota(error)
        case InvalidRequest() if error.field_violations:
            return "; ".join(f"{flag_of(each.field)}: {each.description}" for each in error.field_violations)
        case Unauthenticated():
            return f"{error.message}; set WEIR_API_KEY or pass --api-key (server {address})"
        case PermissionDenied():
            return f"{error.message}; use a key that may do this"
        case IncompleteGeneration() | AlreadyExists() if error.request_id:
            return f"{error.message}; `weir trace {error.request_id}` tells what is recorded of it"
        case DeadlineExceeded():
            return f"{error.message}; give it more time with --timeout"
    if error.retry_after_s is not None:
        return f"{error}; try again in {duration_text(error.retry_after_s)}"
    return str(error)


# By what the transport says of it.
_TLS_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority that is trusted here: name it with `weir --ca FILE`",
    "Hostname Verification": "its certificate is for another name: use an address that stands in the certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: write http:// before the address if that is meant",
    "Socket closed": "it hung up: it may speak TLS (write https:// before the address), or want to see a certificate "
    "(`weir --client-certificate FILE --client-key FILE`)",
}


def _tls_advice(message: str) -> str | None:
    """What to do about a connection that did not come about; None if it did, or failed of something else."""
    if not message.startswith("failed to connect"):
        return None
    return next((advice for sign, advice in _TLS_ADVICE.items() if sign in message), None)


def _no_server(address: str, message: str) -> str:
    """What to do about a server that does not answer: here one can be started, elsewhere it is for others to see to."""
    if "HTTP/2" in message:
        return (
            f"no gRPC server at {address}: what answers there speaks another protocol; 8443 is the usual port, those of OpenAI's "
            "clients and of metrics are others"
        )
    cause = message.rpartition(": ")[2].rstrip("])")
    if "omain name" in cause or cause == address:  # gRPC's "Domain name not found", "Misformatted domain name"; a port that is none
        return f"no server at {address}: there is no such host and port; write them as 127.0.0.1:8443"
    remedy = "start one with `weir up`" if is_local(address) else "is one running there, and is the address right?"
    return f"no server at {address}: {remedy} ({cause})"


def flag_of(field: str) -> str:
    """The flag or argument that a field of the API was given by; the field itself where there is none."""
    name = field.partition("[")[0].rpartition(".")[2]
    if name in _FLAGS:
        return _FLAGS[name]
    return "--" + name.replace("_", "-") if name in _FIELDS_WITH_FLAGS else field


def _quota(error: QuotaExceeded) -> str:
    quota = error.quota
    if quota is None:
        return f"{error.message}{_when(error)}"
    dimension = dimension_of(quota)
    subject = f" of the {quota.subject.replace('_', ' ').replace('-', ' ')}" if quota.subject else ""
    model = f" for {quota.model}" if quota.model else ""
    numbers = (("limit", quota.limit), ("left", quota.remaining), ("needed", quota.requested))
    facts = [f"{name} {dimension_amount(dimension, value)}" for name, value in numbers if value is not None]
    told = ", ".join(facts) or error.message
    return f"quota exceeded: {dimension.value if dimension else quota.dimension}{subject}{model}: {told}{_when(error)}"


def _when(error: QuotaExceeded) -> str:
    if not error.retry_helps:
        return "; waiting does not help: ask for less, or have the limit raised (`weir quota set`)"
    if error.retry_after_s is not None:
        reset = f" (resets at {_moment(error.reset_time, error.retry_after_s)} UTC)" if error.reset_time else ""
        return f"; try again in {duration_text(error.retry_after_s)}{reset}"
    if error.reset_time is not None:
        wait_s = max(0.0, (error.reset_time - datetime.now(UTC)).total_seconds())
        return f"; try again in {duration_text(wait_s)}"
    return "; try again when running requests have ended"


def _moment(time: datetime, wait_s: float) -> str:
    """A time of day, with its date unless it is within hours."""
    return f"{time.astimezone(UTC):%H:%M:%S}" if wait_s < CLOCK_ONLY_S else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def dimension_of(quota: ExceededQuota) -> QuotaDimension | None:
    """The dimension by any of the spellings that servers use; None for one that is not known here."""
    word = quota.dimension.lower().removeprefix("quota_dimension_").replace("_", "-").replace("cost-picos-", "cost-")
    return QuotaDimension(word) if word in set(QuotaDimension) else None
