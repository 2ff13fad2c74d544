"""`AdminService`: tenants, keys, quotas, prices, plans, credit, webhooks, audit log,
configurations, and running requests and replicas.

Each RPC requires an admin key and is one transaction; client-made ids make retries safe.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import alerts_pb2 as alert_pb
from weir.v1 import fleet_pb2 as fleet_pb
from weir.v1 import plans_pb2 as plan_pb
from weir.v1 import tokens_pb2 as token_pb

from api.access.auth import Authenticator
from api.access.pages import WHOLE, as_it_is
from api.access.roles import is_operator
from api.access.servicer import (
    AuthenticatedServicer,
    CallerTransaction,
    SharedReads,
    listing,
    once,
    reading,
    removed,
    sessions_of,
)
from api.admin.configuration_calls import ConfigurationCalls, InThread, at_once, json_text
from api.admin.fleet_calls import FleetCalls, version_message
from api.admin.live_calls import (
    CONCERNS_AGE_MAX_S,
    TRAFFIC_AGE_MAX_S,
    VIEWS_APART_S,
    LiveCalls,
    ReplicaCalls,
    TrafficCalls,
)
from api.admin.member_calls import (
    InvitationCalls,
    MemberCalls,
    MemberReads,
    PersonCalls,
    ProvisioningCalls,
    ServiceAccountCalls,
)
from api.admin.price_calls import (
    PlanCalls,
    PriceCalls,
    credit_balance,
    credit_grants,
    plan_lists,
    price_lists,
)
from api.admin.tenant_calls import (
    EndUserCalls,
    QuotaCalls,
    TenantCalls,
    key_message,
    keys,
    organizations,
    projects,
)
from api.admin.token_calls import TokenCalls, issuer_message
from api.core import wire
from api.core.errors import PermissionDenied
from api.core.interceptor import Context
from api.core.messages import alert_message, webhook_message
from api.fleet.running_fleet import RunningFleet
from inference.routing.router import Router
from metering.alerts import webhooks
from metering.alerts.alerts import find_alert
from metering.control import fleet_versions
from metering.core import audit
from metering.core.models import AuditEntry
from metering.core.pages import PAGE_SIZE_MAX, page_values, row_id
from metering.core.pages import page_token as token_of
from metering.invoicing.invoice_document import Issuer
from metering.quotas.quota_preview import Slices
from metering.quotas.quota_states import subject_names
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants.api_keys import subject_ids
from metering.tenants.members import person_id_of
from metering.tenants.token_issuers import list_token_issuers


class WebhookCalls(AuthenticatedServicer):
    """RPCs for webhooks."""

    _private_webhooks: bool

    @once
    async def SetAlertWebhook(
        self, request: alert_pb.SetAlertWebhookRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, alert_pb.SetAlertWebhookResponse]:
        """Create a webhook. Only the first response has its secret; a retry returns it without.

        Where webhooks may reach private networks, only the operator may name a host.
        """
        if self._private_webhooks and not is_operator(acting.principal):
            raise PermissionDenied(
                "This server sends webhooks to private networks too, so only its operator may set"
                " them. Ask the operator to set this one."
            )
        if earlier:
            existing, _ = await webhooks.list_webhooks(acting.session, organization=earlier)
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


async def audit_entries(
    session: AsyncSession,
    *,
    page_size: int,
    page_token: str,
    before_entry_id: int,
    subject: str,
    actor: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    **filters: Any,
) -> tuple[Sequence[tuple[AuditEntry, Mapping[str, str]]], str]:
    """List a page of the audit log about a subject, with the display names of ids in entries."""
    last = [before_entry_id] if before_entry_id else []
    last += page_values(page_token, row_id) if page_token else []
    ids = await subject_ids(session, subject) if subject else None
    person_id = await person_id_of(session, actor) if actor else None
    entries = await audit.list_audit_entries(
        session,
        page_size=page_size + 1,
        before_entry_id=min(last, default=0),
        subject_ids=ids,
        actor=person_id or actor,
        start_at=start_time,
        end_at=end_time,
        **filters,
    )
    named = await with_names(session, entries[:page_size])
    return named, token_of(named[-1][0].id) if len(entries) > page_size else ""


async def with_names(
    session: AsyncSession, entries: Sequence[AuditEntry]
) -> list[tuple[AuditEntry, Mapping[str, str]]]:
    """Return entries with the display names of the ids in them."""
    known = [audit.referred_ids(entry) for entry in entries]
    names = await subject_names(session, set().union(*known))
    return [
        (entry, {str(each): names[each] for each in ids if names.get(each)})
        for entry, ids in zip(entries, known, strict=True)
    ]


def audit_message(named: tuple[AuditEntry, Mapping[str, str]]) -> pb.AuditEntry:
    entry, names = named
    before, after = (json_text(each, sort_keys=True) for each in (entry.before, entry.after))
    return wire.message_of(
        pb.AuditEntry, entry, entry_id=entry.id, before_json=before, after_json=after, names=names
    )


class AdminReads(AuthenticatedServicer):
    """RPCs of `AdminService` that read the database: their queries, and messages of the records."""

    ListOrganizations = listing(
        pb.ListOrganizationsResponse, organizations, as_it_is, page_size=WHOLE
    )
    ListProjects = listing(pb.ListProjectsResponse, projects, as_it_is, page_size=WHOLE)
    ListApiKeys = listing(pb.ListApiKeysResponse, keys, key_message, page_size=WHOLE)
    ListPrices = reading(price_lists)
    ListPlans = reading(plan_lists)
    ListCreditGrants = listing(
        plan_pb.ListCreditGrantsResponse, credit_grants, as_it_is, page_size=WHOLE
    )
    GetCreditBalance = reading(credit_balance)
    ListAlertWebhooks = listing(
        alert_pb.ListAlertWebhooksResponse,
        webhooks.list_webhooks,
        webhook_message,
        page_size=WHOLE,
    )
    ListFleetVersions = listing(
        fleet_pb.ListFleetVersionsResponse, fleet_versions.list_versions, version_message
    )
    ListAuditEntries = listing(pb.ListAuditEntriesResponse, audit_entries, audit_message)
    ListTokenIssuers = listing(
        token_pb.ListTokenIssuersResponse, list_token_issuers, issuer_message, page_size=WHOLE
    )

    async def ExportAuditEntries(
        self, request: pb.ExportAuditEntriesRequest, context: Context
    ) -> pb.ExportAuditEntriesResponse:
        """Read the log after a position, without the lock of changes, as it waits for changes."""
        caller = await self._caller(context)
        async with sessions_of(caller, self._sessions)() as session:
            entries, position = await audit.entries_after(
                session,
                after_entry_id=request.after_entry_id,
                page_size=request.page_size or PAGE_SIZE_MAX,
            )
            shown = map(audit_message, await with_names(session, entries))
            return pb.ExportAuditEntriesResponse(entries=shown, position=position)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses outside of this process that calls name or return.

    `private_webhooks` and `private_issuers` permit URLs in private networks and over plain HTTP.
    `console_url` returns the address of the console, empty if there is none.
    """

    private_webhooks: bool = False
    private_issuers: bool = False
    console_url: Callable[[], str] = str


