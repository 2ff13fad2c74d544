"""The call of `BillingService` about alerts."""

from __future__ import annotations

from weir.v1 import alerts_pb2 as pb

from api.access.scopes import Scope
from api.billing.billing_calls import BillingCalls, visible_or_own
from api.core.interceptor import Context
from api.core.messages import alert_message
from metering.alerts.alerts import list_alerts


class AlertCalls(BillingCalls):
    """See `proto/weir/v1/alerts.proto`."""

    async def ListAlerts(self, request: pb.ListAlertsRequest, context: Context) -> pb.ListAlertsResponse:
        """Lists alerts of one organization, or for an admin of all."""
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            of_all = not request.organization and Scope.ADMIN in reader.scopes
            organization_id = None if of_all else (await visible_or_own(session, reader, request.organization)).id
            found, next_token = await list_alerts(
                session, organization_id=organization_id, page_size=request.page_size or 100, page_token=request.page_token
            )
            return pb.ListAlertsResponse(alerts=map(alert_message, found), next_page_token=next_token)
