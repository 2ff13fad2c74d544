"""Synchronization of Stripe's customers, products, meters, prices and subscriptions with our data.

Each object carries a name of ours (an id, an event name, a lookup key, metadata) by which it is
found again, so a sync may be interrupted and repeated at any point. Customers follow their billing
profiles; nothing else at Stripe is changed or deleted: differences are reported. Billing details
that Stripe would require are checked before anything is sent. Stripe is called outside of
transactions.

Operators decide on single batches: sending one again, or settling a parked one. Stripe cancels an
event within 24 hours of receiving it. Usage never shrinks here, so no negative quantity is needed;
refunds are credits on the invoice.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import (
    AlreadyExists,
    BillingDetailsMissing,
    InvalidValue,
    NotFound,
    StripeFailed,
)
from metering.core.models import ServiceTier, TokenKind
from metering.export.deliveries import form
from metering.export.export_settings import DAYS_UNTIL_DUE, Collection
from metering.export.exporting import BatchState, Verdict
from metering.export.invoice_items import OF_OWED_MONTH
from metering.export.invoice_payments import InvoicePayment, unpaid_invoices
from metering.export.stripe_gateway import CANCEL_WITHIN, StripeGateway, unit_amount_decimal
from metering.ledger.ledger import month_bounds
from metering.store.db import Sessions, database_now
from metering.tenants.billing_profiles import BillingProfile, billing_profiles
from metering.tenants.tenants import find_organization

ITEMS_MAX = 20  # per Stripe subscription; more prices need another one
LOOKUP_KEYS_MAX = 10  # per query, by Stripe's limit
NEW = "new"  # id of an object that a dry run would create
ENDED = frozenset({"canceled", "incomplete_expired"})

# Fields of a Stripe address, and of our billing profiles.
ADDRESS_FIELDS = {
    "line1": "address_line1",
    "line2": "address_line2",
    "city": "city",
    "postal_code": "postal_code",
    "state": "state",
    "country": "country",
}
CUSTOMER = "customer"  # kind of `stripe_objects`
# Kind of `stripe_objects`: that of a customer; empty if none was found.
PAYMENT_METHOD = "payment_method"

ORGANIZATIONS = text("SELECT id, name, currency_code FROM organizations ORDER BY name")
# Prices in force now or later, and those of batches of the last 35 days, which may still be billed.
# A row that withdraws a customer's own price applies to no usage.
VERSIONS = text("""
SELECT id, model, currency_code, organization_id, tier,
       input_picos_per_token AS input,
       cached_input_picos_per_token AS cached_input,
       output_picos_per_token AS output,
       coalesce(reasoning_picos_per_token, output_picos_per_token) AS reasoning,
       embedding_picos_per_token AS embedding,
       ARRAY['input', 'cached_input', 'output']
           || CASE WHEN reasoning_picos_per_token <> output_picos_per_token
                   THEN ARRAY['reasoning'] END
           || CASE WHEN embedding_picos_per_token > 0 THEN ARRAY['embedding'] END
           || used.kinds AS kinds,
       coalesce(used.by, '{}') AS used_by,
       withdrawn OR coalesce(lead(effective_at) OVER versions <= now(), false) AS past
