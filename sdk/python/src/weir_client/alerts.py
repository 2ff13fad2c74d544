"""Alerts on limits and credit, and their webhooks: the values and the calls."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir.v1 import admin_service_pb2_grpc, billing_service_pb2_grpc
from weir.v1 import alerts_pb2 as pb

from weir_client import wire
from weir_client.money import Money
from weir_client.unary import UnaryClient, items_of
from weir_client.values import QuotaDimension, QuotaSubject


class AlertDeliveryState(StrEnum):
    """Where an alert stands on its way to a webhook: PENDING, for 24 hours at most, then one of the others."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AlertDelivery:
    """An alert on its way to a webhook. last_error: of the latest attempt that failed; empty if none did."""

    state: AlertDeliveryState
    attempt_count: int
    attempt_time: datetime | None
    end_time: datetime | None
    last_error: str


@dataclass(frozen=True, slots=True)
class AlertInvoice:
    """An invoice at Stripe when an alert fired. month: the one that it bills, YYYY-MM."""

    stripe_invoice_id: str
    stripe_number: str
    month: str
    amount_due: Money
    amount_paid: Money
    hosted_url: str  # Stripe's page on which the customer can pay it


@dataclass(frozen=True, slots=True)
class Alert:
    """So much of a limit was used in a window, or so little credit was left; or an invoice was paid or could not be charged.

    Values are tokens or picos, by dimension. quota_id is empty for a test and for an invoice, which tell nothing of a limit.
    """

    alert_id: str
    organization_id: str
    organization_name: str
    currency_code: str
    fire_time: datetime
    quota_id: str
    subject: QuotaSubject
    subject_id: str
    subject_name: str  # for people
    model: str  # empty: all models together
    dimension: QuotaDimension
    threshold: int  # percent of the limit that are used; of prepaid credit, picos that are left
    limit_value: int
    used_value: int
    window_start_time: datetime | None  # None for prepaid credit
    delivery: AlertDelivery | None = None  # None: there was no webhook when it fired
    kind: str = ""  # "quota", "credit", "test", "invoice_payment_failed" or "invoice_paid"
    invoice: AlertInvoice | None = None  # of the two last kinds


@dataclass(frozen=True, slots=True)
class AlertWebhook:
    """Where an organization is told of its alerts. failure_count: attempts that failed since one succeeded."""

    organization_id: str
    organization_name: str
    url: str
    create_time: datetime | None
    pending_count: int
    failure_count: int
    rest_end_time: datetime | None  # after failures no attempt is made before
    last_error: str


@dataclass(frozen=True, slots=True)
class CreatedAlertWebhook:
    """A webhook with the secret that signs what it is sent, which no later call can tell again."""

    webhook: AlertWebhook
    secret: str = field(repr=False)  # kept out of logs


class AsyncAlertWebhookCalls(UnaryClient):
    """Part of `AsyncAdminClient`."""

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)

    async def set_alert_webhook(self, organization: str, url: str, *, request_id: str | None = None) -> CreatedAlertWebhook:
        """Posts an organization's alerts to a URL from now on, signed with a new secret.

        request_id: a UUID of your own; the same call with it again changes nothing, and its secret is empty.
        """
        request = pb.SetAlertWebhookRequest(organization=organization, url=url, request_id=request_id or str(uuid.uuid4()))
        response = await self._call(self._stub.SetAlertWebhook, request)
        return wire.read(CreatedAlertWebhook, response)

    async def list_alert_webhooks(self, organization: str = "") -> list[AlertWebhook]:
        """All, or that of one organization."""
        response = await self._call(self._stub.ListAlertWebhooks, pb.ListAlertWebhooksRequest(organization=organization))
        return [wire.read(AlertWebhook, each) for each in response.webhooks]

    async def delete_alert_webhook(self, organization: str, *, allow_missing: bool = False) -> bool:
        """Posts them nowhere; whether there was a webhook."""
        request = pb.DeleteAlertWebhookRequest(organization=organization, allow_missing=allow_missing)
        return (await self._call(self._stub.DeleteAlertWebhook, request)).deleted

    async def test_alert_webhook(self, organization: str, *, request_id: str | None = None) -> Alert:
        """Has a test sent, which `list_alerts` tells the delivery of. request_id: a UUID of your own; again, it sends no other."""
        request = pb.TestAlertWebhookRequest(organization=organization, request_id=request_id or str(uuid.uuid4()))
        return wire.read(Alert, (await self._call(self._stub.TestAlertWebhook, request)).alert)


class AsyncAlertCalls(UnaryClient):
    """Part of `AsyncBillingClient`."""

    async def _alert_pages(self, organization: str = "", *, page_size: int = 0) -> AsyncIterator[list[Alert]]:
        """Alerts, the latest first. organization: empty for one's own, or for all with an `admin` key.

        Raises: NotFound, InvalidRequest.
        """
        stub = billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)
        async for page in self._pages(stub.ListAlerts, pb.ListAlertsRequest(organization=organization, page_size=page_size)):
            yield [wire.read(Alert, each) for each in page.alerts]

    list_alerts = items_of(_alert_pages)
