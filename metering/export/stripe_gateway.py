"""Calls to Stripe and the meaning of its answers. The only module that imports Stripe's SDK.

Calls run on threads, with timeouts and without the SDK's own retries: the worker decides when to
retry. No returned value or error contains a key or a payload.

Prices are picos per token as `unit_amount_decimal`, exact or refused. Invoices are those of our
subscriptions, read from Stripe regardless of webhook reports.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import stripe
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from metering.core.errors import InvalidValue, StripeFailed
from metering.core.models import TokenKind
from metering.core.money import MINOR_DIGITS, PICO_DIGITS
from metering.export.export_settings import StripeSettings
from metering.export.exporting import DELIVERED, Answer, Quantity, Verdict
from metering.pricing.prices import PRICE_OF_KIND

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0  # Stripe answers in tenths of a second; a lost answer costs only a retry
# Stripe remembers an identifier for at least 24 hours; one hour is left for clock skew and the call
# itself.
REMEMBERS_FOR = timedelta(hours=23)
CANCEL_WITHIN = timedelta(hours=24)  # after reception; Stripe refuses to cancel older meter events
PAGE_SIZE = 100  # Stripe's maximum
RETRY_AFTER_S_MAX = 3600.0
DUPLICATE = "event already exists with identifier"  # Stripe has no error code for this refusal
TOO_MANY_REQUESTS, CONFLICT, SERVER_ERROR = 429, 409, 500

DECIMALS_MAX = 12  # fraction digits of an amount in minor units that Stripe keeps
# Digits of Stripe's minor unit: those of ISO 4217, except of these three currencies.
STRIPE_DIGITS = MINOR_DIGITS | {"MGA": 0, "ISK": 2, "UGX": 2}
NOT_BILLED = frozenset({"CLF", "IQD", "LYD", "UYI", "UYW"})  # Stripe bills none
# Stripe refuses other amounts than multiples of these minor units: three decimals end in 0, and two
# currencies without decimals are written with two.
AMOUNT_STEPS = dict.fromkeys(("BHD", "JOD", "KWD", "OMR", "TND"), 10) | {"ISK": 100, "UGX": 100}
# SQL of the price of a token in a batch: `b` is the batch, `p` its price version.
PICOS_PER_TOKEN = PRICE_OF_KIND.format("b.token_kind")


@dataclass(frozen=True, slots=True)
class MeterErrors:
    """Errors that Stripe reports for meter events.

    `by_identifier` has samples, so `error_count` may be larger.
    """

    error_count: int
    by_identifier: Mapping[str, str]


class StripeGateway:
    """Client of one Stripe account. It is safe for concurrent tasks."""

    remembers_for = REMEMBERS_FOR

    def __init__(self, settings: StripeSettings) -> None:
        self.settings = settings
        self._client = stripe.StripeClient(
            settings.api_key,
            base_addresses={"api": settings.api_base, "meter_events": settings.api_base},
            http_client=stripe.RequestsClient(timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)),
            max_network_retries=0,
        )

    @property
    def account(self) -> str:
        """Mode of the account: `test` or `live`."""
        return self.settings.account

    def event_name(self, price_version: int, token_kind: TokenKind) -> str:
        """Build the event name of the meter for a price version and token kind."""
        return f"{self.settings.namespace}_{price_version}_{token_kind}"

    async def deliver(self, quantity: Quantity) -> Answer:
        """Send a quantity as a meter event.

        Each attempt has its own idempotency key, because Stripe repeats its first answer to a key
        for a day, even a failure of its own. The identifier ensures that the attempts count once.
        The key contains the quantity: a batch formed again after a failover may have another
        quantity, and Stripe refuses a known key with other parameters.
        """
        stream = quantity.stream
        return await answered(
            self._client.v1.billing.meter_events.create,
            {
                "event_name": self.event_name(stream.price_version, stream.token_kind),
                "identifier": quantity.identifier,
                "timestamp": int(quantity.at.timestamp()),
                "payload": {
                    "stripe_customer_id": quantity.customer,
                    "value": str(quantity.token_count),
                },
            },
            {"idempotency_key": f"{quantity.identifier}-{quantity.token_count}-{quantity.attempt}"},
        )

    async def take_back(self, identifier: str, event_name: str) -> Answer:
        """Cancel a meter event. The verdict `delivered` means that it no longer counts.

        All attempts share one idempotency key: a cancellation has no identifier by which Stripe
        detects a repeat.
        """
        return await answered(
            self._client.v1.billing.meter_event_adjustments.create,
            {"event_name": event_name, "type": "cancel", "cancel": {"identifier": identifier}},
            {"idempotency_key": f"{identifier}-cancel"},
        )

    async def call(
        self, method: str, path: str, /, idempotency_key: str = "", **parameters: Any
    ) -> dict[str, Any]:
        """Send a request to the administrative API and return its JSON. Raises: StripeFailed."""
        options: dict[str, Any] = {"idempotency_key": idempotency_key} if idempotency_key else {}
        try:
            answer = await asyncio.to_thread(
                self._client.raw_request, method, path, **parameters, **options
            )
        except stripe.StripeError as error:
            raise StripeFailed(
                f"Stripe did not accept {method.upper()} {path}. Check the request at Stripe:"
                f" {described(error)}"
            ) from error
        body = answer.data
        assert isinstance(body, dict)
        return body

    async def find(self, path: str) -> dict[str, Any] | None:
        """Fetch the object at a path; None if there is none (404). Raises: StripeFailed."""
        try:
            return await self.call("get", path)
        except StripeFailed as failed:
            if (
                isinstance(failed.__cause__, stripe.StripeError)
                and failed.__cause__.http_status == 404
            ):
                return None
            raise

    async def list_all(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """Fetch all pages of a list and return its objects. Raises: StripeFailed."""
        objects: list[dict[str, Any]] = []
        while True:
            page = await self.call("get", path, limit=PAGE_SIZE, **parameters)
            objects += page["data"]
            if not page.get("has_more") or not page["data"]:
                return objects
            parameters["starting_after"] = page["data"][-1]["id"]

    async def meter_errors(self, event_id: str) -> MeterErrors:
        """Fetch an error report by the id of its event. Raises: StripeFailed."""
        reason = (await self.call("get", f"/v2/core/events/{event_id}"))["data"]["reason"]
        named = {
            sample["request"]["identifier"]: f"{kind['code']}: {sample['error_message']}"
            for kind in reason["error_types"]
            for sample in kind["sample_errors"]
        }
        return MeterErrors(int(reason["error_count"]), named)


def verify_signature(body: bytes, header: str, secrets: Sequence[str]) -> None:
    """Verify a webhook signature, which must be at most five minutes old. Raises: InvalidValue."""
    if not header.isascii():
        raise InvalidValue("Stripe-Signature", "must be ASCII text: t=TIME,v1=SIGNATURE")
    for secret in secrets:
        try:
            stripe.WebhookSignature.verify_header(
                body, header, secret, stripe.Webhook.DEFAULT_TOLERANCE
            )
        except (stripe.SignatureVerificationError, UnicodeDecodeError):
            continue
        return
    raise InvalidValue(
        "Stripe-Signature",
        "the body is not signed with WEIR_STRIPE_WEBHOOK_SECRET, or too long ago",
    )


async def answered(create: Callable[..., object], *arguments: object) -> Answer:
    """Call Stripe's meter API in a thread and convert the result to an `Answer`."""
    try:
        await asyncio.to_thread(create, *arguments)
    except stripe.StripeError as error:
        return classified(error)
    return DELIVERED