FROM price_versions
LEFT JOIN (
    SELECT price_version_id,
           array_agg(DISTINCT organization_id) AS by,
           array_agg(DISTINCT token_kind) AS kinds
    FROM meter_batches
    WHERE hour >= now() - interval '35 days'
    GROUP BY 1
) AS used ON used.price_version_id = id
WINDOW versions AS (
    PARTITION BY model, currency_code, organization_id, tier ORDER BY effective_at
)
ORDER BY id
""")
KNOWN = text("SELECT kind, ref, stripe_id FROM stripe_objects WHERE account = :account")
REMEMBER = text("""
INSERT INTO stripe_objects (account, kind, ref, stripe_id)
VALUES (:account, :kind, :ref, :stripe_id)
ON CONFLICT (account, kind, ref) DO UPDATE
SET stripe_id = excluded.stripe_id, seen_at = now()
""")

ATTENTION_MAX = 50  # batches named; the counts include all


@dataclass(frozen=True, slots=True)
class Metered:
    """One kind of token of a price version; it has a meter and a price at Stripe."""

    version: int
    model: str
    currency_code: str
    token_kind: TokenKind
    unit_amount: str
    tier: ServiceTier = ServiceTier.INTERACTIVE

    @property
    def ref(self) -> str:
        """Key of the meter and the price in `stripe_objects`."""
        return f"{self.version}:{self.token_kind}"

    @property
    def title(self) -> str:
        """Description shown on invoices."""
        of_tier = "" if self.tier is ServiceTier.INTERACTIVE else f"{self.tier} "
        return (
            f"{self.model}, {of_tier}{self.token_kind.replace('_', ' ')} tokens (price version"
            f" {self.version})"
        )


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Objects that Stripe should have. `subscribed` has each organization's prices there."""

    organizations: tuple[tuple[uuid.UUID, str, str], ...]
    profiles: dict[uuid.UUID, BillingProfile]
    metered: tuple[Metered, ...]
    subscribed: dict[uuid.UUID, tuple[Metered, ...]]


