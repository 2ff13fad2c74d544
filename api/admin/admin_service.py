"""`AdminService`: tenants, keys, quotas and audit log here; prices, live requests and configurations in the modules beside it."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import alerts_pb2 as alert_pb
from weir.v1.types_pb2 import QuotaStatus

from api.access.auth import Authenticator
from api.admin.admin_calls import AdminCalls
from api.admin.admin_configuration import WEIGHTS, ConfigurationCalls, json_text
from api.admin.admin_live import LiveCalls, ReplicaCalls
from api.admin.admin_terms import PriceCalls, TermCalls
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import (
    alert_message,
    billing_profile_message,
    effective_quota_statuses,
    parse_billing_profile,
    quota_status,
    webhook_message,
)
from inference.routing.router import Router
from metering.alerts import delivering as webhooks
from metering.alerts.alerts import find_alert
from metering.core import audit
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import AuditEntry, Organization, Project
from metering.quotas import quota_admin, quota_states
from metering.quotas.quota_rules import QuotaState
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants import admin_requests, tenants
from metering.tenants.billing_profiles import BillingProfile, billing_profile, billing_profiles, set_billing_profile
from metering.tenants.networks import shuts_out
from metering.tenants.tenants import find_api_key, subject_ids


class TenantCalls(AdminCalls):
    """See `proto/weir/v1/admin_service.proto`."""

    _router: Router

    async def CreateOrganization(self, request: pb.CreateOrganizationRequest, context: Context) -> pb.CreateOrganizationResponse:
        async with self._acting(context) as acting:
            existed = True
            if (earlier := await acting.earlier(request)) is not None:
                organization = await tenants.find_organization(acting.session, earlier)
            else:
                fields = {"name": request.name, "currency_code": request.currency_code or "USD", "actor": acting.actor}
                if request.allow_existing:
                    organization, existed = await admin_requests.ensure_organization(acting.session, **fields)
                else:
                    organization, existed = await tenants.create_organization(acting.session, **fields), False
                await acting.made(request, organization.id)
            profile = await billing_profile(acting.session, organization.id)
            return pb.CreateOrganizationResponse(organization=organization_message(organization, profile), existed=existed)

    async def ListOrganizations(self, request: pb.ListOrganizationsRequest, context: Context) -> pb.ListOrganizationsResponse:
        async with self._transaction(context) as (session, _):
            organizations = await tenants.list_organizations(session)
            profiles = await billing_profiles(session)
            return pb.ListOrganizationsResponse(
                organizations=[organization_message(each, profiles.get(each.id)) for each in organizations]
            )

    async def SetBillingProfile(self, request: pb.SetBillingProfileRequest, context: Context) -> pb.SetBillingProfileResponse:
        async with self._transaction(context) as (session, actor):
            organization = await tenants.find_organization(session, request.organization)
            given = parse_billing_profile(request.billing_profile)
            profile = await set_billing_profile(session, organization=str(organization.id), profile=given, actor=actor)
            return pb.SetBillingProfileResponse(organization=organization_message(organization, profile))

    async def CreateProject(self, request: pb.CreateProjectRequest, context: Context) -> pb.CreateProjectResponse:
        async with self._acting(context) as acting:
            existed = True
            if (earlier := await acting.earlier(request)) is not None:
                project = await tenants.find_project(acting.session, earlier)
            else:
                fields = {"organization": request.organization, "name": request.name, "actor": acting.actor}
                if request.allow_existing:
                    project, existed = await admin_requests.ensure_project(acting.session, **fields)
                else:
                    project, existed = await tenants.create_project(acting.session, **fields), False
                await acting.made(request, project.id)
            return pb.CreateProjectResponse(project=project_message(project), existed=existed)

    async def ListProjects(self, request: pb.ListProjectsRequest, context: Context) -> pb.ListProjectsResponse:
        async with self._transaction(context) as (session, _):
            projects = await tenants.list_projects(session, organization=request.organization)
            return pb.ListProjectsResponse(projects=map(project_message, projects))

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Context) -> pb.CreateApiKeyResponse:
        lifetime = wire.given_duration(request, "lifetime")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                key = await tenants.find_api_key(acting.session, earlier)
                return pb.CreateApiKeyResponse(api_key=key_message(key), existed=True)
            fields: dict[str, Any] = {
                "organization": request.organization,
                "project": request.project,
                "name": request.name,
                "scopes": tuple(request.scopes) or ("inference",),
                "models": self._known_models(request.models),
                "allowed_networks": tuple(request.allowed_networks),
                "max_input_tokens": request.max_input_tokens,
                "max_output_tokens": request.max_output_tokens,
                "lifetime": lifetime,
                "actor": acting.actor,
            }
            existed = False
            if request.allow_existing:
                key, secret, existed = await admin_requests.ensure_api_key(acting.session, **fields)
            else:
                key, secret = await tenants.create_api_key(acting.session, **fields)
            await acting.made(request, key.id)
            return pb.CreateApiKeyResponse(api_key=key_message(key), secret=secret, existed=existed)

    async def RotateApiKey(self, request: pb.RotateApiKeyRequest, context: Context) -> pb.RotateApiKeyResponse:
        """Gives a key a new secret and shows it, once."""
        overlap = wire.given_duration(request, "overlap")
        overlap = tenants.OVERLAP if overlap is None else overlap
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                key = await tenants.find_api_key(acting.session, earlier)
                return pb.RotateApiKeyResponse(api_key=key_message(key), overlap_end_time=wire.timestamp(key.overlap_ends_at))
            key, secret, ends_at = await tenants.rotate_api_key(
                acting.session, api_key=request.api_key, overlap=overlap, actor=acting.actor
            )
            await acting.made(request, key.id)
            return pb.RotateApiKeyResponse(api_key=key_message(key), secret=secret, overlap_end_time=wire.timestamp(ends_at))

    async def UpdateApiKey(self, request: pb.UpdateApiKeyRequest, context: Context) -> pb.UpdateApiKeyResponse:
        async with self._acting(context) as acting:
            key = await tenants.update_api_key(
                acting.session,
                api_key=request.api_key,
                name=wire.given(request, "name"),
                scopes=tuple(request.scopes),
                models=self._known_models(request.models),
                all_models=request.all_models,
                allowed_networks=tuple(request.allowed_networks),
                all_networks=request.all_networks,
                max_input_tokens=wire.given(request, "max_input_tokens"),
                max_output_tokens=wire.given(request, "max_output_tokens"),
                expires_at=wire.given_time(request, "expire_time"),
                never_expires=request.never_expires,
                actor=acting.actor,
            )
            if key.id == acting.principal.api_key_id and shuts_out(key.allowed_networks, acting.principal.address):
                wrong = f"this very call is made with this key, from {acting.principal.address}, which it would be shut out from"
                raise InvalidValue("allowed_networks", f"{wrong}: name a network with that address too, or use another key")
            return pb.UpdateApiKeyResponse(api_key=key_message(key))

    async def RevokeApiKey(self, request: pb.RevokeApiKeyRequest, context: Context) -> pb.RevokeApiKeyResponse:
        async with self._transaction(context) as (session, actor):
            key = await tenants.revoke_api_key(session, api_key=request.api_key, actor=actor)
            return pb.RevokeApiKeyResponse(api_key=key_message(key))

    async def ListApiKeys(self, request: pb.ListApiKeysRequest, context: Context) -> pb.ListApiKeysResponse:
        async with self._transaction(context) as (session, _):
            keys = await tenants.list_api_keys(
                session,
                organization=request.organization or None,
                api_key=request.api_key or None,
                unused_for=wire.given_duration(request, "unused_for"),
            )
            return pb.ListApiKeysResponse(api_keys=map(key_message, keys))

    def _known_models(self, models: Sequence[str]) -> tuple[str, ...]:
        """The models that a key is to be limited to. Raises: ModelUnknown."""
        for model in models:
            self._router.check_own_name(model)
        return tuple(models)


def organization_message(organization: Organization, profile: BillingProfile | None) -> pb.Organization:
    addressee = None if profile is None else billing_profile_message(profile)
    return wire.message_of(pb.Organization, organization, organization_id=organization.id, billing_profile=addressee)


def project_message(project: Project) -> pb.Project:
    return wire.message_of(pb.Project, project, project_id=project.id)


def key_message(key: tenants.KeyRecord) -> pb.ApiKey:
    return wire.message_of(
        pb.ApiKey,
        key,
        api_key_id=key.id,
        scopes=sorted(key.scopes),
        models=sorted(key.models),
        expire_time=key.expires_at,
        overlap_end_time=key.overlap_ends_at,
        last_use_time=key.last_used_at,
        use_known_since_time=key.uses_known_since,
        max_input_tokens=key.bounds.max_input_tokens,
        max_output_tokens=key.bounds.max_output_tokens,
    )


class AlertWebhookCalls(AdminCalls):
    """See `proto/weir/v1/alerts.proto`."""

    _private_webhooks: bool

    async def SetAlertWebhook(self, request: alert_pb.SetAlertWebhookRequest, context: Context) -> alert_pb.SetAlertWebhookResponse:
        """Gives an organization a webhook and shows its secret, once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                standing = await webhooks.list_webhooks(acting.session, organization=earlier)
                return alert_pb.SetAlertWebhookResponse(webhook=webhook_message(standing[0]) if standing else None)
            state, secret = await webhooks.set_webhook(
                acting.session,
                organization=request.organization,
                url=request.url,
                private=self._private_webhooks,
                actor=acting.actor,
            )
            await acting.made(request, state.organization.id)
            return alert_pb.SetAlertWebhookResponse(webhook=webhook_message(state), secret=secret)

    async def ListAlertWebhooks(
        self, request: alert_pb.ListAlertWebhooksRequest, context: Context
    ) -> alert_pb.ListAlertWebhooksResponse:
        async with self._transaction(context) as (session, _):
            found = await webhooks.list_webhooks(session, organization=request.organization)
            return alert_pb.ListAlertWebhooksResponse(webhooks=map(webhook_message, found))

    async def DeleteAlertWebhook(
        self, request: alert_pb.DeleteAlertWebhookRequest, context: Context
    ) -> alert_pb.DeleteAlertWebhookResponse:
        async with self._transaction(context) as (session, actor):
            removal = webhooks.remove_webhook(session, organization=request.organization, actor=actor)
            return alert_pb.DeleteAlertWebhookResponse(deleted=await done(removal, allow_missing=request.allow_missing))

    async def TestAlertWebhook(
        self, request: alert_pb.TestAlertWebhookRequest, context: Context
    ) -> alert_pb.TestAlertWebhookResponse:
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                alert_id = uuid.UUID(earlier)
            else:
                alert_id = await webhooks.try_webhook(acting.session, organization=request.organization)
                await acting.made(request, alert_id)
            return alert_pb.TestAlertWebhookResponse(alert=alert_message(await find_alert(acting.session, alert_id)))


