"""`AdminService`: tenants, keys, quotas, prices, plans, credit, webhooks, audit log,
configurations, and running requests and replicas.

Each RPC requires an admin key and is one transaction; client-made ids make retries safe.
"""

from __future__ import annotations

from weir.v1 import admin_service_pb2_grpc as pb_grpc

from api.access.auth import Authenticator
from api.admin.audit_calls import AuditCalls
from api.admin.configuration_calls import ConfigurationCalls, InThread, at_once
from api.admin.live_calls import LiveCalls
from api.admin.plan_calls import PlanCalls
from api.admin.price_calls import PriceCalls
from api.admin.quota_calls import QuotaCalls
from api.admin.replica_calls import ReplicaCalls
from api.admin.tenant_calls import TenantCalls
from api.admin.webhook_calls import WebhookCalls
from inference.routing.router import Router
from metering.invoicing.invoice_document import Issuer
from metering.receipts.signing import Signer
from metering.store.db import Sessions


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
    """Implements `proto/weir/v1/admin_service.proto`; each base has the calls of one subject."""

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
        """signer: signs receipts of overdue requests; may be None. issuer: has the fonts in which
        billing profiles are printed.

        in_thread: runs work on a configuration, see `Process.in_thread`. private_webhooks: see
        `alerts/delivering.py`.
        """
        super().__init__(authenticator, sessions)
        self._router = router
        self._database_url = database_url
        self._signer = signer
        self._issuer = issuer
        self._in_thread = in_thread
        self._private_webhooks = private_webhooks