def classified(error: stripe.StripeError) -> Answer:
    """Convert an SDK error about a meter event to an `Answer`."""
    reason = described(error)
    status = error.http_status
    if isinstance(error, stripe.APIConnectionError):
        return Answer(Verdict.LATER, reason, certain=never_connected(error))
    if isinstance(error, (stripe.AuthenticationError, stripe.PermissionError)):
        return Answer(Verdict.BLOCKED, reason)
    if status == TOO_MANY_REQUESTS:
        return Answer(Verdict.LATER, reason, retry_after_s=retry_after_s(error.headers or {}))
    if isinstance(error, stripe.InvalidRequestError) and DUPLICATE in str(error).lower():
        return DELIVERED
    if status is None or status >= SERVER_ERROR or status == CONFLICT:
        return Answer(Verdict.LATER, reason, certain=False)
    return Answer(Verdict.REFUSED, reason)


def described(error: stripe.StripeError) -> str:
    """Format an error on one line: status, class and Stripe's message, which masks keys."""
    status = f"HTTP {error.http_status}, " if error.http_status else ""
    return f"{status}{type(error).__name__}: {' '.join(str(error).split())}"


def never_connected(error: BaseException) -> bool:
    """Return True if the connection failed before anything could be sent."""
    return any(
        isinstance(each, (NewConnectionError, ConnectTimeoutError)) for each in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors behind it. `requests` hides some in `args` and `reason`."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        waiting += [value for value in inner if isinstance(value, BaseException)]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Parse the header `Retry-After`, capped, in seconds; None if it is missing or not a number."""
    value = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX) if seconds == seconds else None


