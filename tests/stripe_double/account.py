"""Account of Stripe for metered billing: its objects and refusals, without HTTP.

Rules are those of Stripe's public documentation: identifiers are unique for 24 hours, timestamps
lie within 35 days back and five minutes ahead, values are whole numbers, one call at a time per
customer and meter; a wrong customer of an event is found later, in an error report.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from tests.stripe_double.form import Refused

DAY_S = 86_400
# Stripe's own words, as public logs of calls to it show them.
MISSING_EMAIL = (
    "Missing email. In order to create invoices that are sent to the customer, the customer must"
    " have a valid email."
)
# Three decimals must end in 0, and currencies that have lost their decimals keep two zeros.
AMOUNT_STEPS = dict.fromkeys(("bhd", "jod", "kwd", "omr", "tnd"), 10) | {"isk": 100, "ugx": 100}
Values = dict[str, Any]


@dataclass(slots=True)
class Account:
    """Objects by id, and meter events by identifier. clock: seconds since 1970."""

    clock: Callable[[], float] = time.time
    objects: dict[str, dict[str, Values]] = field(default_factory=dict)
    meter_events: list[Values] = field(default_factory=list)
    uncounted: list[Values] = field(default_factory=list)  # events that an error report will name
    rounding: str = ROUND_HALF_UP  # of the lines of invoices
    reports: dict[str, Values] = field(default_factory=dict)  # error reports by event id

    def run(self, operation: str, indexes: list[str], values: Values) -> Values:
        """Run a call; return the object of its answer. Raises: Refused."""
        match operation:
            case "POST /v1/billing/meter_events":
                return self.count(values)
            case "POST /v1/billing/meter_event_adjustments":
                return self.take_back(values)
            case "GET /v1/billing/meters/{id}/event_summaries":
                return self.summaries(indexes[0], values)
            case "GET /v1/customers/search":
                return self.search(values)
            case "POST /v1/customers/{customer}":
                self.one("customers", indexes[0]).update(values)
                return self.one("customers", indexes[0])
            case "POST /v1/billing_portal/sessions":
                self.one("customers", values["customer"])
                return {
                    "object": "billing_portal.session",
                    "url": "https://billing.stripe.com/p/session/test_1",
                }
            case "POST /v1/invoices/{id}":
                self.draft(indexes[0]).update(values)
                return self.one("invoices", indexes[0])
            case "POST /v1/invoices/{id}/finalize":
                return self.finalize(indexes[0])
        verb, path = operation.split(" ")
        kind = path.removeprefix("/v1/").split("/{")[0]
        if verb == "POST":
            return self.create(kind, values)
        if indexes:
            return self.one(kind, indexes[0])
        return self.listed(kind, values)

    def of(self, kind: str) -> dict[str, Values]:
        """Return the objects of a kind, by id."""
        return self.objects.setdefault(kind, {})

    def one(self, kind: str, id: str) -> Values:
        """Return one object. Raises: Refused."""
        if id not in self.of(kind):
            raise Refused(
                404, f"No such {kind.rstrip('s')}: '{id}'", code="resource_missing", param="id"
            )
        return self.of(kind)[id]

    def create(self, kind: str, values: Values) -> Values:
        """Create an object. Raises: Refused if a value must be unique or a reference must exist."""
        made = {
            "id": f"{kind.rstrip('s').replace('/', '_')}_{uuid.uuid4().hex[:12]}",
            "object": kind.rstrip("s"),
            **values,
        }
        if made["id"] in self.of(kind):
            raise Refused(
                400,
                f"{kind} already exists: {made['id']}",
                code="resource_already_exists",
                param="id",
            )
        if kind == "billing/meters":
            made["status"] = "active"
            if any(each["event_name"] == made["event_name"] for each in self.of(kind).values()):
                raise Refused(
                    400, f"An active meter already exists with event name {made['event_name']}."
                )
        if kind == "prices":
            self.one("products", made["product"])
            self.one("billing/meters", made["recurring"]["meter"])
            if any(each.get("lookup_key") == made["lookup_key"] for each in self.of(kind).values()):
                raise Refused(400, f"A price already uses the lookup key {made['lookup_key']}.")
            if not re.fullmatch(r"\d+(\.\d{1,12})?", made["unit_amount_decimal"]):
                raise Refused(
                    400, "Invalid decimal: at most 12 decimal places", param="unit_amount_decimal"
                )
        if kind == "subscriptions":
            self.check_collection(self.one("customers", made["customer"]), made)
            made["status"] = "active"
            for item in made.pop("items"):
                self.create("subscription_items", {"subscription": made["id"], **item})
        if kind == "invoiceitems":
            if self.one("customers", made["customer"]).get("deleted"):
                raise Refused(400, "The customer was deleted.", param="customer")
            step = AMOUNT_STEPS.get(made["currency"], 1)
            if made["amount"] % step:
                raise Refused(
                    400, f"The amount must be a multiple of {step}.", code="amount_invalid"
                )
            if "invoice" in made and self.draft(made["invoice"])["customer"] != made["customer"]:
                raise Refused(400, "The invoice is another customer's.", param="invoice")
            made.setdefault("invoice", None)
        if kind == "subscription_items":
            self.one("prices", made["price"])
            siblings = [
                each
                for each in self.of(kind).values()
                if each["subscription"] == made["subscription"]
            ]
            if len(siblings) == 20:
                raise Refused(400, "A subscription holds at most 20 items.")
            made["price"] = {"id": made["price"]}
        self.of(kind)[made["id"]] = made
        return made

    def check_collection(self, customer: Values, subscription: Values) -> None:
        """Raises: Refused for contradictory collection settings."""
        if subscription.get("collection_method") != "send_invoice":
            if "days_until_due" in subscription:
                why = "`days_until_due` can only be set if `collection_method` is `send_invoice`."
                raise Refused(400, why, param="days_until_due")
            return
        if not customer.get("email"):
            raise Refused(400, MISSING_EMAIL)
        if subscription.get("days_until_due", 0) < 1:
            why = "`days_until_due` is required if `collection_method` is `send_invoice`."
            raise Refused(400, why, param="days_until_due")

    def listed(self, kind: str, values: Values) -> Values:
        """Return a page of a list, newest last."""
        known = list(self.of(kind).values())
        for name in ("customer", "subscription", "invoice"):
            if name in values:
                known = [each for each in known if each.get(name) == values[name]]
        if "created" in values:
            known = [each for each in known if each["created"] >= values["created"]["gte"]]
        if "lookup_keys" in values:
            if len(values["lookup_keys"]) > 10:
                raise Refused(400, "At most 10 lookup keys", param="lookup_keys")
            known = [each for each in known if each.get("lookup_key") in values["lookup_keys"]]
        ids = [each["id"] for each in known]
        begin = ids.index(values["starting_after"]) + 1 if "starting_after" in values else 0
        end = begin + values.get("limit", 10)
        return {
            "object": "list",
            "data": known[begin:end],
            "has_more": end < len(known),
            "url": f"/v1/{kind}",
        }

    def end_period(self, customer: str, begins: int, ends: int) -> list[Values]:
        """End a period: drafts with usage, the first with pending items."""
        made = []
        for subscription in [
            each["id"] for each in self.of("subscriptions").values() if each["customer"] == customer
        ]:
            draft: Values = {
                "id": f"in_{uuid.uuid4().hex[:12]}",
                "object": "invoice",
                "customer": customer,
                "status": "draft",
                "auto_advance": True,
                "created": ends,
                "period_start": begins,
                "period_end": ends,
                "parent": {
                    "type": "subscription_details",
                    "subscription_details": {"subscription": subscription},
                },
            }
            self.of("invoices")[draft["id"]] = draft
            for item in self.of("invoiceitems").values():
                if item["customer"] == customer and item["invoice"] is None:
                    item["invoice"] = draft["id"]
            draft["subtotal"] = draft["total"] = self.subtotal(draft)
            made.append(draft)
        return made

    def subtotal(self, invoice: Values) -> int:
        """Return usage by the current meters, each line rounded separately, plus the items."""
        total: int = sum(
            each["amount"]
            for each in self.of("invoiceitems").values()
            if each["invoice"] == invoice["id"]
        )
        for item in self.of("subscription_items").values():
            if item["subscription"] == invoice["parent"]["subscription_details"]["subscription"]:
                price = self.one("prices", item["price"]["id"])
                meter = self.one("billing/meters", price["recurring"]["meter"])["event_name"]
                count = self.total(
                    meter, invoice["customer"], invoice["period_start"], invoice["period_end"]
                )
                total += int(
                    (count * Decimal(price["unit_amount_decimal"])).quantize(
                        Decimal(1), self.rounding
                    )
                )
        return total

    def draft(self, id: str) -> Values:
        """Return an invoice that may be changed. Raises: Refused."""
        invoice = self.one("invoices", id)
        if invoice["status"] != "draft":
            raise Refused(
                400, f"Invoice {id} is not a draft any more.", code="invoice_not_editable"
            )
        return invoice

    def finalize(self, id: str) -> Values:
        """Finalize a draft with the current sum. Raises: Refused."""
        invoice = self.draft(id)
        invoice["subtotal"] = invoice["total"] = self.subtotal(invoice)
        invoice["status"], invoice["status_transitions"] = (
            "open",
            {"finalized_at": int(self.clock())},
        )
        return invoice

    def search(self, values: Values) -> Values:
        """Return objects by one metadata field."""
        requested = re.fullmatch(r"metadata\['(\w+)'\]:'([\w-]+)'", values["query"])
        if requested is None:
            raise Refused(400, "query is not understood", param="query")
        found = [
            each
            for each in self.of("customers").values()
            if each.get("metadata", {}).get(requested[1]) == requested[2]
        ]
        return {
            "object": "search_result",
            "data": found,
            "has_more": False,
            "url": "/v1/customers/search",
        }

    def count(self, values: Values) -> Values:
        """Take a meter event. Raises: Refused."""
        now = self.clock()
        identifier, at = values["identifier"], values.get("timestamp", int(now))
        if any(
            each["identifier"] == identifier and now - each["created"] < DAY_S
            for each in self.meter_events + self.uncounted
        ):
            raise Refused(400, f"An event already exists with identifier {identifier}.")
        if not any(
            each["event_name"] == values["event_name"]
            for each in self.of("billing/meters").values()
        ):
            raise Refused(
                400,
                f"No active meter found for event name {values['event_name']}.",
                param="event_name",
            )
        if at < now - 35 * DAY_S:
            raise Refused(
                400,
                "The timestamp must be within the past 35 days.",
                code="timestamp_too_far_in_past",
            )
        if at > now + 300:
            raise Refused(
                400,
                "The timestamp is more than 5 minutes in the future.",
                code="timestamp_in_future",
            )
        if not re.fullmatch(r"-?\d{1,15}", values["payload"].get("value", "")):
            raise Refused(400, "The value must be a whole number.", param="payload[value]")
        event = {
            "object": "billing.meter_event",
            "created": int(now),
            **values,
            "timestamp": at,
            "livemode": False,
        }
        customer = self.of("customers").get(values["payload"].get("stripe_customer_id", ""), {})
        known = bool(customer) and not customer.get("deleted")
        (self.meter_events if known else self.uncounted).append(event)
        return event

    def take_back(self, values: Values) -> Values:
        """Cancel a meter event. Raises: Refused after 24 hours."""
        identifier = values["cancel"]["identifier"]
        for event in self.meter_events:
            if (event["identifier"], event["event_name"]) == (identifier, values["event_name"]):
                if self.clock() - event["created"] >= DAY_S:
                    raise Refused(400, "Meter events can be cancelled within 24 hours only.")
                self.meter_events.remove(event)
                return {"object": "billing.meter_event_adjustment", "status": "pending", **values}
        raise Refused(400, f"No meter event with identifier {identifier}.")

    def summaries(self, meter: str, values: Values) -> Values:
        """Return the sum of a customer's events in a range."""
        if values["start_time"] % 60 or values["end_time"] % 60:
            raise Refused(400, "start_time and end_time must be aligned with minute boundaries")
        total = self.total(
            self.one("billing/meters", meter)["event_name"],
            values["customer"],
            values["start_time"],
            values["end_time"],
        )
        summary = {
            "id": f"mtrusg_{uuid.uuid4().hex[:8]}",
            "object": "billing.meter_event_summary",
            "aggregated_value": float(total),
            "meter": meter,
        }
        return {"object": "list", "data": [summary] if total else [], "has_more": False, "url": "/"}

    def total(self, event_name: str, customer: str, begins: float = 0, ends: float = 2**40) -> int:
        """Return the counted tokens of one meter and customer."""
        return sum(
            int(each["payload"]["value"])
            for each in self.meter_events
            if each["event_name"] == event_name
            and each["payload"]["stripe_customer_id"] == customer
            and begins <= each["timestamp"] < ends
        )

    def report_errors(self) -> Values:
        """Report the events that were not counted; return the event that announces the report."""
        errors = [
            {
                "error_message": f"No such customer for {each['identifier']}",
                "request": {"identifier": each["identifier"]},
            }
            for each in self.uncounted
        ]
        self.uncounted = []
        kinds = [
            {
                "code": "meter_event_customer_not_found",
                "error_count": len(errors),
                "sample_errors": errors,
            }
        ]
        notice: Values = {
            "id": f"evt_test_{uuid.uuid4().hex[:12]}",
            "object": "v2.core.event",
            "type": "v1.billing.meter.error_report_triggered",
            "created": "2026-11-20T12:00:00.000Z",
            "livemode": False,
        }
        data = {
            "developer_message_summary": "There are errors",
            "reason": {"error_count": len(errors), "error_types": kinds},
        }
        self.reports[notice["id"]] = {**notice, "data": data}
        return notice
