"""RPCs for organizations, billing profiles, projects, API keys and quotas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import closures_pb2
from weir.v1.types_pb2 import QuotaStatus

from api.access.pages import read_page
from api.access.permissions import check_may_give, check_permissions
from api.access.roles import is_operator
from api.access.servicer import AuthenticatedServicer, CallerTransaction, once, removed, sessions_of
from api.admin.configuration_calls import quota_key, stated_terms
from api.admin.member_calls import check_rotates, owner_of_new_key
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import effective_quota_statuses, parse_billing_profile, quota_status
from inference.routing.router import Router
from metering import closures
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import (
    Organization,
    Project,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    values_of,
)
from metering.invoicing.documents import check_shown
from metering.invoicing.invoice_document import Issuer
from metering.plans.prepaid import RemainingCredit
from metering.quotas import quota_admin, quota_states
from metering.quotas.erasure import Erasure
from metering.quotas.quota_preview import Slices, preview_quota
from metering.quotas.quota_recount import Uncounted, recount
from metering.quotas.quota_rules import QuotaState
from metering.store.db import database_now, patience, read_one_moment
from metering.tenants import admin_requests, api_keys, suspensions, tenants
from metering.tenants.api_keys import KeyOwner, find_api_key
from metering.tenants.billing_profiles import (
    billing_profiles,
    set_billing_profile,
)
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import KeyTerms
from metering.tenants.networks import excludes
from metering.tenants.queue_weights import (
    DEFAULT_MILLI,
    queue_weights,
    set_queue_weight,
)
from metering.tenants.usage_subjects import (
    checked_end_user,
    checked_label,
)

# Switches of an update that remove a restriction to a list, and the list's name in errors.
ALLOW_ALL = {
    "models": ("all_models", "models"),
    "allowed_networks": ("all_networks", "networks"),
}

PREVIEW_STATEMENT_MAX_S = 120.0  # to sort a million requests by time

# A limit costs three times as much of the event loop as other records: its counters, its window.
QUOTA_CHUNK_ROWS = 30
# Whether the keys of a state have ended; None for those of all states.
KEY_STATES: Mapping[int, bool | None] = {
    pb.API_KEY_STATE_UNSPECIFIED: None,
    pb.API_KEY_STATE_VALID: False,
    pb.API_KEY_STATE_ENDED: True,
}
REMAINING_CREDITS = {
    int(closures_pb2.RemainingCredit.Value(f"REMAINING_CREDIT_{each.name}")): each
    for each in RemainingCredit
}


class TenantCalls(AuthenticatedServicer):
    """RPCs for organizations, billing profiles, projects and API keys."""

    _router: Router
    _issuer: Issuer

    @once
    async def CreateOrganization(
        self, request: pb.CreateOrganizationRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.CreateOrganizationResponse]:
        session, existed = acting.session, bool(earlier)
        if earlier:
            organization = await tenants.find_organization(session, earlier)
        else:
            organization, existed = await admin_requests.ensure_organization(
                session,
                name=request.name,
                currency_code=request.currency_code or "USD",
                allow_existing=request.allow_existing,
                actor=acting.actor,
            )
        return organization.id, pb.CreateOrganizationResponse(
            organization=await described(session, organization), existed=existed
        )

    async def UpdateOrganization(
        self, request: pb.UpdateOrganizationRequest, context: Context
    ) -> pb.UpdateOrganizationResponse:
        async with self._transaction(context) as (session, actor):
            organization = await tenants.rename_organization(
                session, organization=request.organization, name=request.name, actor=actor
            )
            return pb.UpdateOrganizationResponse(
                organization=await described(session, organization)
            )

    async def SuspendOrganization(
        self, request: pb.SuspendOrganizationRequest, context: Context
    ) -> pb.SuspendOrganizationResponse:
        async with self._transaction(context) as (session, actor):
            organization = await suspensions.suspend_organization(
                session, organization=request.organization, reason=request.reason, actor=actor
            )
            return pb.SuspendOrganizationResponse(
                organization=await described(session, organization)
            )

    async def ResumeOrganization(
        self, request: pb.ResumeOrganizationRequest, context: Context
    ) -> pb.ResumeOrganizationResponse:
        async with self._transaction(context) as (session, actor):
            organization = await suspensions.resume_organization(
                session, organization=request.organization, actor=actor
            )
            return pb.ResumeOrganizationResponse(
                organization=await described(session, organization)
            )

    async def CloseOrganization(
        self, request: pb.CloseOrganizationRequest, context: Context
    ) -> pb.CloseOrganizationResponse:
        """Close an organization while no other administrator changes anything."""
        async with self._acting(context, alone=not request.validate_only) as acting:
            session = acting.session
            if (number := request.remaining_credit) and number not in REMAINING_CREDITS:
                raise InvalidValue(
                    "remaining_credit", f"{number} is unknown: refund, expire or keep it"
                )
            if request.validate_only:
                organization = await tenants.find_organization(session, request.organization)
                effects = await closures.effects_on_organization(session, organization)
            else:
                organization, effects = await closures.close_organization(
                    session,
                    organization=request.organization,
                    confirmed_name=request.confirm_name,
                    reason=request.reason,
                    remaining_credit=REMAINING_CREDITS.get(number),
                    actor=acting.actor,
                )
            return pb.CloseOrganizationResponse(
                organization=await described(session, organization),
                effects=wire.message_of(
                    closures_pb2.ClosureEffects, effects, organization.currency_code
                ),
            )

    async def CloseProject(
        self, request: pb.CloseProjectRequest, context: Context
    ) -> pb.CloseProjectResponse:
        """Close a project while no other administrator changes anything."""
        async with self._acting(context, alone=not request.validate_only) as acting:
            session = acting.session
            if request.validate_only:
                project = await tenants.find_project(session, request.project)
                effects = await closures.effects_on_project(session, project)
            else:
                project, effects = await closures.close_project(
                    session,
                    project=request.project,
                    confirmed_name=request.confirm_name,
                    reason=request.reason,
                    actor=acting.actor,
                    by_operator=is_operator(acting.principal),
                )
            return pb.CloseProjectResponse(
                project=await described_project(session, project),
                effects=wire.message_of(closures_pb2.ClosureEffects, effects),
            )

    async def BindOrganization(
        self, request: pb.BindOrganizationRequest, context: Context
    ) -> pb.BindOrganizationResponse:
        async with self._transaction(context) as (session, actor):
            if request.region:
                self._router.check_region(request.region)
            organization = await tenants.bind_organization(
                session, organization=request.organization, region=request.region, actor=actor
            )
            return pb.BindOrganizationResponse(organization=await described(session, organization))

    async def UpdateProject(
        self, request: pb.UpdateProjectRequest, context: Context
    ) -> pb.UpdateProjectResponse:
        async with self._transaction(context) as (session, actor):
            project = await tenants.rename_project(
                session, project=request.project, name=request.name, actor=actor
            )
            return pb.UpdateProjectResponse(project=await described_project(session, project))

    async def SuspendProject(
        self, request: pb.SuspendProjectRequest, context: Context
    ) -> pb.SuspendProjectResponse:
        async with self._acting(context) as acting:
            project = await suspensions.suspend_project(
                acting.session,
                project=request.project,
                reason=request.reason,
                actor=acting.actor,
                by_operator=is_operator(acting.principal),
            )
            return pb.SuspendProjectResponse(
                project=await described_project(acting.session, project)
            )

    async def ResumeProject(
        self, request: pb.ResumeProjectRequest, context: Context
    ) -> pb.ResumeProjectResponse:
        async with self._acting(context) as acting:
            project = await suspensions.resume_project(
                acting.session,
                project=request.project,
                actor=acting.actor,
                by_operator=is_operator(acting.principal),
            )
            return pb.ResumeProjectResponse(
                project=await described_project(acting.session, project)
            )

    async def SetBillingProfile(
        self, request: pb.SetBillingProfileRequest, context: Context
    ) -> pb.SetBillingProfileResponse:
        async with self._transaction(context) as (session, actor):
            organization = await tenants.find_organization(session, request.organization)
            given = parse_billing_profile(request.billing_profile)
            profile = await set_billing_profile(
                session, organization=str(organization.id), profile=given, actor=actor
            )
            await check_shown(profile, self._issuer)
            return pb.SetBillingProfileResponse(organization=await described(session, organization))

    async def SetQueueWeight(
        self, request: pb.SetQueueWeightRequest, context: Context
    ) -> pb.SetQueueWeightResponse:
        async with self._transaction(context) as (session, actor):
            organization = await set_queue_weight(
                session,
                organization=request.organization,
                weight_milli=request.queue_weight_milli,
                actor=actor,
            )
            return pb.SetQueueWeightResponse(organization=await described(session, organization))

    @once
    async def CreateProject(
        self, request: pb.CreateProjectRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.CreateProjectResponse]:
        session, existed = acting.session, bool(earlier)
        if earlier:
            project = await tenants.find_project(session, earlier)
        else:
            project, existed = await admin_requests.ensure_project(
                session,
                organization=request.organization,
                name=request.name,
                allow_existing=request.allow_existing,
                actor=acting.actor,
            )
        described = await described_project(session, project)
        return project.id, pb.CreateProjectResponse(project=described, existed=existed)

    @once
    async def CreateApiKey(
        self, request: pb.CreateApiKeyRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.CreateApiKeyResponse]:
        session, secret, existed = acting.session, "", bool(earlier)
        if earlier:
            key = await api_keys.find_api_key(session, earlier)
        else:
            owner, terms = await owner_of_new_key(acting, request, self._terms(request)(KeyTerms()))
            lifetime = wire.given_duration(request, "lifetime")
            expires_at = None
            if lifetime is not None:
                expires_at = await database_now(session) + api_keys.checked_lifetime(lifetime)
            check_may_give(acting.principal, terms, expires_at)
            key, secret, existed = await admin_requests.ensure_api_key(
                session,
                organization=request.organization,
                project=request.project,
                name=request.name,
                terms=terms,
                lifetime=lifetime,
                owner=owner,
                allow_existing=request.allow_existing,
                actor=acting.actor,
            )
        return key.id, pb.CreateApiKeyResponse(
            api_key=key_message(key), secret=secret, existed=existed
        )

    @once
    async def RotateApiKey(
        self, request: pb.RotateApiKeyRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.RotateApiKeyResponse]:
        """Replace the secret of a key. Only the first response has the secret; a retry has not."""
        overlap, secret = wire.given_duration(request, "overlap"), ""
        if earlier:
            key = await api_keys.find_api_key(acting.session, earlier)
            ends_at = key.overlap_ends_at
        else:
            present = await self._present(acting, request.api_key)
            check_rotates(acting.principal, present)
            check_may_give(acting.principal, present, present.expires_at)
            key, secret, ends_at = await api_keys.rotate_api_key(
                acting.session,
                api_key=request.api_key,
                overlap=api_keys.OVERLAP if overlap is None else overlap,
                actor=acting.actor,
            )
        return key.id, pb.RotateApiKeyResponse(
            api_key=key_message(key), secret=secret, overlap_end_time=wire.timestamp(ends_at)
        )

    async def UpdateApiKey(
        self, request: pb.UpdateApiKeyRequest, context: Context
    ) -> pb.UpdateApiKeyResponse:
        uncounted: list[Uncounted] = []
        async with self._acting(context) as acting:
            present = await self._present(acting, request.api_key)
            check_may_give(acting.principal, present, present.expires_at)
            key = await api_keys.update_api_key(
                acting.session,
                api_key=request.api_key,
                name=wire.given(request, "name"),
                terms=self._terms(request),
                expires_at=wire.given_time(request, "expire_time"),
                never_expires=request.never_expires,
                actor=acting.actor,
                uncounted=uncounted,
            )
            if key.id == acting.principal.api_key_id and excludes(
                key.allowed_networks, acting.principal.address
            ):
                raise InvalidValue(
                    "allowed_networks",
                    f"must include {acting.principal.address}, from which this key makes this call:"
                    " add a network with that address, or use another key",
                )
            check_may_give(acting.principal, key, key.expires_at)
            await recount(acting.session, uncounted)
            return pb.UpdateApiKeyResponse(api_key=key_message(key))

    async def RevokeApiKey(
        self, request: pb.RevokeApiKeyRequest, context: Context
    ) -> pb.RevokeApiKeyResponse:
        async with self._acting(context) as acting:
            check_permissions(acting.principal, await self._present(acting, request.api_key))
            key = await api_keys.revoke_api_key(
                acting.session, api_key=request.api_key, actor=acting.actor
            )
            return pb.RevokeApiKeyResponse(api_key=key_message(key))

    async def _present(self, acting: CallerTransaction, ref: str) -> api_keys.KeyRecord:
        """Look up a key and lock it, so that its terms are those that are changed."""
        found = await api_keys.find_api_key(acting.session, ref)
        await lock_groups(acting.session, found.organization_id)  # before the key, as all changes
        await api_keys.locked_key(acting.session, found.id)
        return await api_keys.find_api_key(acting.session, ref)

    def _terms(
        self, request: pb.CreateApiKeyRequest | pb.UpdateApiKeyRequest
    ) -> Callable[[KeyTerms], KeyTerms]:
        """Read the terms of a request, as a change of present terms. Fields left out stay.

        Raises: InvalidValue, ModelUnknown.
        """
        terms = wire.stated_terms(request, KeyTerms)
        for model in request.models:
            self._router.check_canonical_name(model)
        for name, (everything, shown) in ALLOW_ALL.items():
            if getattr(request, everything, False):
                if name in terms:
                    raise InvalidValue(everything, f"set either {shown} or {everything}, not both")
                terms[name] = ()
        return partial(replace, **terms)


async def organizations(session: AsyncSession, **page: Any) -> tuple[list[pb.Organization], str]:
    """List a page of organizations. Raises: NotFound, InvalidValue."""
    found, following = await tenants.list_organizations(session, **page)
    return await organization_messages(session, found), following


async def described(session: AsyncSession, organization: Organization) -> pb.Organization:
    """Describe an organization, with its billing profile, queue weight, suspension and region."""
    [message] = await organization_messages(session, [organization])
    return message


async def organization_messages(
    session: AsyncSession, found: Sequence[Organization]
) -> list[pb.Organization]:
    ids = [each.id for each in found]
    profiles, weights = await billing_profiles(session, ids), await queue_weights(session, ids)
    suspended = await suspensions.suspensions_of_organizations(session, ids)
    closed = await closures.closures_of(session, suspended.values())
    bound = await tenants.organization_regions(session, ids)
    return [
        wire.message_of(
            pb.Organization,
            each,
            organization_id=each.id,
            billing_profile=profiles.get(each.id),
            queue_weight_milli=weights.get(each.id, DEFAULT_MILLI),
            suspension=None if each.id in closed else suspended.get(each.id),
            closure=closed.get(each.id),
            region=bound.get(each.id, ""),
        )
        for each in found
    ]


async def projects(session: AsyncSession, **page: Any) -> tuple[list[pb.Project], str]:
    """List a page of the projects of an organization. Raises: NotFound, InvalidValue."""
    found, following = await tenants.list_projects(session, **page)
    return await project_messages(session, found), following


async def keys(
    session: AsyncSession, *, state: int, **page: Any
) -> tuple[list[api_keys.KeyRecord], str]:
    """List a page of keys. Raises: NotFound, InvalidValue."""
    if state not in KEY_STATES:
        raise InvalidValue("state", f"{state} is unknown: must be valid or ended, or unset for all")
    return await api_keys.list_api_keys(session, is_ended=KEY_STATES[state], **page)


async def described_project(session: AsyncSession, project: Project) -> pb.Project:
    """Describe a project, with its suspension."""
    [message] = await project_messages(session, [project])
    return message


async def project_messages(session: AsyncSession, found: Sequence[Project]) -> list[pb.Project]:
    suspended = await suspensions.suspensions_of_projects(session, [each.id for each in found])
    closed = await closures.closures_of(session, suspended.values())
    return [
        wire.message_of(
            pb.Project,
            each,
            project_id=each.id,
            suspension=None if each.id in closed else suspended.get(each.id),
            closure=closed.get(each.id),
        )
        for each in found
    ]


def key_message(key: api_keys.KeyRecord) -> pb.ApiKey:
    return wire.message_of(
        pb.ApiKey,
        key,
        api_key_id=key.id,
        expire_time=key.expires_at,
        overlap_end_time=key.overlap_ends_at,
        last_use_time=key.last_used_at,
        use_tracked_since_time=key.uses_tracked_since,
        **{name: str(value or "") for name, value in values_of(KeyOwner, key.owner).items()},
    )


class EndUserCalls(AuthenticatedServicer):
    """RPCs for end users."""

    async def EraseEndUser(
        self, request: pb.EraseEndUserRequest, context: Context
    ) -> pb.EraseEndUserResponse:
        """Erase a name in two steps, so that admissions wait for the short one only."""
        async with self._acting(context, alone=True) as acting:
            name = checked_end_user(request.end_user)
            if not name:
                raise InvalidValue("end_user", "is required: the name that requests gave")
            organization = await tenants.find_organization(acting.session, request.organization)
            erasure = Erasure(organization.id, name, acting.actor)
            erased = await erasure.erase_names(acting.session)
        labelled_request_count = await erasure.erase_labels(self._sessions, erased)
        is_found = erased.subject_count + labelled_request_count > 0
        if not is_found and not request.allow_missing:
            raise NotFound("end user", name)
        return pb.EraseEndUserResponse(
            erased=is_found,
            limit_count=erased.limit_count,
            labelled_request_count=labelled_request_count,
        )


class QuotaCalls(AuthenticatedServicer):
    """RPCs for quotas."""

    _router: Router
    _slices: Slices
    _previews: asyncio.Semaphore

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        async with self._acting(context) as acting:
            subject, key = self._limit(request)
            state = await quota_admin.set_quota(
                acting.session,
                subject=subject,
                subject_ref=request.subject_ref,
                key=replace(key, set_by_organization=not is_operator(acting.principal)),
                terms=partial(replace, **stated_terms(request)),
                actor=acting.actor,
            )
            return pb.SetQuotaResponse(quota=await self._status(acting.session, state))

    async def PreviewQuota(
        self, request: pb.PreviewQuotaRequest, context: Context
    ) -> pb.PreviewQuotaResponse:
        """Replay past requests under a limit, one preview at a time."""
        caller = await self._caller(context)
        subject, key = self._limit(request)
        async with self._previews, sessions_of(caller, self._sessions)() as session:
            await read_one_moment(session, PREVIEW_STATEMENT_MAX_S)
            with patience(PREVIEW_STATEMENT_MAX_S):
                found = await preview_quota(
                    session,
                    subject=subject,
                    subject_ref=request.subject_ref,
                    key=key,
                    terms=QuotaTerms(**stated_terms(request)),
                    slices=self._slices,
                    starts_at=wire.given_time(request, "start_time"),
                    ends_at=wire.given_time(request, "end_time"),
                )
        return wire.message_of(
            pb.PreviewQuotaResponse,
            found,
            start_time=found.starts_at,
            end_time=found.ends_at,
            first_refusal_time=found.first_refused_at,
            days=[wire.message_of(pb.PreviewedDay, each, day=each.name) for each in found.days],
            members=[wire.message_of(pb.PreviewedMember, each) for each in found.members],
        )

    def _limit(
        self, request: pb.SetQuotaRequest | pb.PreviewQuotaRequest
    ) -> tuple[QuotaSubject, QuotaKey]:
        """Read what a limit is set on. Raises: InvalidValue, ModelUnknown."""
        subject, dimension = (
            wire.SUBJECTS_BY_NUMBER.get(request.subject),
            wire.DIMENSIONS_BY_NUMBER.get(request.dimension),
        )
        if subject is None:
            raise InvalidValue("subject", "must be an organization, a project or an API key")
        if dimension is None:
            raise InvalidValue("dimension", "is required: name the dimension of the quota")
        if request.model:
            self._router.check_canonical_name(request.model)
        return subject, quota_key(dimension, request)

    async def _status(self, session: AsyncSession, state: QuotaState) -> QuotaStatus:
        """Convert a quota to a message, with the id of a stricter quota that overrules it."""
        status = quota_status(state)
        narrowed_by = None if state.for_new_keys else await quota_states.narrowed_by(session, state)
        status.narrowed_by_quota_id = "" if narrowed_by is None else str(narrowed_by)
        return status

    async def OverrideQuota(
        self, request: pb.OverrideQuotaRequest, context: Context
    ) -> pb.OverrideQuotaResponse:
        """Set a temporary override of a limit, or end it."""
        async with self._acting(context) as acting:
            until = wire.given_time(request, "expire_time")
            state = await quota_admin.override_quota(
                acting.session,
                quota_id=request.quota_id,
                limit_value=request.limit_value,
                until=until,
                reason=request.reason,
                actor=acting.actor,
                by_organization=not is_operator(acting.principal),
            )
            return pb.OverrideQuotaResponse(quota=await self._status(acting.session, state))

    async def DeleteQuota(
        self, request: pb.DeleteQuotaRequest, context: Context
    ) -> pb.DeleteQuotaResponse:
        async with self._acting(context) as acting:
            removal = quota_admin.delete_quota(
                acting.session,
                quota_id=request.quota_id,
                actor=acting.actor,
                by_organization=not is_operator(acting.principal),
            )
            return pb.DeleteQuotaResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    async def ListQuotas(
        self, request: pb.ListQuotasRequest, context: Context
    ) -> pb.ListQuotasResponse:
        async with self._transaction(context) as (session, _):
            if request.quota_id:
                states = await quota_states.find_quota(session, request.quota_id)
                return pb.ListQuotasResponse(quotas=map(quota_status, states))
            if request.end_user or request.label:
                states = await limits_of_one(session, request)
                return pb.ListQuotasResponse(quotas=map(quota_status, states))
            if not request.api_key:
                quotas, following = await read_page(
                    partial(
                        quota_states.list_quotas, session, organization=request.organization or None
                    ),
                    quota_status,
                    page_size=request.page_size,
                    page_token=request.page_token,
                    chunk_rows=QUOTA_CHUNK_ROWS,
                )
                return pb.ListQuotasResponse(quotas=quotas, next_page_token=following)
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


async def limits_of_one(session: AsyncSession, request: pb.ListQuotasRequest) -> list[QuotaState]:
    """List the limits of one end user or label value. Raises: InvalidValue, NotFound."""
    named = "end_user" if request.end_user else "label"
    if request.end_user and request.label:
        raise InvalidValue("label", "cannot be combined with end_user: leave one of them out")
    if request.api_key:
        raise InvalidValue("api_key", f"cannot be combined with {named}: leave one of them out")
    if not request.organization:
        raise InvalidValue("organization", f"is required with {named}: name the organization")
    if request.end_user:
        checked_end_user(request.end_user)
        return await quota_states.limits_of_member(
            session, organization=request.organization, end_user=request.end_user
        )
    key, value = checked_label(request.label)
    return await quota_states.limits_of_member(
        session, organization=request.organization, labels={key: value}
    )
