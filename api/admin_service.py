"""`AdminService`: organizations, projects, keys, quotas, prices, audit log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import admin_service_pb2_grpc as pb_grpc

from api import wire
from api.auth import Authenticator
from api.interceptor import Context
from inference.router import Router
from metering import audit, prices, quota_admin, tenants
from metering.db import Sessions
from metering.errors import InvalidValue
from metering.models import AuditEntry, Organization, Project

SCOPE = "admin"


class AdminServicer(pb_grpc.AdminServiceServicer):
    """See `proto/weir/v1/admin_service.proto`. One call, one transaction."""

    def __init__(self, router: Router, authenticator: Authenticator, sessions: Sessions) -> None:
        self._router = router
        self._authenticator = authenticator
        self._sessions = sessions

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        """A session that commits at the end of the block, and who acts in it."""
        principal = await self._authenticator.principal(context, SCOPE)
        async with self._sessions.begin() as session:
            yield session, principal.key_prefix

    async def CreateOrganization(self, request: pb.CreateOrganizationRequest, context: Context) -> pb.CreateOrganizationResponse:
        """Creates a customer."""
        async with self._transaction(context) as (session, actor):
            organization = await tenants.create_organization(
                session, name=request.name, currency_code=request.currency_code or "USD", actor=actor
            )
            return pb.CreateOrganizationResponse(organization=organization_message(organization))

    async def ListOrganizations(self, request: pb.ListOrganizationsRequest, context: Context) -> pb.ListOrganizationsResponse:
        """Lists customers."""
        async with self._transaction(context) as (session, _):
            organizations = await tenants.list_organizations(session)
            return pb.ListOrganizationsResponse(organizations=map(organization_message, organizations))

    async def CreateProject(self, request: pb.CreateProjectRequest, context: Context) -> pb.CreateProjectResponse:
        """Creates a project."""
        async with self._transaction(context) as (session, actor):
            project = await tenants.create_project(session, organization=request.organization, name=request.name, actor=actor)
            return pb.CreateProjectResponse(project=project_message(project))

    async def ListProjects(self, request: pb.ListProjectsRequest, context: Context) -> pb.ListProjectsResponse:
        """Lists the projects of a customer."""
        async with self._transaction(context) as (session, _):
            projects = await tenants.list_projects(session, organization=request.organization)
            return pb.ListProjectsResponse(projects=map(project_message, projects))

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Context) -> pb.CreateApiKeyResponse:
        """Creates a key and shows its secret, once."""
        async with self._transaction(context) as (session, actor):
            key, secret = await tenants.create_api_key(
                session,
                organization=request.organization,
                project=request.project,
                name=request.name,
                scopes=tuple(request.scopes) or ("inference",),
                lifetime=wire.parse_duration(request.lifetime, "lifetime") if request.HasField("lifetime") else None,
                actor=actor,
            )
            return pb.CreateApiKeyResponse(api_key=key_message(key), secret=secret)

    async def RevokeApiKey(self, request: pb.RevokeApiKeyRequest, context: Context) -> pb.RevokeApiKeyResponse:
        """Revokes a key."""
        async with self._transaction(context) as (session, actor):
            key = await tenants.revoke_api_key(session, api_key=request.api_key, actor=actor)
            return pb.RevokeApiKeyResponse(api_key=key_message(key))

    async def ListApiKeys(self, request: pb.ListApiKeysRequest, context: Context) -> pb.ListApiKeysResponse:
        """Lists keys."""
        async with self._transaction(context) as (session, _):
            keys = await tenants.list_api_keys(session, organization=request.organization or None)
            return pb.ListApiKeysResponse(api_keys=map(key_message, keys))

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        """Sets a limit."""
        subjects = {value: subject for subject, value in wire.SUBJECTS.items()}
        dimensions = {value: dimension for dimension, value in wire.DIMENSIONS.items()}
        async with self._transaction(context) as (session, actor):
            if request.subject not in subjects:
                raise InvalidValue("subject", "give an organization, a project or an API key")
            if request.dimension not in dimensions:
                raise InvalidValue("dimension", "give what the quota counts")
            if request.model:
                self._router.choose(request.model)
            state = await quota_admin.set_quota(
                session,
                subject=subjects[request.subject],
                subject_ref=request.subject_ref,
                model=request.model,
                dimension=dimensions[request.dimension],
                limit_value=request.limit_value,
                actor=actor,
            )
            return pb.SetQuotaResponse(quota=wire.quota_status(state))

    async def DeleteQuota(self, request: pb.DeleteQuotaRequest, context: Context) -> pb.DeleteQuotaResponse:
        """Removes a limit."""
        async with self._transaction(context) as (session, actor):
            await quota_admin.delete_quota(session, quota_id=request.quota_id, actor=actor)
            return pb.DeleteQuotaResponse()

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Context) -> pb.ListQuotasResponse:
        """Lists limits."""
        async with self._transaction(context) as (session, _):
            states = await quota_admin.list_quotas(session, organization=request.organization or None)
            return pb.ListQuotasResponse(quotas=map(wire.quota_status, states))

    async def SetPrice(self, request: pb.SetPriceRequest, context: Context) -> pb.SetPriceResponse:
        """Adds a price version."""
        async with self._transaction(context) as (session, actor):
            has_time = request.HasField("effective_time")
            price = await prices.set_price(
                session,
                model=request.model,
                currency_code=request.currency_code or "USD",
                input_picos_per_token=request.input_picos_per_token,
                cached_input_picos_per_token=request.cached_input_picos_per_token,
                output_picos_per_token=request.output_picos_per_token,
                effective_at=wire.parse_timestamp(request.effective_time, "effective_time") if has_time else None,
                actor=actor,
            )
            return pb.SetPriceResponse(version=price.prices.version)

    async def ListAuditEntries(self, request: pb.ListAuditEntriesRequest, context: Context) -> pb.ListAuditEntriesResponse:
        """Reads the audit log."""
        async with self._transaction(context) as (session, _):
            entries = await audit.list_audit_entries(
                session, page_size=request.page_size or 100, before_entry_id=request.before_entry_id
            )
            return pb.ListAuditEntriesResponse(entries=map(audit_message, entries))


def organization_message(organization: Organization) -> pb.Organization:
    """A customer."""
    return pb.Organization(
        organization_id=str(organization.id),
        name=organization.name,
        currency_code=organization.currency_code,
        create_time=wire.timestamp(organization.created_at),
    )


def project_message(project: Project) -> pb.Project:
    """A project."""
    return pb.Project(
        project_id=str(project.id),
        organization_id=str(project.organization_id),
        name=project.name,
        create_time=wire.timestamp(project.created_at),
    )


def key_message(key: tenants.KeyRecord) -> pb.ApiKey:
    """A key without its secret."""
    return pb.ApiKey(
        api_key_id=str(key.id),
        project_id=str(key.project_id),
        organization_id=str(key.organization_id),
        name=key.name,
        prefix=key.prefix,
        scopes=sorted(key.scopes),
        create_time=wire.timestamp(key.created_at),
        expire_time=wire.timestamp(key.expires_at),
        revoke_time=wire.timestamp(key.revoked_at),
    )


def audit_message(entry: AuditEntry) -> pb.AuditEntry:
    """One change."""
    return pb.AuditEntry(
        entry_id=entry.id,
        create_time=wire.timestamp(entry.created_at),
        actor=entry.actor,
        action=entry.action,
        subject_id=entry.subject_id,
        before_json=json_text(entry.before),
        after_json=json_text(entry.after),
    )


def json_text(value: dict[str, Any] | None) -> str:
    """JSON with sorted keys; empty for nothing."""
    return "" if value is None else json.dumps(value, sort_keys=True)
