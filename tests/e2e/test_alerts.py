"""Webhooks and alerts through the calls of admins and finance."""

from __future__ import annotations

import uuid

from grpc import StatusCode
from weir.v1 import alerts_pb2

from tests.calls import calls
from tests.service import Service

URL = "https://hooks.example.com/alerts"


async def test_a_webhook_is_set_tested_and_removed(service: Service) -> None:
    tenant, other = await service.tenant(), await service.tenant()
    _, admin = await service.new_key(tenant, "admin")
    (_, finance), (_, strange) = (
        await service.new_key(tenant, "billing"),
        await service.new_key(other, "billing"),
    )
    mine = {"organization": tenant.name}
    async with (
        calls(service, admin) as call,
        calls(service, finance) as billing,
        calls(service, strange) as elsewhere,
    ):
        fields = {**mine, "url": URL, "request_id": str(uuid.uuid4())}
        made, again = [await call("SetAlertWebhook", **fields) for _ in range(2)]
        inside = "https://169.254.169.254/latest"
        refusal = await call.refused("SetAlertWebhook", **mine, url=inside)
        test = await call("TestAlertWebhook", **mine)
        [listed] = (await call("ListAlertWebhooks", **mine)).webhooks
        seen, unseen = await billing("ListAlerts"), await elsewhere("ListAlerts")
        removed = [await call("DeleteAlertWebhook", **mine, allow_missing=True) for _ in range(2)]
        without = await call.refused("TestAlertWebhook", **mine)
        after = await billing("ListAlerts")

    assert made.secret.startswith("wh_")
    assert (again.webhook, again.secret) == (made.webhook, "")
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["url"])
    assert (listed.url, listed.pending_count, listed.organization_name) == (URL, 1, tenant.name)
    assert (list(seen.alerts), list(unseen.alerts)) == ([test.alert], [])
    assert test.alert.delivery.state == alerts_pb2.ALERT_DELIVERY_STATE_PENDING
    assert [each.deleted for each in removed] == [True, False]
    assert without.code is StatusCode.NOT_FOUND
    assert after.alerts[0].delivery.state == alerts_pb2.ALERT_DELIVERY_STATE_FAILED
    assert made.secret not in str(service.database.rows("SELECT before, after FROM audit_log"))
