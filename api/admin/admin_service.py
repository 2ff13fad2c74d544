"""`AdminService`: its quotas and audit log here; tenants, prices, live requests and configurations in the classes beside it."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1.types_pb2 import QuotaStatus

from api.access.auth import Authenticator
from api.admin.admin_configuration import WEIGHTS, ConfigurationCalls
from api.admin.admin_live import LiveCalls, ReplicaCalls
from api.admin.admin_tenants import AlertWebhookCalls, TenantCalls
from api.admin.admin_terms import PriceCalls, TermCalls
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import effective_quota_statuses, quota_status
from inference.routing.router import Router
from metering.core import audit
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import AuditEntry
from metering.quotas import quota_admin, quota_states
from metering.quotas.quota_rules import QuotaState
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants.tenants import find_api_key, subject_ids


class AdminServicer(TenantCalls, ConfigurationCalls, PriceCalls, TermCalls, ReplicaCalls, AlertWebhookCalls, LiveCalls):
    """See `proto/weir/v1/admin_service.proto`. One call, one transaction."""

    def __init__(
        self,
        router: Router,
        authenticator: Authenticator,
        sessions: Sessions,
        database_url: str,
        signer: Signer | None = None,
        *,
        private_webhooks: bool = False,
    ) -> None:
        """signer: of the receipts of overdue requests, if they are signed. private_webhooks: see `alerts/webhooks.py`."""
        super().__init__(authenticator, sessions, database_url, signer)
        self._router = router
        self._private_webhooks = private_webhooks

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        subjects = {value: subject for subject, value in wire.SUBJECTS.items()}
        dimensions = {value: dimension for dimension, value in wire.DIMENSIONS.items()}
        async with self._transaction(context) as (session, actor):
            if request.subject not in subjects:
                raise InvalidValue("subject", "give an organization, a project or an API key")
            if request.dimension not in dimensions:
                raise InvalidValue("dimension", "give what the quota counts")
            if request.model:
                self._router.check_own_name(request.model)
            state = await quota_admin.set_quota(
                session,
                subject=subjects[request.subject],
                subject_ref=request.subject_ref,
                model=request.model,
                dimension=dimensions[request.dimension],
                limit_value=request.limit_value,
                weights=tuple(wire.given(request, name) for name in WEIGHTS),
                enforced=wire.given(request, "enforced"),
                for_new_keys=request.for_new_keys,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=actor,
            )
            return pb.SetQuotaResponse(quota=await self._status(session, state))

    async def _status(self, session: AsyncSession, state: QuotaState) -> QuotaStatus:
        """One limit, and whether one further up makes it idle."""
        status = quota_status(state)
        narrowed_by = None if state.for_new_keys else await quota_states.narrowed_by(session, state)
        status.narrowed_by_quota_id = "" if narrowed_by is None else str(narrowed_by)
        return status

    async def RaiseQuota(self, request: pb.RaiseQuotaRequest, context: Context) -> pb.RaiseQuotaResponse:
        """Raises a limit for a time, or ends that."""
        until = wire.given_time(request, "expire_time")
        async with self._transaction(context) as (session, actor):
            state = await quota_admin.raise_quota(
                session,
                quota_id=request.quota_id,
                limit_value=request.limit_value,
                until=until,
                reason=request.reason,
                actor=actor,
            )
            return pb.RaiseQuotaResponse(quota=await self._status(session, state))

    async def DeleteQuota(self, request: pb.DeleteQuotaRequest, context: Context) -> pb.DeleteQuotaResponse:
        async with self._transaction(context) as (session, actor):
            try:
                await quota_admin.delete_quota(session, quota_id=request.quota_id, actor=actor)
            except NotFound:
                if not request.allow_missing:
                    raise
                return pb.DeleteQuotaResponse(deleted=False)
            return pb.DeleteQuotaResponse(deleted=True)

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Context) -> pb.ListQuotasResponse:
        async with self._transaction(context) as (session, _):
            if not request.api_key:
                states = await quota_states.list_quotas(session, organization=request.organization or None)
                return pb.ListQuotasResponse(quotas=map(quota_status, states))
            if request.organization:
                raise InvalidValue("organization", "leave it out beside api_key: the limits are all those that the key meets")
            if request.model:
                self._router.check_own_name(request.model)
            key = await find_api_key(session, request.api_key)
            ids = (key.organization_id, key.project_id, key.id)
            states = await quota_states.quotas_for(session, subject_ids=ids, model=request.model or None)
            return pb.ListQuotasResponse(quotas=effective_quota_statuses(states))

    async def ListAuditEntries(self, request: pb.ListAuditEntriesRequest, context: Context) -> pb.ListAuditEntriesResponse:
        start_at = wire.given_time(request, "start_time")
        end_at = wire.given_time(request, "end_time")
        async with self._transaction(context) as (session, _):
            entries = await audit.list_audit_entries(
                session,
                page_size=request.page_size or 100,
                before_entry_id=request.before_entry_id,
                subject_ids=await subject_ids(session, request.subject) if request.subject else None,
                actor=request.actor,
                action_prefix=request.action_prefix,
                start_at=start_at,
                end_at=end_at,
            )
            return pb.ListAuditEntriesResponse(entries=map(audit_message, entries))


def audit_message(entry: AuditEntry) -> pb.AuditEntry:
    values = {"before_json": json_text(entry.before), "after_json": json_text(entry.after)}
    return wire.message_of(pb.AuditEntry, entry, entry_id=entry.id, **values)


def json_text(value: dict[str, Any] | None) -> str:
    """JSON with sorted keys; empty for nothing."""
    return "" if value is None else json.dumps(value, sort_keys=True)
