"""The only module that knows Stripe's SDK: what we call there, and what its answers mean in our words.

Calls are made on threads, with a bounded wait and without the SDK's own retries: the worker decides when to try again. No key and
no payload appears in what is returned or raised.

Prices are picos per token as `unit_amount_decimal`, exactly or not at all. Invoices are those of our subscriptions, read from
Stripe whatever a webhook reported of them.
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
from metering.pricing.prices import COUNTS_OF_EVENT

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0  # Stripe answers in tenths of a second; a lost answer costs no more than asking again
# Stripe knows an identifier for at least 24 hours; the hour less is for clocks and for the call itself.
REMEMBERS_FOR = timedelta(hours=23)
CANCEL_WITHIN = timedelta(hours=24)  # of receiving it, Stripe takes a meter event back
PAGE_SIZE = 100  # Stripe's most
RETRY_AFTER_S_MAX = 3600.0
DUPLICATE = "event already exists with identifier"  # Stripe gives this refusal no code of its own
TOO_MANY_REQUESTS, CONFLICT, SERVER_ERROR = 429, 409, 500


@dataclass(frozen=True, slots=True)
class MeterErrors:
    """What an error report names. error_count may be larger than the named ones: a report holds samples."""

    error_count: int
    by_identifier: Mapping[str, str]


class StripeGateway:
    """Calls Stripe for one account. Safe to use from many tasks."""

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
        """`test` or `live`."""
        return self.settings.account

    def event_name(self, price_version: int, token_kind: TokenKind) -> str:
        """What a meter's events are called: one meter per price version and kind, so that each has one price for ever."""
        return f"{self.settings.namespace}_{price_version}_{token_kind}"

    async def deliver(self, quantity: Quantity) -> Answer:
        """Send the meter event.

        Each attempt has an idempotency key of its own: Stripe repeats what it first answered to a key for a day, a failure of its
        own included. That an attempt is counted once is the identifier's business. The key names the quantity: a batch that was
        formed again after a failover may have another one, and a key with other parameters is refused.
        """
        stream = quantity.stream
        return await answered(
            self._client.v1.billing.meter_events.create,
            {
                "event_name": self.event_name(stream.price_version, stream.token_kind),
                "identifier": quantity.identifier,
                "timestamp": int(quantity.at.timestamp()),
                "payload": {"stripe_customer_id": quantity.customer, "value": str(quantity.token_count)},
            },
            {"idempotency_key": f"{quantity.identifier}-{quantity.token_count}-{quantity.attempt}"},
        )

    async def take_back(self, identifier: str, event_name: str) -> Answer:
        """Cancel a meter event. Delivered means here: it is not counted any more.

        One idempotency key for all attempts: unlike an event, a cancellation has no name by which Stripe would know a second one.
        """
        return await answered(
            self._client.v1.billing.meter_event_adjustments.create,
            {"event_name": event_name, "type": "cancel", "cancel": {"identifier": identifier}},
            {"idempotency_key": f"{identifier}-cancel"},
        )

    async def call(self, method: str, path: str, /, idempotency_key: str = "", **parameters: Any) -> dict[str, Any]:
        """One administrative call; its answer as plain JSON. Raises: StripeFailed."""
        options: dict[str, Any] = {"idempotency_key": idempotency_key} if idempotency_key else {}
        try:
            answer = await asyncio.to_thread(self._client.raw_request, method, path, **parameters, **options)
        except stripe.StripeError as error:
            raise StripeFailed(f"{method.upper()} {path}: {described(error)}") from error
        document = answer.data
        assert isinstance(document, dict)
        return document

    async def find(self, path: str) -> dict[str, Any] | None:
        """One object; None where there is none of its id. Raises: StripeFailed."""
        try:
            return await self.call("get", path)
        except StripeFailed as failed:
            if isinstance(failed.__cause__, stripe.StripeError) and failed.__cause__.http_status == 404:
                return None
            raise

    async def list_all(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """Every object of a list, page by page. Raises: StripeFailed."""
        found: list[dict[str, Any]] = []
        while True:
            page = await self.call("get", path, limit=PAGE_SIZE, **parameters)
            found += page["data"]
            if not page.get("has_more") or not page["data"]:
                return found
            parameters["starting_after"] = page["data"][-1]["id"]

    async def meter_errors(self, event_id: str) -> MeterErrors:
        """The errors of a report, which the webhook only announces, by the identifier that Stripe names. Raises: StripeFailed."""
        reason = (await self.call("get", f"/v2/core/events/{event_id}"))["data"]["reason"]
        named = {
            sample["request"]["identifier"]: f"{kind['code']}: {sample['error_message']}"
            for kind in reason["error_types"]
            for sample in kind["sample_errors"]
        }
        return MeterErrors(int(reason["error_count"]), named)


def verify_signature(body: bytes, header: str, secrets: Sequence[str]) -> None:
    """Raises: InvalidValue unless Stripe signed this body with one of the secrets, within the last five minutes."""
    for secret in secrets:
        try:
            stripe.WebhookSignature.verify_header(body, header, secret, stripe.Webhook.DEFAULT_TOLERANCE)
        except (stripe.SignatureVerificationError, UnicodeDecodeError):
            continue
        return
    raise InvalidValue("Stripe-Signature", "the body is not signed with WEIR_STRIPE_WEBHOOK_SECRET, or too long ago")


async def answered(create: Callable[..., object], *arguments: object) -> Answer:
    """What a call about a meter event came to."""
    try:
        await asyncio.to_thread(create, *arguments)
    except stripe.StripeError as error:
        return classified(error)
    return DELIVERED


def classified(error: stripe.StripeError) -> Answer:
    """What an error of the SDK means for a meter event."""
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
    """Status, kind and Stripe's own words on one line; Stripe masks keys in them."""
    status = f"HTTP {error.http_status}, " if error.http_status else ""
    return f"{status}{type(error).__name__}: {' '.join(str(error).split())}"


def never_connected(error: BaseException) -> bool:
    """Whether a connection error came before anything could be sent."""
    return any(isinstance(each, (NewConnectionError, ConnectTimeoutError)) for each in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it was made of: `requests` hides the cause in the arguments and in `reason`."""
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
    """Seconds by the header `Retry-After`; None where there is none that makes sense."""
    value = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX) if seconds == seconds else None


DECIMALS_MAX = 12  # digits after the point that Stripe keeps of an amount in minor units

# Digits of Stripe's minor unit where they are not those of ISO 4217, or not supported with them.
ZERO_DECIMAL = frozenset(["BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF"])
TWO_DECIMAL = frozenset({"ISK", "UGX"})  # without minor unit by ISO; Stripe counts hundredths all the same
THREE_DECIMAL = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])


def stripe_digits(currency_code: str) -> int:
    """Digits of the minor unit that Stripe counts in. Raises: InvalidValue for a currency that it does not bill."""
    if currency_code in ZERO_DECIMAL:
        return 0
    if currency_code in THREE_DECIMAL:
        return 3
    if currency_code in TWO_DECIMAL or MINOR_DIGITS.get(currency_code) == 2:
        return 2
    raise InvalidValue("currency_code", f"Stripe does not bill in {currency_code}: give the organization another currency")


def minor_unit_picos(currency_code: str) -> int:
    """What Stripe counts amounts in. Raises: InvalidValue for a currency that it does not bill."""
    picos: int = 10 ** (PICO_DIGITS - stripe_digits(currency_code))
    return picos


def unit_amount_decimal(picos_per_token: int, currency_code: str) -> str:
    """The price of one token in minor units: 150,000 picos of USD are `0.000015`.

    Raises: InvalidValue if Stripe could not keep every digit.
    """
    shift = PICO_DIGITS - stripe_digits(currency_code)
    amount = Decimal((0, tuple(map(int, str(picos_per_token))), -shift))
    whole, _, fraction = f"{amount:f}".partition(".")
    fraction = fraction.rstrip("0")
    if len(fraction) > DECIMALS_MAX:
        raise InvalidValue("price", f"{picos_per_token} picos of {currency_code} have more than {DECIMALS_MAX} decimals at Stripe")
    return f"{whole}.{fraction}" if fraction else whole


# SQL of what a token of a batch costs: `b` is its batch, `p` its price version.
PRICE_CASES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in COUNTS_OF_EVENT.items())
PICOS_PER_TOKEN = f"CASE b.token_kind {PRICE_CASES} END"
Invoice = Mapping[str, Any]


async def known_items(gateway: StripeGateway, label: str, customer: str) -> dict[str, str]:
    """A customer's invoice items by our ids, which they carry under the label: of calls whose answers were lost, too.

    Raises: StripeFailed.
    """
    items = await gateway.list_all("/v1/invoiceitems", customer=customer)
    return {str(carried): str(item["id"]) for item in items if (carried := (item.get("metadata") or {}).get(label))}


async def create_item(gateway: StripeGateway, label: str, item_id: uuid.UUID, key: str, currency_code: str, **terms: Any) -> str:
    """Create an invoice item that carries our id under the label; its id at Stripe. key: once per item. Raises: StripeFailed."""
    metadata = {label: str(item_id)}
    item = await gateway.call("post", "/v1/invoiceitems", key, currency=currency_code.lower(), metadata=metadata, **terms)
    return str(item["id"])


async def usage_invoices(gateway: StripeGateway, customer: str, ends: datetime) -> list[Invoice]:
    """A customer's invoices of usage until a month's end, one for each of its subscriptions. Raises: StripeFailed."""
    subscriptions = await gateway.list_all("/v1/subscriptions", customer=customer, status="all")
    ours = {each["id"] for each in subscriptions if (each.get("metadata") or {}).get("namespace") == gateway.settings.namespace}
    if not ours:
        return []
    moment = int(ends.timestamp())
    return [
        each
        for each in await gateway.list_all("/v1/invoices", customer=customer, created={"gte": moment})
        if subscription_of(each) in ours and each["period_start"] < each["period_end"] == moment and each["status"] != "void"
    ]


def subscription_of(invoice: Invoice) -> str:
    """Whose invoice it is; empty for one that is of no subscription."""
    details = (invoice.get("parent") or {}).get("subscription_details") or {}
    return str(details.get("subscription") or "")


def begins_within(invoice: Invoice, begins: datetime) -> bool:
    """Whether all of its period is after this."""
    return int(invoice["period_start"]) >= int(begins.timestamp())


def finalized_at(invoices: Iterable[Invoice]) -> datetime | None:
    """When the last of them became final; None if there is none, or one that is not."""
    times = [(each.get("status_transitions") or {}).get("finalized_at") for each in invoices]
    known = [each for each in times if each is not None]
    return datetime.fromtimestamp(max(known), UTC) if known and len(known) == len(times) else None
