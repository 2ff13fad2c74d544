"""`AdminService`: tenants, keys, quotas, prices, plans, credit, webhooks, audit log,
configurations, and running requests and replicas.

Each RPC requires an admin key and is one transaction; client-made ids make retries safe.
"""

from __future__ import annotations

import uuid

from weir.v1 import admin_service_pb2 as pb
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import alerts_pb2 as alert_pb

from api.access.auth import Authenticator
from api.access.servicer import AuthenticatedServicer, CallerTransaction, once, removed
from api.admin.configuration_calls import ConfigurationCalls, InThread, at_once, json_text
from api.admin.live_calls import LiveCalls, ReplicaCalls
from api.admin.price_calls import PlanCalls, PriceCalls
from api.admin.tenant_calls import QuotaCalls, TenantCalls
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import alert_message, webhook_message
from inference.routing.router import Router
from metering.alerts import webhooks
from metering.alerts.alerts import find_alert
from metering.core import audit
from metering.core.models import AuditEntry
from metering.invoicing.invoice_document import Issuer
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants.api_keys import subject_ids


class WebhookCalls(AuthenticatedServicer):
    """RPCs for webhooks."""

    _private_webhooks: bool

    @once
    async def SetAlertWebhook(
        self, request: alert_pb.SetAlertWebhookRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, alert_pb.SetAlertWebhookResponse]:
        """Create a webhook. Only the first response has its secret; a retry returns it without."""
        if earlier:
            existing = await webhooks.list_webhooks(acting.session, organization=earlier)
            found = webhook_message(existing[0]) if existing else None
            return earlier, alert_pb.SetAlertWebhookResponse(webhook=found)
        state, secret = await webhooks.set_webhook(
            acting.session,
            organization=request.organization,
            url=request.url,
            private=self._private_webhooks,
            actor=acting.actor,
        )
        return state.organization.id, alert_pb.SetAlertWebhookResponse(
            webhook=webhook_message(state), secret=secret
        )

    async def ListAlertWebhooks(
        self, request: alert_pb.ListAlertWebhooksRequest, context: Context
    ) -> alert_pb.ListAlertWebhooksResponse:
        async with self._transaction(context) as (session, _):
            matches = await webhooks.list_webhooks(session, organization=request.organization)
            return alert_pb.ListAlertWebhooksResponse(webhooks=map(webhook_message, matches))

    async def DeleteAlertWebhook(
        self, request: alert_pb.DeleteAlertWebhookRequest, context: Context
    ) -> alert_pb.DeleteAlertWebhookResponse:
        async with self._transaction(context) as (session, actor):
            removal = webhooks.remove_webhook(
                session, organization=request.organization, actor=actor
            )
            return alert_pb.DeleteAlertWebhookResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    @once
    async def TestAlertWebhook(
        self, request: alert_pb.TestAlertWebhookRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, alert_pb.TestAlertWebhookResponse]:
        alert_id = (
            uuid.UUID(earlier)
            if earlier
            else await webhooks.try_webhook(acting.session, organization=request.organization)
        )
        alert = alert_message(await find_alert(acting.session, alert_id))
        return alert_id, alert_pb.TestAlertWebhookResponse(alert=alert)


class AuditCalls(AuthenticatedServicer):
    """RPCs for the audit log."""

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Context
    ) -> pb.ListAuditEntriesResponse:
        start_at = wire.given_time(request, "start_time")
        end_at = wire.given_time(request, "end_time")
        async with self._transaction(context) as (session, _):
            entries = await audit.list_audit_entries(
                session,
                page_size=request.page_size or 100,
                before_entry_id=request.before_entry_id,
                subject_ids=(
                    await subject_ids(session, request.subject) if request.subject else None
                ),
                actor=request.actor,
                action_prefix=request.action_prefix,
                start_at=start_at,
                end_at=end_at,
            )
            return pb.ListAuditEntriesResponse(entries=map(audit_message, entries))


def audit_message(entry: AuditEntry) -> pb.AuditEntry:
    before, after = (json_text(each, sort_keys=True) for each in (entry.before, entry.after))
    return wire.message_of(
        pb.AuditEntry, entry, entry_id=entry.id, before_json=before, after_json=after
    )


class AdminServicer(
    TenantCalls,
    QuotaCalls,
    PriceCalls,
    PlanCalls,
    ConfigurationCalls,
    WebhookCalls,
    LiveCalls,
    ReplicaCalls,
    AuditCalls,
    pb_grpc.AdminServiceServicer,
):
    """Implements `proto/weir/v1/admin_service.proto`; each base has the RPCs of one subject."""

    def __init__(
        self,
        router: Router,
        authenticator: Authenticator,
        sessions: Sessions,
        database_url: str,
        signer: Signer | None,
        issuer: Issuer,
        *,
        in_thread: InThread = at_once,
        private_webhooks: bool = False,
    ) -> None:
        """`signer` signs the receipts of requests that `ExpireOverdueHolds` ends; with None, they
        get no receipt. `issuer` names the fonts with which billing profiles must be printable.

        `in_thread` runs the parsing of a configuration, like `RequestRegistry.in_thread`.
        `private_webhooks` permits webhooks in private networks and over plain HTTP.
        """
        super().__init__(authenticator, sessions)
        self._router = router
        self._database_url = database_url
        self._signer = signer
        self._issuer = issuer
        self._in_thread = in_thread
        self._private_webhooks = private_webhooks