@dataclass(slots=True)
class Sync:
    """One synchronization with Stripe.

    `created` and `updated` describe the changed objects; in a dry run, those that would change.
    `without_payment_method` names the organizations that Stripe cannot charge; it stays empty if
    invoices are sent.
    """

    sessions: Sessions
    gateway: StripeGateway
    dry_run: bool
    known: dict[tuple[str, str], str] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    without_payment_method: list[str] = field(default_factory=list)

    async def run(self) -> list[str]:
        """Create and update all objects at Stripe; return the descriptions of those created.

        Raises: BillingDetailsMissing before anything is sent; StripeFailed; InvalidValue for a
        price that Stripe cannot represent; AlreadyExists for an object that differs.
        """
        book = await read_book(self.sessions)
        if missing := missing_details(book, self.gateway.settings.collection):
            raise BillingDetailsMissing(missing)
        async with self.sessions() as session:
            rows = (await session.execute(KNOWN, {"account": self.gateway.account})).all()
        self.known = {(kind, ref): stripe_id for kind, ref, stripe_id in rows}
        products = {
            model: await self._product(model)
            for model in dict.fromkeys(each.model for each in book.metered)
        }
        meters = await self._meters(book.metered)
        prices = await self._prices(book.metered, products, meters)
        for organization_id, name, _ in book.organizations:
            customer, payment_method = await self._customer(
                organization_id, name, book.profiles.get(organization_id)
            )
            subscribed = [prices[each.ref] for each in book.subscribed[organization_id]]
            payment_method = await self._subscriptions(name, customer, subscribed) or payment_method
            await self._remember(PAYMENT_METHOD, str(organization_id), payment_method)
            if self.gateway.settings.collection is Collection.CHARGE and not payment_method:
                self.without_payment_method.append(name)
        return self.created

    async def _create(self, what: str, path: str, idempotency_key: str = "", **values: Any) -> str:
        self.created.append(what)
        if self.dry_run:
            return NEW
        return str((await self.gateway.call("post", path, idempotency_key, **values))["id"])

    async def _remember(self, kind: str, ref: str, stripe_id: str) -> None:
        if self.dry_run or (kind != CUSTOMER and self.known.get((kind, ref)) == stripe_id):
            # A customer's row is always written: its time tells when its profile was last compared.
            return
        async with self.sessions.begin() as session:
            values = {
                "account": self.gateway.account,
                "kind": kind,
                "ref": ref,
                "stripe_id": stripe_id,
            }
            await session.execute(REMEMBER, values)

    async def _customer(
        self, organization_id: uuid.UUID, name: str, profile: BillingProfile | None
    ) -> tuple[str, str]:
        """Create or update a customer; return its id and default payment method or ""."""
        ref, namespace = str(organization_id), self.gateway.settings.namespace
        stripe_id = self.known.get(("customer", ref), "")
        found = await self.gateway.find(f"/v1/customers/{stripe_id}") if stripe_id else None
        if found is None or found.get("deleted"):
            query = f"metadata['{namespace}_organization_id']:'{ref}'"
            hits = (await self.gateway.call("get", "/v1/customers/search", query=query))["data"]
            found = hits[0] if hits else None
            if found is not None:
                stripe_id = str(found["id"])
            else:
                # The search lags by up to a minute; until then the key prevents a second customer.
                key, metadata = f"{namespace}-customer-{ref}", {f"{namespace}_organization_id": ref}
                # The billing profile is sent in its own call: a key is valid for one set of
                # parameters only.
                stripe_id = await self._create(
                    f"customer {name}", "/v1/customers", key, name=name, metadata=metadata
                )
        expected = customer_details(name, profile)
        details = {
            part: value for part, value in expected.items() if value != detail_of(found, part)
        }
        if found is not None and details:
            self.updated.append(f"customer {name}: {', '.join(details)}")
        if details and not self.dry_run:
            await self.gateway.call("post", f"/v1/customers/{stripe_id}", **details)
        await self._remember(CUSTOMER, ref, stripe_id)
        return stripe_id, payment_method_of(found)

    async def _product(self, model: str) -> str:
        namespace = self.gateway.settings.namespace
        stripe_id = f"{namespace}_{hashlib.sha256(model.encode()).hexdigest()[:24]}"
        if await self.gateway.find(f"/v1/products/{stripe_id}") is None:
            await self._create(
                f"product {model}",
                "/v1/products",
                id=stripe_id,
                name=model,
                unit_label="token",
                metadata={f"{namespace}_model": model},
            )
        return stripe_id

    async def _meters(self, metered: Iterable[Metered]) -> dict[str, str]:
        found = {
            each["event_name"]: str(each["id"])
            for each in await self.gateway.list_all("/v1/billing/meters", status="active")
        }
        meters: dict[str, str] = {}
        for each in metered:
            event_name = self.gateway.event_name(each.version, each.token_kind)
            stripe_id = found.get(event_name) or await self._create(
                f"meter {event_name}",
                "/v1/billing/meters",
                display_name=each.title[:250],
                event_name=event_name,
                default_aggregation={"formula": "sum"},
                customer_mapping={"type": "by_id", "event_payload_key": "stripe_customer_id"},
                value_settings={"event_payload_key": "value"},
            )
            meters[each.ref] = stripe_id
            await self._remember("meter", each.ref, stripe_id)
        return meters

    async def _prices(
        self, metered: tuple[Metered, ...], products: dict[str, str], meters: dict[str, str]
    ) -> dict[str, str]:
        keys = {
            each.ref: self.gateway.event_name(each.version, each.token_kind) for each in metered
        }
        names, found = list(keys.values()), dict[str, dict[str, Any]]()
        for begin in range(0, len(names), LOOKUP_KEYS_MAX):
            page = await self.gateway.list_all(
                "/v1/prices", lookup_keys=names[begin : begin + LOOKUP_KEYS_MAX]
            )
            found |= {price["lookup_key"]: price for price in page}
        prices: dict[str, str] = {}
        for each in metered:
            price, key = found.get(keys[each.ref]), keys[each.ref]
            if price is None:
                prices[each.ref] = await self._create(
                    f"price {key}: {each.unit_amount} {each.currency_code} minor units per token",
                    "/v1/prices",
                    currency=each.currency_code.lower(),
                    lookup_key=key,
                    nickname=each.title[:250],
                    product=products[each.model],
                    unit_amount_decimal=each.unit_amount,
                    recurring={
                        "interval": "month",
                        "usage_type": "metered",
                        "meter": meters[each.ref],
                    },
                )
                continue
            check_price(each, key, price, meters[each.ref])
            prices[each.ref] = str(price["id"])
        return prices

    async def _subscriptions(self, name: str, customer: str, missing: list[str]) -> str:
        """Add each missing price to a subscription that has room, or to a new one.

        Returns the payment method of a subscription, or an empty string.
        """
        room: list[tuple[str, int]] = []
        payment_method = ""
        namespace = self.gateway.settings.namespace
        for each in (
            await self.gateway.list_all("/v1/subscriptions", customer=customer)
            if customer != NEW
            else []
        ):
            if each["status"] in ENDED or each.get("metadata", {}).get("namespace") != namespace:
                continue
            payment_method = payment_method or str(
                each.get("default_payment_method") or each.get("default_source") or ""
            )
            items = await self.gateway.list_all("/v1/subscription_items", subscription=each["id"])
            held = {item["price"]["id"] for item in items}
            missing = [price for price in missing if price not in held]
            room.append((each["id"], ITEMS_MAX - len(items)))
        for subscription, free in room:
            for price in missing[:free]:
                what = f"subscription item of {name}: {price}"
                await self._create(
                    what,
                    "/v1/subscription_items",
                    subscription=subscription,
                    price=price,
                    proration_behavior="none",
                )
            missing = missing[free:]
        for begin in range(0, len(missing), ITEMS_MAX):
            prices = missing[begin : begin + ITEMS_MAX]
            await self._create(
                f"subscription of {name} with {len(prices)} prices",
                "/v1/subscriptions",
                **subscription_terms(self.gateway.settings.collection, datetime.now(UTC)),
                customer=customer,
                items=[{"price": price} for price in prices],
                metadata={"namespace": namespace},
            )
        return payment_method


