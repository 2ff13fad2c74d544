"""Webhooks of alerts."""

from __future__ import annotations

import uuid

from weir.v1 import alerts_pb2 as alert_pb

from api.access.servicer import AuthenticatedServicer, removed
from api.core.interceptor import Context
from api.core.messages import alert_message, webhook_message
from metering.alerts import delivering as webhooks
from metering.alerts.alerts import find_alert


class WebhookCalls(AuthenticatedServicer):
    """Calls on webhooks."""

    _private_webhooks: bool

    async def SetAlertWebhook(
        self, request: alert_pb.SetAlertWebhookRequest, context: Context
    ) -> alert_pb.SetAlertWebhookResponse:
        """Create a webhook and return its secret, once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                existing = await webhooks.list_webhooks(acting.session, organization=earlier)
                return alert_pb.SetAlertWebhookResponse(
                    webhook=webhook_message(existing[0]) if existing else None
                )
            state, secret = await webhooks.set_webhook(
                acting.session,
                organization=request.organization,
                url=request.url,
                private=self._private_webhooks,
                actor=acting.actor,
            )
            await acting.record(request, state.organization.id)
            return alert_pb.SetAlertWebhookResponse(webhook=webhook_message(state), secret=secret)

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

    async def TestAlertWebhook(
        self, request: alert_pb.TestAlertWebhookRequest, context: Context
    ) -> alert_pb.TestAlertWebhookResponse:
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                alert_id = uuid.UUID(earlier)
            else:
                alert_id = await webhooks.try_webhook(
                    acting.session, organization=request.organization
                )
                await acting.record(request, alert_id)
            return alert_pb.TestAlertWebhookResponse(
                alert=alert_message(await find_alert(acting.session, alert_id))
            )