class AdminServicer(
    TenantCalls,
    EndUserCalls,
    QuotaCalls,
    PriceCalls,
    PlanCalls,
    ConfigurationCalls,
    WebhookCalls,
    LiveCalls,
    ReplicaCalls,
    TrafficCalls,
    FleetCalls,
    InvitationCalls,
    MemberCalls,
    ServiceAccountCalls,
    PersonCalls,
    ProvisioningCalls,
    MemberReads,
    TokenCalls,
    AdminReads,
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
        fleet: RunningFleet,
        in_thread: InThread = at_once,
        addresses: Addresses,
        slices: Slices,
    ) -> None:
        """`signer` signs the receipts of requests that `ExpireOverdueHolds` ends; with None, they
        get no receipt. `issuer` names the fonts with which billing profiles must be printable.

        `fleet` is that of this process, and `slices` those that its requests lease. `in_thread`
        runs the parsing of a document, like `RequestRegistry.in_thread`.
        """
        super().__init__(authenticator, sessions)
        self._router = router
        self._database_url = database_url
        self._signer = signer
        self._issuer = issuer
        self._fleet = fleet
        self._slices = slices
        self._previews = asyncio.Semaphore(1)
        self._in_thread = in_thread
        self._private_webhooks = addresses.private_webhooks
        self._private_issuers = addresses.private_issuers
        self._console_url = addresses.console_url
        self._views = SharedReads(apart_s=VIEWS_APART_S)
        self._traffic = SharedReads(age_max_s=TRAFFIC_AGE_MAX_S)
        self._concerns = SharedReads(age_max_s=CONCERNS_AGE_MAX_S)