def missing_details(book: PriceBook, collection: Collection) -> list[str]:
    """List, by organization, the billing details without which Stripe refuses a subscription."""
    if collection is not Collection.SEND_INVOICE:
        return []
    return [
        f"{name} has no billing e-mail address, and {Collection.SEND_INVOICE} sends invoices to"
        f" one: weir org billing {name} --email ADDRESS"
        for organization_id, name, _ in book.organizations
        if book.subscribed[organization_id]
        and not book.profiles.get(organization_id, BillingProfile()).email
    ]


def customer_details(name: str, profile: BillingProfile | None) -> dict[str, Any]:
    """Build Stripe's customer fields. Without a profile, only the name is set."""
    if profile is None:
        return {"name": name}
    address = {part: getattr(profile, ADDRESS_FIELDS[part]) for part in ADDRESS_FIELDS}
    details = {
        "name": profile.legal_name or name,
        "email": profile.email,
        "address": address if any(address.values()) else "",
    }
    return details | ({"preferred_locales": [profile.language]} if profile.language else {})


def detail_of(customer: Mapping[str, Any] | None, name: str) -> Any:
    """Convert a field of Stripe's customer for comparison with `customer_details`."""
    value: Any = (customer or {}).get(name) or ""
    if name == "address" and value:
        address = {part: value.get(part) or "" for part in ADDRESS_FIELDS}
        return address if any(address.values()) else ""
    return value


def payment_method_of(customer: Mapping[str, Any] | None) -> str:
    """Return the id of the payment method that Stripe charges; empty if there is none."""
    known = customer or {}
    default = (known.get("invoice_settings") or {}).get("default_payment_method") or known.get(
        "default_source"
    )
    return str(default or "")


async def payment_method_page(sessions: Sessions, gateway: StripeGateway, organization: str) -> str:
    """Create a Stripe page on which the customer sets the payment method; return its URL.

    Raises: NotFound; InvalidValue if the organization has no customer at Stripe; StripeFailed.
    """
    async with sessions() as session:
        owner = await find_organization(session, organization)
        rows = await session.execute(KNOWN, {"account": gateway.account})
    customer = next(
        (stripe_id for kind, ref, stripe_id in rows if (kind, ref) == ("customer", str(owner.id))),
        None,
    )
    if customer is None:
        raise InvalidValue(
            "organization", f"{owner.name} is not known at Stripe: run `weir stripe sync` first"
        )
    flow = {"type": "payment_method_update"}
    page = await gateway.call(
        "post", "/v1/billing_portal/sessions", customer=customer, flow_data=flow
    )
    return str(page["url"])