def stripe_digits(currency_code: str) -> int:
    """Return the decimal places of Stripe's minor unit. Raises: InvalidValue if it bills none."""
    if currency_code in NOT_BILLED or currency_code not in STRIPE_DIGITS:
        raise InvalidValue(
            "currency_code",
            f"Stripe does not bill in {currency_code}: give the organization another currency",
        )
    return STRIPE_DIGITS[currency_code]


def minor_unit_picos(currency_code: str) -> int:
    """Return Stripe's minor unit in picos. Raises: InvalidValue if Stripe bills none."""
    picos: int = 10 ** (PICO_DIGITS - stripe_digits(currency_code))
    return picos


def in_steps(amount_minor: int, currency_code: str) -> int:
    """Truncate an amount in minor units to Stripe's step; the caller carries the rest."""
    step = AMOUNT_STEPS.get(currency_code, 1)
    return amount_minor // step * step if amount_minor >= 0 else -(-amount_minor // step * step)


def unit_amount_decimal(picos_per_token: int, currency_code: str) -> str:
    """Convert a price per token to Stripe's minor units: 150,000 picos of USD are `0.000015`.

    Raises: InvalidValue if Stripe cannot store every digit.
    """
    shift = PICO_DIGITS - stripe_digits(currency_code)
    amount = Decimal((0, tuple(map(int, str(picos_per_token))), -shift))
    whole, _, fraction = f"{amount:f}".partition(".")
    fraction = fraction.rstrip("0")
    if len(fraction) > DECIMALS_MAX:
        raise InvalidValue(
            "price",
            f"{picos_per_token} picos of {currency_code} have more than {DECIMALS_MAX} decimals at"
            " Stripe: choose a rounder price",
        )
    return f"{whole}.{fraction}" if fraction else whole


Invoice = Mapping[str, Any]


async def known_items(gateway: StripeGateway, label: str, customer: str) -> dict[str, str]:
    """Map our ids, kept in the metadata `label`, to the customer's invoice items at Stripe.

    This finds items whose creation was never answered. Raises: StripeFailed.
    """
    items = await gateway.list_all("/v1/invoiceitems", customer=customer)
    return {
        str(carried): str(item["id"])
        for item in items
        if (carried := (item.get("metadata") or {}).get(label))
    }


async def create_item(
    gateway: StripeGateway,
    label: str,
    item_id: uuid.UUID,
    key: str,
    currency_code: str,
    **terms: Any,
) -> str:
    """Create an invoice item with our id in its metadata `label`, and return Stripe's id.

    Raises: StripeFailed.
    """
    metadata = {label: str(item_id)}
    item = await gateway.call(
        "post", "/v1/invoiceitems", key, currency=currency_code.lower(), metadata=metadata, **terms
    )
    return str(item["id"])


async def usage_invoices(
    gateway: StripeGateway, customer: str, ends: datetime, *, with_void: bool = False
) -> list[Invoice]:
    """Fetch a customer's usage invoices for the month that ends at `ends`. Raises: StripeFailed.

    Void invoices are left out unless `with_void`.
    """
    subscriptions = await gateway.list_all("/v1/subscriptions", customer=customer, status="all")
    ours = {
        each["id"]
        for each in subscriptions
        if (each.get("metadata") or {}).get("namespace") == gateway.settings.namespace
    }
    if not ours:
        return []
    moment = int(ends.timestamp())
    return [
        each
        for each in await gateway.list_all(
            "/v1/invoices", customer=customer, created={"gte": moment}
        )
        if subscription_of(each) in ours
        and each["period_start"] < each["period_end"] == moment
        and (with_void or each["status"] != "void")
    ]


def subscription_of(invoice: Invoice) -> str:
    """Return the id of an invoice's subscription; empty if it has none."""
    details = (invoice.get("parent") or {}).get("subscription_details") or {}
    return str(details.get("subscription") or "")


def begins_within(invoice: Invoice, begins: datetime) -> bool:
    """Return True if the invoice's period begins at or after `begins`."""
    return int(invoice["period_start"]) >= int(begins.timestamp())


def finalized_at(invoices: Iterable[Invoice]) -> datetime | None:
    """Return when the last of the invoices became final; None if any is not final."""
    times = [(each.get("status_transitions") or {}).get("finalized_at") for each in invoices]
    known = [each for each in times if each is not None]
    return datetime.fromtimestamp(max(known), UTC) if known and len(known) == len(times) else None
