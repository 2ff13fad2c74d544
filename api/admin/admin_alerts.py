"""The calls of `AdminService` about the webhooks of alerts."""

from __future__ import annotations

import uuid

from weir.v1 import alerts_pb2 as pb

from api.admin.admin_calls import AdminCalls
from api.core.interceptor import Context
from api.core.messages import alert_message, webhook_message
from metering.alerts import webhooks
from metering.alerts.alerts import find_alert
from metering.core.errors import NotFound


class AlertWebhookCalls(AdminCalls):
    """See `proto/weir/v1/alerts.proto`."""

    _private_webhooks: bool

    async def SetAlertWebhook(self, request: pb.SetAlertWebhookRequest, context: Context) -> pb.SetAlertWebhookResponse:
        """Gives an organization a webhook and shows its secret, once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                standing = await webhooks.list_webhooks(acting.session, organization=earlier)
                return pb.SetAlertWebhookResponse(webhook=webhook_message(standing[0]) if standing else None)
            state, secret = await webhooks.set_webhook(
                acting.session,
                organization=request.organization,
                url=request.url,
                private=self._private_webhooks,
                actor=acting.actor,
            )
            await acting.made(request, state.organization.id)
            return pb.SetAlertWebhookResponse(webhook=webhook_message(state), secret=secret)

    async def ListAlertWebhooks(self, request: pb.ListAlertWebhooksRequest, context: Context) -> pb.ListAlertWebhooksResponse:
        """Lists webhooks."""
        async with self._transaction(context) as (session, _):
            found = await webhooks.list_webhooks(session, organization=request.organization)
            return pb.ListAlertWebhooksResponse(webhooks=map(webhook_message, found))

    async def DeleteAlertWebhook(self, request: pb.DeleteAlertWebhookRequest, context: Context) -> pb.DeleteAlertWebhookResponse:
        """Takes a webhook away."""
        async with self._transaction(context) as (session, actor):
            try:
                await webhooks.remove_webhook(session, organization=request.organization, actor=actor)
            except NotFound:
                if not request.allow_missing:
                    raise
                return pb.DeleteAlertWebhookResponse(deleted=False)
            return pb.DeleteAlertWebhookResponse(deleted=True)

    async def TestAlertWebhook(self, request: pb.TestAlertWebhookRequest, context: Context) -> pb.TestAlertWebhookResponse:
        """Has a test sent."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                alert_id = uuid.UUID(earlier)
            else:
                alert_id = await webhooks.try_webhook(acting.session, organization=request.organization)
                await acting.made(request, alert_id)
            return pb.TestAlertWebhookResponse(alert=alert_message(await find_alert(acting.session, alert_id)))