def check_price(expected: Metered, key: str, found: dict[str, Any], meter: str) -> None:
    """Compare Stripe's price with our price book. Raises: AlreadyExists if they differ."""
    # Stripe may write an amount with other zeros, so the numbers are compared.
    actual = (Decimal(found["unit_amount_decimal"]), found["currency"], found["recurring"]["meter"])
    if actual != (Decimal(expected.unit_amount), expected.currency_code.lower(), meter):
        raise AlreadyExists(
            "Stripe price",
            key,
            f"as {actual[0]:f} {actual[1]} on meter {actual[2]}: archive it or use another"
            " namespace",
        )


def subscription_terms(collection: Collection, now: datetime) -> dict[str, Any]:
    """Build parameters of a subscription billed by calendar month (UTC), from this month on."""
    begins, ends = month_bounds(f"{now:%Y-%m}")
    terms: dict[str, Any] = {
        "collection_method": str(collection),
        "backdate_start_date": int(begins.timestamp()),
        "billing_cycle_anchor": int(ends.timestamp()),
        "proration_behavior": "none",
    }
    return terms | (
        {"days_until_due": DAYS_UNTIL_DUE} if collection is Collection.SEND_INVOICE else {}
    )


async def read_book(sessions: Sessions) -> PriceBook:
    """Read organizations, profiles and prices in one transaction. Raises: InvalidValue."""
    async with sessions() as session:
        organizations = tuple(
            (row.id, row.name, row.currency_code) for row in await session.execute(ORGANIZATIONS)
        )
        profiles = await billing_profiles(session)
        versions = (await session.execute(VERSIONS)).all()
    currencies = {currency for _, _, currency in organizations}
    metered: list[Metered] = []
    subscribed: dict[uuid.UUID, list[Metered]] = {
        organization_id: [] for organization_id, _, _ in organizations
    }
    for row in versions:
        if row.currency_code not in currencies or (row.past and not row.used_by):
            continue
        kinds = [
            Metered(
                version=row.id,
                model=row.model,
                currency_code=row.currency_code,
                token_kind=kind,
                unit_amount=unit_amount_decimal(getattr(row, kind), row.currency_code),
                tier=ServiceTier(row.tier),
            )
            for kind in TokenKind
            # A subscription has few items: reasoning at the price of output and free embeddings get
            # an item only if the model has such tokens.
            if kind in row.kinds
        ]
        metered += kinds
        for organization_id, _, currency_code in organizations:
            # A customer's own price applies to it alone; the list price stays ready for its
            # withdrawal.
            pays_it = (
                row.organization_id in (None, organization_id)
                and currency_code == row.currency_code
            )
            if organization_id in row.used_by or (pays_it and not row.past):
                subscribed[organization_id] += kinds
    return PriceBook(
        organizations,
        profiles,
        tuple(metered),
        {key: tuple(value) for key, value in subscribed.items()},
    )


