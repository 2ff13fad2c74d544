"""Quotas: set, override, delete, list."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1.types_pb2 import QuotaStatus

from api.access.servicer import AuthenticatedServicer, removed
from api.admin.configuration_messages import WEIGHTS
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import effective_quota_statuses, quota_status
from inference.routing.router import Router
from metering.core.errors import InvalidValue
from metering.quotas import quota_admin, quota_states
from metering.quotas.quota_rules import QuotaState
from metering.tenants.tenants import find_api_key


class QuotaCalls(AuthenticatedServicer):
    """Calls on quotas."""

    _router: Router

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        subject, dimension = (
            wire.SUBJECTS_BY_NUMBER.get(request.subject),
            wire.DIMENSIONS_BY_NUMBER.get(request.dimension),
        )
        async with self._transaction(context) as (session, actor):
            if subject is None:
                raise InvalidValue("subject", "must be an organization, a project or an API key")
            if dimension is None:
                raise InvalidValue("dimension", "is required: name the dimension of the quota")
            if request.model:
                self._router.check_canonical_name(request.model)
            state = await quota_admin.set_quota(
                session,
                subject=subject,
                subject_ref=request.subject_ref,
                model=request.model,
                dimension=dimension,
                limit_value=request.limit_value,
                weights=tuple(wire.given(request, name) for name in WEIGHTS),
                enforced=wire.given(request, "enforced"),
                for_new_keys=request.for_new_keys,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=actor,
            )
            return pb.SetQuotaResponse(quota=await self._status(session, state))

    async def _status(self, session: AsyncSession, state: QuotaState) -> QuotaStatus:
        """Return a quota, and whether a stricter one at a higher level makes it ineffective."""
        status = quota_status(state)
        narrowed_by = None if state.for_new_keys else await quota_states.narrowed_by(session, state)
        status.narrowed_by_quota_id = "" if narrowed_by is None else str(narrowed_by)
        return status

    async def OverrideQuota(
        self, request: pb.OverrideQuotaRequest, context: Context
    ) -> pb.OverrideQuotaResponse:
        """Set or end a temporary override of a limit."""
        until = wire.given_time(request, "expire_time")
        async with self._transaction(context) as (session, actor):
            state = await quota_admin.override_quota(
                session,
                quota_id=request.quota_id,
                limit_value=request.limit_value,
                until=until,
                reason=request.reason,
                actor=actor,
            )
            return pb.OverrideQuotaResponse(quota=await self._status(session, state))

    async def DeleteQuota(
        self, request: pb.DeleteQuotaRequest, context: Context
    ) -> pb.DeleteQuotaResponse:
        async with self._transaction(context) as (session, actor):
            removal = quota_admin.delete_quota(session, quota_id=request.quota_id, actor=actor)
            return pb.DeleteQuotaResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    async def ListQuotas(
        self, request: pb.ListQuotasRequest, context: Context
    ) -> pb.ListQuotasResponse:
        async with self._transaction(context) as (session, _):
            if not request.api_key:
                states = await quota_states.list_quotas(
                    session, organization=request.organization or None
                )
                return pb.ListQuotasResponse(quotas=map(quota_status, states))
            if request.organization:
                raise InvalidValue(
                    "organization",
                    "must be empty with api_key, which lists all limits of the key",
                )
            if request.model:
                self._router.check_canonical_name(request.model)
            key = await find_api_key(session, request.api_key)
            ids = (key.organization_id, key.project_id, key.id)
            states = await quota_states.quotas_for(
                session, subject_ids=ids, model=request.model or None
            )
            return pb.ListQuotasResponse(quotas=effective_quota_statuses(states))
