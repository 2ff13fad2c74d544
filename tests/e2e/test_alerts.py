"""Webhooks and alerts through the calls of admins and finance."""

from __future__ import annotations

import uuid

from grpc import StatusCode
from weir.v1 import admin_service_pb2_grpc, alerts_pb2, billing_service_pb2_grpc

from tests.service import Service, bearer, refused

URL = "https://hooks.example.com/alerts"


async def test_a_webhook_is_set_tested_and_removed(service: Service) -> None:
    tenant, other = await service.tenant(), await service.tenant()
    _, admin = await service.new_key(tenant, "admin")
    (_, finance), (_, strange) = (
        await service.new_key(tenant, "billing"),
        await service.new_key(other, "billing"),
    )
    mine = {"organization": tenant.name}
    async with service.channel() as channel:
        stub, who = admin_service_pb2_grpc.AdminServiceStub(channel), bearer(admin)
        billing = billing_service_pb2_grpc.BillingServiceStub(channel)
        request = alerts_pb2.SetAlertWebhookRequest(**mine, url=URL, request_id=str(uuid.uuid4()))

        made = await stub.SetAlertWebhook(request, metadata=who)
        again = await stub.SetAlertWebhook(request, metadata=who)
        inside = alerts_pb2.SetAlertWebhookRequest(**mine, url="https://169.254.169.254/latest")
        refusal = await refused(stub.SetAlertWebhook(inside, metadata=who))
        test = await stub.TestAlertWebhook(alerts_pb2.TestAlertWebhookRequest(**mine), metadata=who)
        [listed] = (
            await stub.ListAlertWebhooks(alerts_pb2.ListAlertWebhooksRequest(**mine), metadata=who)
        ).webhooks
        seen = await billing.ListAlerts(alerts_pb2.ListAlertsRequest(), metadata=bearer(finance))
        unseen = await billing.ListAlerts(alerts_pb2.ListAlertsRequest(), metadata=bearer(strange))
        delete = alerts_pb2.DeleteAlertWebhookRequest(**mine, allow_missing=True)
        deleted = [(await stub.DeleteAlertWebhook(delete, metadata=who)).deleted for _ in range(2)]
        without = await refused(
            stub.TestAlertWebhook(alerts_pb2.TestAlertWebhookRequest(**mine), metadata=who)
        )
        after = await billing.ListAlerts(alerts_pb2.ListAlertsRequest(), metadata=bearer(finance))

    assert made.secret.startswith("wh_")
    assert (again.webhook, again.secret) == (made.webhook, "")
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["url"])
    assert (listed.url, listed.pending_count, listed.organization_name) == (URL, 1, tenant.name)
    assert (list(seen.alerts), list(unseen.alerts)) == ([test.alert], [])
    assert test.alert.delivery.state == alerts_pb2.ALERT_DELIVERY_STATE_PENDING
    assert deleted == [True, False]
    assert without.code is StatusCode.NOT_FOUND
    assert after.alerts[0].delivery.state == alerts_pb2.ALERT_DELIVERY_STATE_FAILED
    assert made.secret not in str(service.database.rows("SELECT before, after FROM audit_log"))