async def done(removal: Awaitable[object], *, allow_missing: bool) -> bool:
    """Whether there was anything to remove. Raises: NotFound unless that is allowed."""
    try:
        await removal
    except NotFound:
        if not allow_missing:
            raise
        return False
    return True


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
        """signer: of the receipts of overdue requests, if they are signed. private_webhooks: see `alerts/delivering.py`."""
        super().__init__(authenticator, sessions, database_url, signer)
        self._router = router
        self._private_webhooks = private_webhooks

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        subject, dimension = wire.SUBJECTS_BY_NUMBER.get(request.subject), wire.DIMENSIONS_BY_NUMBER.get(request.dimension)
        async with self._transaction(context) as (session, actor):
            if subject is None:
                raise InvalidValue("subject", "give an organization, a project or an API key")
            if dimension is None:
                raise InvalidValue("dimension", "give what the quota counts")
            if request.model:
                self._router.check_own_name(request.model)
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
            removal = quota_admin.delete_quota(session, quota_id=request.quota_id, actor=actor)
            return pb.DeleteQuotaResponse(deleted=await done(removal, allow_missing=request.allow_missing))

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
    before, after = (json_text(each, sort_keys=True) for each in (entry.before, entry.after))
    return wire.message_of(pb.AuditEntry, entry, entry_id=entry.id, before_json=before, after_json=after)