STATES = text(
    "SELECT state, count(*), sum(token_count)::bigint FROM meter_batches GROUP BY 1 ORDER BY 1"
)
PAUSE = text("SELECT closed_until, paused_until, pause_reason FROM export_progress")
UNKNOWN = text("""
SELECT DISTINCT o.name
FROM meter_batches b
JOIN organizations o ON o.id = b.organization_id
WHERE b.state IN ('pending', 'sent')
  AND NOT (
      EXISTS (
          SELECT
          FROM stripe_objects
          WHERE (kind, ref) = ('customer', o.id::text)
      )
      AND EXISTS (
          SELECT
          FROM stripe_objects
          WHERE (kind, ref) = ('meter', b.price_version_id || ':' || b.token_kind)
      )
  )
ORDER BY 1
""")
BY_ITEM = text(f"SELECT {OF_OWED_MONTH} FROM meter_batches b WHERE id = :id")
ATTENTION = text(f"""
SELECT b.id, b.state, o.name, b.token_kind, b.hour, b.token_count, coalesce(b.last_error, '')
FROM meter_batches b
JOIN organizations o ON o.id = b.organization_id
WHERE b.state IN ('rejected', 'parked', 'cancelling')
  AND NOT (b.state = 'rejected' AND {OF_OWED_MONTH})
ORDER BY b.hour, b.id
LIMIT :limit
""")
UNSETTLED_MONTHS = text("""
SELECT o.name, to_char(m.month, 'YYYY-MM')
FROM billing_months m
JOIN organizations o ON o.id = m.organization_id
LEFT JOIN stripe_month_settlements s USING (organization_id, month)
WHERE m.state = 'closed'
  AND s.settled_at IS NULL
  AND m.closed_at >= (SELECT month_items_since FROM export_progress)
  AND EXISTS (
      SELECT FROM stripe_objects WHERE kind = 'customer' AND ref = m.organization_id::text
  )
ORDER BY m.month, o.name
LIMIT :limit
""")
# Each sync writes the row of every customer that it finds.
CHANGED_PROFILES = text("""
SELECT o.name
FROM billing_profiles p
JOIN organizations o ON o.id = p.organization_id
WHERE EXISTS (
    SELECT
    FROM stripe_objects s
    WHERE (s.kind, s.ref) = ('customer', o.id::text) AND s.seen_at < p.updated_at
)
ORDER BY 1
LIMIT :limit
""")
WITHOUT_PAYMENT_METHOD = text("""
SELECT DISTINCT o.name
FROM stripe_objects s
JOIN organizations o ON o.id::text = s.ref
WHERE s.kind = 'payment_method' AND s.stripe_id = ''
ORDER BY 1
LIMIT :limit
""")
UNHANDLED = text("SELECT count(*) FROM stripe_events WHERE handled_at IS NULL")


@dataclass(frozen=True, slots=True)
class StateCount:
    """Number of batches in one state, and of their tokens."""

    state: str
    batch_count: int
    token_count: int


@dataclass(frozen=True, slots=True)
class StuckBatch:
    """Batch that needs an operator: `weir stripe resend` if rejected, `settle` if parked."""

    id: uuid.UUID
    state: str
    organization: str
    token_kind: str
    hour: datetime
    token_count: int
    last_error: str


@dataclass(frozen=True, slots=True)
class ExportStatus:
    """State of the export.

    All hours before `closed_until` have batches; it is None before the first batch.
    `unsettled_months` has the organization and month of Stripe invoices that do not equal ours yet.
    `changed_profiles` and `without_payment_method` name organizations, as of the last `weir stripe
    sync`. `unpaid_invoices` are those that are overdue, uncollectible, or whose charge failed.
    """

    states: tuple[StateCount, ...]
    closed_until: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    unknown_organizations: tuple[str, ...]
    unhandled_event_count: int
    unsettled_months: tuple[tuple[str, str], ...]
    needing_attention: tuple[StuckBatch, ...]
    changed_profiles: tuple[str, ...]
    without_payment_method: tuple[str, ...]
    unpaid_invoices: tuple[InvoicePayment, ...]


async def export_status(sessions: Sessions) -> ExportStatus:
    limit = {"limit": ATTENTION_MAX}
    async with sessions() as session:
        progress = (await session.execute(PAUSE)).one_or_none()
        return ExportStatus(
            states=tuple(StateCount(*row) for row in await session.execute(STATES)),
            closed_until=progress.closed_until if progress else None,
            paused_until=progress.paused_until if progress else None,
            pause_reason=progress.pause_reason if progress else None,
            unknown_organizations=tuple(await session.scalars(UNKNOWN)),
            unhandled_event_count=int(await session.scalar(UNHANDLED) or 0),
            unsettled_months=tuple(
                (row[0], row[1]) for row in await session.execute(UNSETTLED_MONTHS, limit)
            ),
            needing_attention=tuple(
                StuckBatch(*row) for row in await session.execute(ATTENTION, limit)
            ),
            changed_profiles=tuple(await session.scalars(CHANGED_PROFILES, limit)),
            without_payment_method=tuple(await session.scalars(WITHOUT_PAYMENT_METHOD, limit)),
            unpaid_invoices=tuple(await unpaid_invoices(session, ATTENTION_MAX)),
        )


