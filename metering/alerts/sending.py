"""One alert to one webhook: what is sent, its signature, and the one attempt. The only HTTP of this package.

What is sent is the same in every attempt but for the signature's time. No redirect is followed, nothing of the answer is read but
its head, and an attempt ends in time whatever the other side does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from importlib.metadata import version
from socket import AddressFamily
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from metering.alerts.alert_models import InvoiceEvent
from metering.alerts.invoice_alerts import InvoiceFacts, facts_of
from metering.alerts.listing import ListedAlert
from metering.alerts.webhook_urls import AddressRefused, Place, checked_places, checked_url
from metering.errors import InvalidValue
from metering.models import QuotaDimension
from metering.money import to_decimal
from metering.quotas.quota_rules import DIMENSIONS, NO_WINDOW, Kind, window_end

ATTEMPT_S = 5.0  # from the look-up to the head of the answer: who has more to do than to take it, does it afterwards
SIGNATURE_HEADER = "Weir-Signature"
ERROR_CHARS_MAX = 300


class Resolved(AbstractResolver):
    """Answers with the places that were checked, whatever it is asked."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    async def resolve(self, host: str, port: int = 0, family: AddressFamily = AddressFamily.AF_UNSPEC) -> list[ResolveResult]:
        """See `AbstractResolver`."""
        return [
            ResolveResult(hostname=host, host=each.host, port=each.port, family=each.family, proto=0, flags=0)
            for each in self._places
        ]

    async def close(self) -> None:
        """See `AbstractResolver`."""


async def send(url: str, secret: str, body: bytes, *, private: bool, attempt_s: float = ATTEMPT_S) -> str:
    """Make one attempt: empty if it was answered with 2xx, else what went wrong. Never raises for what the other side does."""
    try:
        checked_url(url, private=private)
        async with asyncio.timeout(attempt_s):
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            places = await checked_places(parts.hostname or "", port, private=private)
            return await _post(url, signed_headers(secret, body, int(time.time())), body, places)
    except TimeoutError:
        return f"no answer within {attempt_s:g} s"
    except InvalidValue as refused:  # what the operator allows has changed since
        return str(refused)[:ERROR_CHARS_MAX]
    except aiohttp.ClientResponseError as unread:  # as a text it has the whole URL, which may be a secret, and goes to a log
        return f"answered what is no HTTP: {unread.message}"[:ERROR_CHARS_MAX]
    except aiohttp.InvalidURL:
        return "the URL cannot be called: give another"
    except (AddressRefused, aiohttp.ClientError, OSError, ValueError) as error:
        return (str(error) or type(error).__name__)[:ERROR_CHARS_MAX]


async def _post(url: str, headers: dict[str, str], body: bytes, places: list[Place]) -> str:
    connector = aiohttp.TCPConnector(resolver=Resolved(places), use_dns_cache=False, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        if 200 <= answer.status < 300:
            return ""
        if 300 <= answer.status < 400:
            return f"answered {answer.status}: redirects are not followed; give the URL that it leads to"
        return f"answered {answer.status}"


def signed_headers(secret: str, body: bytes, at_s: int) -> dict[str, str]:
    """Headers of an attempt. at_s: seconds since 1970; it is signed with the body, so that nobody can send it again later."""
    return {
        "Content-Type": "application/json",
        "User-Agent": f"weir/{version('weir')}",
        SIGNATURE_HEADER: f"t={at_s},v1={signature(secret, body, at_s)}",
    }


def signature(secret: str, body: bytes, at_s: int) -> str:
    """HMAC-SHA256 over the time, a point and the body, in hexadecimal."""
    return hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()


def body_of(listed: ListedAlert) -> bytes:
    """An alert as JSON. Values are texts: they may be more than JavaScript can count."""
    alert, organization, quota = listed.alert, listed.organization, listed.quota
    content: dict[str, object] = {
        "id": str(alert.id),
        "type": listed.kind,
        "time": alert.fired_at.isoformat(),
        "organization": {"id": str(organization.id), "name": organization.name, "currency": organization.currency_code},
        "text": f"A test of the alerts of {organization.name}.",
    }
    if quota is not None and alert.window_start is not None:
        dimension = QuotaDimension(quota.dimension)
        is_of_credit = dimension is QuotaDimension.PREPAID_CREDIT_PICOS
        ends_at = window_end(dimension, alert.window_start)
        content |= {
            "text": text_of(listed),
            "quota": {
                "id": str(quota.id),
                "subject": quota.subject,
                "subject_id": str(quota.subject_id),
                "subject_name": listed.subject_name,
                "model": quota.model,
                "dimension": quota.dimension,
            },
            "left_picos_threshold" if is_of_credit else "percent_threshold": str(alert.threshold),
            "limit": str(alert.limit_value),
            "used": str(alert.used),
            "window_start": None if alert.window_start == NO_WINDOW else alert.window_start.isoformat(),
            "window_end": None if ends_at is None else ends_at.isoformat(),
        }
    if alert.invoice_event is not None:
        facts = facts_of(alert)
        content |= {
            "text": payment_text(listed, facts),
            "invoice": {
                "stripe_id": alert.stripe_invoice_id,
                "stripe_number": facts.stripe_number,
                "month": facts.month,
                "currency": facts.currency_code,
                "amount_due_picos": str(facts.amount_due_picos),
                "amount_paid_picos": str(facts.amount_paid_picos),
                "hosted_url": facts.hosted_url,
            },
        }
    return json.dumps(content, ensure_ascii=False, sort_keys=True).encode()


def payment_text(listed: ListedAlert, facts: InvoiceFacts) -> str:
    """An alert on a payment in a sentence."""
    invoice = f"The invoice of {listed.organization.name} for {facts.month}"
    if listed.alert.invoice_event == InvoiceEvent.PAID:
        return f"{invoice} is paid: {to_decimal(facts.amount_paid_picos):,.2f} {facts.currency_code}."
    return f"{invoice} could not be charged: {to_decimal(facts.amount_due_picos):,.2f} {facts.currency_code} are due."


def text_of(listed: ListedAlert) -> str:
    """An alert of a limit in a sentence."""
    alert, quota = listed.alert, listed.quota
    assert quota is not None
    assert alert.used is not None
    assert alert.limit_value is not None
    dimension, currency = QuotaDimension(quota.dimension), listed.organization.currency_code

    def amount(value: int) -> str:
        return f"{to_decimal(value):,.2f} {currency}" if DIMENSIONS[dimension][0] is Kind.MONEY else f"{value:,} tokens"

    if dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
        return f"{listed.subject_name} has {amount(max(alert.limit_value - alert.used, 0))} of prepaid credit left."
    model = f" for {quota.model}" if quota.model else ""
    per = dimension.rpartition("_")[2]
    share = alert.used * 100 // alert.limit_value
    told = f"{amount(alert.used)} of {amount(alert.limit_value)}"
    return f"{listed.subject_name} has used {share} % of its limit per {per}{model}: {told}."
