"""Alerts on limits and credit: the values, how they are read from the wire, and the call that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from weir.v1 import alerts_pb2 as pb
from weir.v1 import billing_service_pb2_grpc

from weir_client.unary import UnaryClient
from weir_client.values import QuotaDimension, QuotaSubject
from weir_client.wire import DIMENSIONS, SUBJECTS, time_of


@dataclass(frozen=True, slots=True)
class Alert:
    """So much of a limit was used in a window, or so little credit was left. Values are tokens or picos, by dimension.

    quota_id is empty for a test, which tells nothing of a limit.
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


@dataclass(frozen=True, slots=True)
class AlertPage:
    """Alerts, the latest first. next_page_token: empty on the last page."""

    alerts: tuple[Alert, ...]
    next_page_token: str


class AsyncAlertCalls(UnaryClient):
    """Part of `AsyncBillingClient`."""

    async def list_alerts(self, organization: str = "", *, page_size: int = 0, page_token: str = "") -> AlertPage:
        """A page of alerts. organization: empty for one's own, or for all with an `admin` key. Raises: NotFound, InvalidRequest."""
        stub = billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)
        request = pb.ListAlertsRequest(organization=organization, page_size=page_size, page_token=page_token)
        response = await self._call(stub.ListAlerts, request)
        return AlertPage(tuple(map(alert, response.alerts)), response.next_page_token)


def alert(message: pb.Alert) -> Alert:
    """One alert."""
    return Alert(
        alert_id=message.alert_id,
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        currency_code=message.currency_code,
        fire_time=time_of(message.fire_time),
        quota_id=message.quota_id,
        subject=SUBJECTS.get(message.subject, QuotaSubject.UNSPECIFIED),
        subject_id=message.subject_id,
        subject_name=message.subject_name,
        model=message.model,
        dimension=DIMENSIONS.get(message.dimension, QuotaDimension.UNSPECIFIED),
        threshold=message.threshold,
        limit_value=message.limit_value,
        used_value=message.used_value,
        window_start_time=time_of(message.window_start_time) if message.HasField("window_start_time") else None,
    )