LOCK = text("SELECT * FROM meter_batches WHERE id = :id FOR UPDATE")
MOVE = text("UPDATE meter_batches SET state = :state, last_error = :error WHERE id = :id")
COUNTED = text("""
UPDATE meter_batches
SET state = 'delivered', delivered_at = sent_at, last_error = NULL
WHERE id = :id
""")


async def resend(sessions: Sessions, gateway: StripeGateway, batch_id: uuid.UUID) -> None:
    """Cancel a delivered batch at Stripe, or give up a rejected one, and queue its tokens again.

    It is safe to repeat after an interruption. Raises: NotFound; StripeFailed; InvalidValue if the
    batch's state or age forbids it.
    """
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.late_item_id is not None:
            raise InvalidValue(
                "batch",
                f"{batch_id} is invoiced by an item of its own: resending it would invoice it"
                " twice",
            )
        state = BatchState(batch.state)
        if state is BatchState.REJECTED:
            if await session.scalar(BY_ITEM, {"id": batch_id}):
                raise InvalidValue(
                    "batch",
                    f"{batch_id} is part of a month that is settled at Stripe by invoice items:"
                    " resending it would invoice it twice",
                )
            await _give_up(session, batch)
            return
        if state is BatchState.DELIVERED:
            if await database_now(session) - batch.delivered_at >= CANCEL_WITHIN:
                reason = (
                    f"{batch_id} was delivered over 24 hours ago and cannot be cancelled: credit"
                    " the customer instead"
                )
                raise InvalidValue("batch", reason)
            await session.execute(MOVE, {"id": batch_id, "state": "cancelling", "error": None})
        elif state is not BatchState.CANCELLING:
            raise InvalidValue(
                "batch",
                f"{batch_id} is {state}: only a delivered or rejected batch can be sent again",
            )
    event_name = gateway.event_name(batch.price_version_id, TokenKind(batch.token_kind))
    answer = await gateway.take_back(str(batch_id), event_name)
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.state != BatchState.CANCELLING:
            return  # another call completed it
        if answer.verdict is Verdict.DELIVERED:
            await _give_up(session, batch)
        elif answer.verdict is Verdict.REFUSED:
            # An earlier attempt with a lost answer may have cancelled it, which would explain this
            # refusal.
            refused = BatchState.PARKED if state is BatchState.CANCELLING else BatchState.DELIVERED
            await session.execute(
                MOVE, {"id": batch_id, "state": str(refused), "error": answer.reason}
            )
    if answer.verdict is not Verdict.DELIVERED:
        raise StripeFailed(
            f"The meter event is not cancelled: {answer.reason}. Correct its usage at Stripe."
        )


async def settle(sessions: Sessions, batch_id: uuid.UUID, *, counted: bool) -> None:
    """Record whether Stripe has counted a parked batch; if not, queue its tokens again.

    Raises: NotFound; InvalidValue if the batch is not parked.
    """
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.state != BatchState.PARKED:
            raise InvalidValue(
                "batch", f"{batch_id} is {batch.state}: only a parked batch can be settled"
            )
        if counted:
            await session.execute(COUNTED, {"id": batch_id})
        else:
            await _give_up(session, batch)


async def _locked(session: AsyncSession, batch_id: uuid.UUID) -> Row[Any]:
    if (batch := (await session.execute(LOCK, {"id": batch_id})).one_or_none()) is None:
        raise NotFound("meter batch", str(batch_id))
    return batch


async def _give_up(session: AsyncSession, batch: Row[Any]) -> None:
    """Cancel a batch and queue its tokens in a new one, in the same transaction."""
    await session.execute(MOVE, {"id": batch.id, "state": "cancelled", "error": batch.last_error})
    await form(session, batch.hour, batch.hour + timedelta(hours=1), batch.organization_id)
