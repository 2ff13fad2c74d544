"""Unary calls of the administrators' clients.

Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from weir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    alerts_pb2,
    billing_service_pb2,
    billing_service_pb2_grpc,
    configuration_pb2,
    end_users_pb2,
    fleet_pb2,
    live_requests_pb2,
    members_pb2,
    months_pb2,
    operation_pb2,
    plans_pb2,
    prices_pb2,
    replicas_pb2,
    resale_pb2,
    tokens_pb2,
    usage_reports_pb2,
)

from weir_client import wire
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items
from weir_client.generated_values import (
    AcceptedInvitation,
    Adjustment,
    Alert,
    AlertWebhook,
    ApiKey,
    ApiKeyState,
    AppliedConfiguration,
    AppliedFleet,
    AuditPage,
    BillingProfile,
    ClosedMonth,
    ClosedOrganization,
    ClosedProject,
    Concern,
    CreatedAlertWebhook,
    CreatedApiKey,
    CreatedInvitation,
    CreditBalance,
    CreditGrant,
    DocumentFormat,
    DrainedReplica,
    EndUserLimits,
    ErasedEndUser,
    ErasedPerson,
    FleetVersion,
    Invitation,
    KilledRequest,
    LiveView,
    Member,
    Month,
    MonthReport,
    MonthVerification,
    Organization,
    Person,
    PriceList,
    PriceVersion,
    Project,
    ProvisionedGroup,
    QuotaDimension,
    QuotaPreview,
    QuotaStatus,
    QuotaSubject,
    RecordedRequest,
    RemainingCredit,
    RemovedMember,
    ReplicaList,
    ReplicaRental,
    ResalePrice,
    ResentInvitation,
    RotatedApiKey,
    ServedFleet,
    ServiceAccount,
    TokenIssuer,
    TokenRevocation,
    Traffic,
    TrafficPeriod,
    UndrainedReplica,
    UsageForecast,
)
from weir_client.money import Money
from weir_client.unary import UnaryClient, items_of


class AsyncAdminCalls(UnaryClient):
    """Calls of `AdminService` that need no code of their own."""

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)

    async def create_organization(
        self,
        name: str,
        *,
        currency_code: str = "",
        request_id: str | None = None,
        allow_existing: bool = False,
    ) -> Organization:
        """Creates an organization. AlreadyExists if the name is taken.

        `name`: Unique name: 1 to 63 of a-z, 0-9 and "-", starting with a letter.
        `currency_code`: ISO 4217 code. Default "USD".
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        `allow_existing`: Returns an existing organization of this name and currency instead of
            AlreadyExists.
        """
        request = wire.request(
            admin_service_pb2.CreateOrganizationRequest,
            name=name,
            currency_code=currency_code,
            request_id=request_id or str(uuid.uuid4()),
            allow_existing=allow_existing,
        )
        response = await self._call(self._stub.CreateOrganization, request)
        return wire.read(Organization, response.organization)

    async def update_organization(self, organization: str, name: str) -> Organization:
        """Renames an organization. Its id, keys, limits and bills stay; documents of closed months
        keep the former name. AlreadyExists if the name is taken.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `name`: The new name: see `Organization.name`.
        """
        request = wire.request(
            admin_service_pb2.UpdateOrganizationRequest, organization=organization, name=name
        )
        response = await self._call(self._stub.UpdateOrganization, request)
        return wire.read(Organization, response.organization)

    async def suspend_organization(self, organization: str, reason: str) -> Organization:
        """Suspends an organization: calls of `InferenceService` with its keys are refused, and its
        running requests end in every process as `failed`, with the reason ORGANIZATION_SUSPENDED
        and their final usage. Other calls work. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `reason`: Why: 1 to 200 printable characters. Its callers read it in each refusal.
        """
        request = wire.request(
            admin_service_pb2.SuspendOrganizationRequest, organization=organization, reason=reason
        )
        response = await self._call(self._stub.SuspendOrganization, request)
        return wire.read(Organization, response.organization)

    async def resume_organization(self, organization: str) -> Organization:
        """Ends the suspension of an organization. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        """
        request = wire.request(
            admin_service_pb2.ResumeOrganizationRequest, organization=organization
        )
        response = await self._call(self._stub.ResumeOrganization, request)
        return wire.read(Organization, response.organization)

    async def close_organization(
        self,
        organization: str,
        *,
        confirm_name: str = "",
        reason: str = "",
        remaining_credit: RemainingCredit = RemainingCredit.UNSPECIFIED,
        validate_only: bool = False,
    ) -> ClosedOrganization:
        """Closes an organization for good: all of its keys are revoked, its running requests end in
        every process as `failed` with the reason ORGANIZATION_CLOSED, its rentals end, and nothing
        opens it again. Its months close as always, and all records stay. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound. One with keys of the
            operator cannot be closed.
        `confirm_name`: The name of the organization again, because nothing undoes a closing. Not
            needed with `validate_only`.
        `reason`: Why: 1 to 200 printable characters. Its callers read it in each refusal.
        `remaining_credit`: What happens to the credit that the final month leaves. Required if
            credit remains.
        `validate_only`: Changes nothing, and returns the effects.
        """
        request = wire.request(
            admin_service_pb2.CloseOrganizationRequest,
            organization=organization,
            confirm_name=confirm_name,
            reason=reason,
            remaining_credit=remaining_credit,
            validate_only=validate_only,
        )
        response = await self._call(self._stub.CloseOrganization, request)
        return wire.read(ClosedOrganization, response)

    async def bind_organization(self, organization: str, region: str) -> Organization:
        """Binds an organization to a region of the fleet, or to none. Servers elsewhere refuse the
        calls of its keys as PermissionDenied with the reason BOUND_TO_REGION, and its requests run
        only on engines that are known to be there. Its running requests end in every process with
        that reason and their final usage; after an unbinding they go on. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `region`: A region of the fleet; others: InvalidRequest. Empty: bound to none.
        """
        request = wire.request(
            admin_service_pb2.BindOrganizationRequest, organization=organization, region=region
        )
        response = await self._call(self._stub.BindOrganization, request)
        return wire.read(Organization, response.organization)

    async def _list_organizations_pages(
        self, *, page_size: int = 100, search: str = "", organization: str = ""
    ) -> AsyncIterator[list[Organization]]:
        """Lists organizations by name.

        `page_size`: Number of items per call to the server, 1 to 1000.
        `search`: Only names that begin with this. Empty: all.
        `organization`: Name or id of an organization: only this one. Empty: all. Unknown: NotFound.
        """
        request = wire.request(
            admin_service_pb2.ListOrganizationsRequest,
            page_size=page_size,
            search=search,
            organization=organization,
        )
        async for page in self._pages(self._stub.ListOrganizations, request):
            yield [wire.read(Organization, each) for each in page.organizations]

    list_organizations = items_of(_list_organizations_pages)

    async def set_billing_profile(self, organization: str, profile: BillingProfile) -> Organization:
        """Replaces the billing profile of an organization. Closed months keep the profile of their
        close.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `profile`: The whole profile: empty fields are cleared. Unset: all fields are cleared.
        """
        request = wire.request(
            admin_service_pb2.SetBillingProfileRequest,
            organization=organization,
            billing_profile=profile,
        )
        response = await self._call(self._stub.SetBillingProfile, request)
        return wire.read(Organization, response.organization)

    async def set_queue_weight(self, organization: str, queue_weight_milli: int) -> Organization:
        """Sets how much an organization counts in the fair queue. All api processes apply it within
        a second, to waiting requests too. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `queue_weight_milli`: The weight in thousandths, 10 to 100,000: see
            `Organization.queue_weight_milli`. Other values: InvalidRequest.
        """
        request = wire.request(
            admin_service_pb2.SetQueueWeightRequest,
            organization=organization,
            queue_weight_milli=queue_weight_milli,
        )
        response = await self._call(self._stub.SetQueueWeight, request)
        return wire.read(Organization, response.organization)

    async def create_project(
        self,
        organization: str,
        name: str,
        *,
        request_id: str | None = None,
        allow_existing: bool = False,
    ) -> Project:
        """Creates a project. AlreadyExists if the organization has a project of that name.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `name`: Unique name inside the organization, formed like an organization's.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        `allow_existing`: Returns an existing project of this name instead of AlreadyExists.
        """
        request = wire.request(
            admin_service_pb2.CreateProjectRequest,
            organization=organization,
            name=name,
            request_id=request_id or str(uuid.uuid4()),
            allow_existing=allow_existing,
        )
        response = await self._call(self._stub.CreateProject, request)
        return wire.read(Project, response.project)

    async def update_project(self, project: str, name: str) -> Project:
        """Renames a project. AlreadyExists if its organization has a project of that name.

        `project`: "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
        `name`: The new name: see `Project.name`.
        """
        request = wire.request(admin_service_pb2.UpdateProjectRequest, project=project, name=name)
        response = await self._call(self._stub.UpdateProject, request)
        return wire.read(Project, response.project)

    async def suspend_project(self, project: str, reason: str) -> Project:
        """Suspends a project, as SuspendOrganization does; the reason is PROJECT_SUSPENDED.
        Idempotent. What the operator suspended, others can neither change nor resume:
        InvalidRequest.

        `project`: "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
        `reason`: Why: 1 to 200 printable characters. Its callers read it in each refusal.
        """
        request = wire.request(
            admin_service_pb2.SuspendProjectRequest, project=project, reason=reason
        )
        response = await self._call(self._stub.SuspendProject, request)
        return wire.read(Project, response.project)

    async def resume_project(self, project: str) -> Project:
        """Ends the suspension of a project. Idempotent.

        `project`: "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
        """
        request = wire.request(admin_service_pb2.ResumeProjectRequest, project=project)
        response = await self._call(self._stub.ResumeProject, request)
        return wire.read(Project, response.project)

    async def close_project(
        self, project: str, *, confirm_name: str = "", reason: str = "", validate_only: bool = False
    ) -> ClosedProject:
        """Closes a project for good, as CloseOrganization does; the reason is PROJECT_CLOSED. Its
        usage stays in the months of its organization. Idempotent.

        `project`: "ORGANIZATION/NAME" or id of the project. Unknown: NotFound. One with keys of the
            operator cannot be closed.
        `confirm_name`: The name of the project again, because nothing undoes a closing. Not needed
            with `validate_only`.
        `reason`: Why: 1 to 200 printable characters. Its callers read it in each refusal.
        `validate_only`: Changes nothing, and returns the effects.
        """
        request = wire.request(
            admin_service_pb2.CloseProjectRequest,
            project=project,
            confirm_name=confirm_name,
            reason=reason,
            validate_only=validate_only,
        )
        response = await self._call(self._stub.CloseProject, request)
        return wire.read(ClosedProject, response)

    async def export_audit_entries(
        self, after_entry_id: int = 0, *, page_size: int = 0
    ) -> AuditPage:
        """Reads the audit log after a position, oldest first, for another system. A reader that
        continues with the returned position gets every entry exactly once, even if a change commits
        late.

        `after_entry_id`: The position of an earlier response; 0: from the beginning. Above the
            newest one: InvalidRequest.
        `page_size`: Largest number of entries, 1 to 1000. Default 1000.
        """
        request = wire.request(
            admin_service_pb2.ExportAuditEntriesRequest,
            after_entry_id=after_entry_id,
            page_size=page_size,
        )
        response = await self._call(self._stub.ExportAuditEntries, request)
        return wire.read(AuditPage, response)

    async def _list_projects_pages(
        self, organization: str, *, page_size: int = 100, search: str = ""
    ) -> AsyncIterator[list[Project]]:
        """Lists the projects of an organization by name.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        `search`: Only names that begin with this. Empty: all.
        """
        request = wire.request(
            admin_service_pb2.ListProjectsRequest,
            organization=organization,
            page_size=page_size,
            search=search,
        )
        async for page in self._pages(self._stub.ListProjects, request):
            yield [wire.read(Project, each) for each in page.projects]

    list_projects = items_of(_list_projects_pages)

    async def create_api_key(
        self,
        organization: str,
        project: str,
        name: str,
        *,
        scopes: Sequence[str] = (),
        lifetime: timedelta | None = None,
        request_id: str | None = None,
        allow_existing: bool = False,
        models: Sequence[str] = (),
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        allowed_networks: Sequence[str] = (),
        strict_parameters: bool = False,
        group: str = "",
        role: str = "",
        service_account: str = "",
        own: bool = False,
    ) -> CreatedApiKey:
        """Creates an API key. Its secret is returned only in this response.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `project`: Name or id of the project in it. Unknown: NotFound.
        `name`: Display name, 1 to 100 characters.
        `scopes`: Any of "inference", "admin", "billing", "scim". Empty: "inference", or no scope
            with a `role`.
        `lifetime`: Lifetime. Unset: unlimited. Zero or negative: InvalidRequest.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        `allow_existing`: Returns the project's active key of this name and scopes, if there is one;
            names need not be unique otherwise.
        `models`: Names of the allowed models; a name covers all versions of the model. Empty: all
            models. Unknown: NotFound. Calls for other models get PermissionDenied.
        `max_input_tokens`: Limit of input tokens per request: its prompt, or all texts to embed. 0:
            the model's own limit. A larger request is InvalidRequest with the reason
            KEY_LIMIT_EXCEEDED. 1 to 1,000,000,000, or 0 for no limit.
        `max_output_tokens`: Limit of output tokens per request, all choices together. 0: the
            model's own limit. A request that asks for more is refused in the same way; one without
            a limit of its own ends there with FINISH_REASON_LENGTH. 1 to 1,000,000,000, or 0 for no
            limit.
        `allowed_networks`: Networks that may use the key, such as "203.0.113.0/24" or
            "2001:db8::/32". Empty: all. Calls from other addresses get PermissionDenied with the
            reason ADDRESS_NOT_ALLOWED, and so do running requests from there when the networks are
            narrowed. At most 100 networks or addresses.
        `strict_parameters`: Refuses unknown parameters over HTTP, as `?strict=1` does for one
            request; `?strict=0` does not relax it. False: those that cannot change the answer are
            ignored and named in a header.
        `group`: Group of the key within its organization, such as "free". Limits can be set for
            each key of a group: `SetQuotaRequest.for_each`. Empty: none. At most 100 printable
            characters, without a space at either end.
        `role`: Role of the key in its organization: "owner", "admin", "developer", "finance" or
            "viewer". It permits calls beside those of the scopes. Empty: none. With the scopes
            "admin" or "billing": InvalidRequest. A role or a right that the calling key does not
            have: PermissionDenied with the reason ROLE_EXCEEDED.
        `service_account`: Name or id of the service account that the key belongs to; it has that
            role. Unknown: NotFound.
        `own`: The key belongs to the person who makes this call; it has no role, or that of the
            person. A caller without a person: InvalidRequest.
        """
        request = wire.request(
            admin_service_pb2.CreateApiKeyRequest,
            organization=organization,
            project=project,
            name=name,
            scopes=scopes,
            lifetime=lifetime,
            request_id=request_id,
            allow_existing=allow_existing,
            models=models,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            allowed_networks=allowed_networks,
            strict_parameters=strict_parameters,
            group=group,
            role=role,
            service_account=service_account,
            own=own,
        )
        response = await self._call(self._stub.CreateApiKey, request, idempotent=False)
        return wire.read(CreatedApiKey, response)

    async def rotate_api_key(
        self, api_key: str, *, overlap: timedelta | None = None, request_id: str | None = None
    ) -> RotatedApiKey:
        """Replaces the secret of an API key; the new one is returned only in this response. The old
        secret works for an overlap. Id, prefix, limits and counters stay. FailedPrecondition for a
        revoked key.

        `api_key`: Id or prefix of the key. Unknown: NotFound.
        `overlap`: Remaining validity of the present secret, 0 to 30 days. Unset: 24 hours.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            admin_service_pb2.RotateApiKeyRequest,
            api_key=api_key,
            overlap=overlap,
            request_id=request_id,
        )
        response = await self._call(self._stub.RotateApiKey, request, idempotent=False)
        return wire.read(RotatedApiKey, response)

    async def update_api_key(
        self,
        api_key: str,
        *,
        name: str | None = None,
        scopes: Sequence[str] = (),
        expire_time: datetime | None = None,
        never_expires: bool = False,
        models: Sequence[str] = (),
        all_models: bool = False,
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        allowed_networks: Sequence[str] = (),
        all_networks: bool = False,
        strict_parameters: bool | None = None,
        group: str | None = None,
        role: str | None = None,
    ) -> ApiKey:
        """Changes the name, expiry or permissions of an API key. FailedPrecondition for a revoked
        key.

        `api_key`: Id or prefix of the key. Unknown: NotFound.
        `name`: New name, 1 to 100 characters.
        `scopes`: New scopes. Empty: unchanged.
        `expire_time`: New time of expiry; a time in the past ends the key now.
        `never_expires`: Removes the expiry. With `expire_time`: InvalidRequest.
        `models`: New models. Empty: unchanged. See `CreateApiKeyRequest.models`.
        `all_models`: Allows all models. With `models`: InvalidRequest.
        `max_input_tokens`: New limit, see `CreateApiKeyRequest.max_input_tokens`; 0: none. Running
            requests keep their limit.
        `max_output_tokens`: New limit, see `CreateApiKeyRequest.max_output_tokens`; 0: none.
            Running requests keep their limit.
        `allowed_networks`: New networks. Empty: unchanged. Running requests from other networks end
            in every process as `failed` with the reason ADDRESS_NOT_ALLOWED and their final usage.
            InvalidRequest if this call is made with the key from outside of them.
        `all_networks`: Allows all networks. With `allowed_networks`: InvalidRequest.
        `strict_parameters`: New value, see `ApiKey.strict_parameters`. Unset: unchanged.
        `group`: New group, see `CreateApiKeyRequest.group`; empty: none. Unset: unchanged. The
            limits of the new group count what the key has used in the current windows.
        `role`: New role, see `CreateApiKeyRequest.role`; empty: none. Unset: unchanged.
        """
        request = wire.request(
            admin_service_pb2.UpdateApiKeyRequest,
            api_key=api_key,
            name=name,
            scopes=scopes,
            expire_time=expire_time,
            never_expires=never_expires,
            models=models,
            all_models=all_models,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            allowed_networks=allowed_networks,
            all_networks=all_networks,
            strict_parameters=strict_parameters,
            group=group,
            role=role,
        )
        response = await self._call(self._stub.UpdateApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def revoke_api_key(self, api_key: str) -> ApiKey:
        """Revokes an API key permanently: new calls with it are refused at once, and its running
        requests end in every process as `failed` with the reason KEY_REVOKED and their final usage.
        Idempotent.

        `api_key`: Id or prefix of the key. Unknown: NotFound.
        """
        request = wire.request(admin_service_pb2.RevokeApiKeyRequest, api_key=api_key)
        response = await self._call(self._stub.RevokeApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def _list_api_keys_pages(
        self,
        organization: str = "",
        *,
        api_key: str = "",
        unused_for: timedelta | None = None,
        page_size: int = 100,
        search: str = "",
        state: ApiKeyState = ApiKeyState.UNSPECIFIED,
    ) -> AsyncIterator[list[ApiKey]]:
        """Lists API keys, newest first, without their secrets.

        `organization`: Name or id of an organization; empty: all.
        `api_key`: Id or prefix of a key: only this one. Unknown: NotFound.
        `unused_for`: Only keys that are not revoked and were not used for this long; keys whose
            uses are recorded for less time are left out. Zero or negative: InvalidRequest.
        `page_size`: Number of items per call to the server, 1 to 1000.
        `search`: Only keys whose name or prefix begins with this, in upper or lower case. Empty:
            all.
        `state`: Only keys in this state. Unset: all.
        """
        request = wire.request(
            admin_service_pb2.ListApiKeysRequest,
            organization=organization,
            api_key=api_key,
            unused_for=unused_for,
            page_size=page_size,
            search=search,
            state=state,
        )
        async for page in self._pages(self._stub.ListApiKeys, request):
            yield [wire.read(ApiKey, each) for each in page.api_keys]

    list_api_keys = items_of(_list_api_keys_pages)

    async def set_quota(
        self,
        subject: QuotaSubject,
        subject_ref: str,
        dimension: QuotaDimension,
        limit_value: int,
        *,
        model: str = "",
        for_new_keys: bool = False,
        enforced: bool | None = None,
        input_weight_milli: int | None = None,
        cached_input_weight_milli: int | None = None,
        output_weight_milli: int | None = None,
        alert_at: Sequence[int] | None = None,
        for_each: str = "",
        end_user: str = "",
        label: str = "",
        window_minutes: int = 0,
    ) -> QuotaStatus:
        """Sets one limit; it replaces a limit of the same subject, model and dimension. Past usage
        counts.

        `subject`: Kind of the object that the limit applies to; `subject_ref` names it.
        `subject_ref`: Organization: its name or id. Project: "organization/project" or its id. Key:
            its id or prefix. Unknown: NotFound.
        `dimension`: What the limit counts, and over which window of time.
        `limit_value`: The limit, 0 or more. 0 admits nothing. A limit above an inherited one is
            allowed but has no effect: see `narrowed_by_quota_id`.
        `model`: Limited model; empty: all models together. Unknown: NotFound.
        `for_new_keys`: The limit is a default: each key created under its subject from then on gets
            a copy, and nothing else is limited. Part of the limit's identity. InvalidRequest for a
            key.
        `enforced`: False: shadow mode, counts and reports without refusing. Unset: unchanged; true
            for a new limit.
        `input_weight_milli`: Thousandths that an uncached input token counts, 0 to 1,000,000.
            Unset: unchanged; 1000 for a new limit. InvalidRequest for another value if the
            dimension does not count such tokens. The usage of the current window is recounted.
        `cached_input_weight_milli`: Thousandths that a cached input token counts. Until the engine
            has reported the cached tokens, the larger of both weights is held.
        `output_weight_milli`: Thousandths that an output token counts.
        `alert_at`: Percentages that trigger an alert. Unset: unchanged; for a new limit per day,
            week, month or lifetime 50, 80 and 100, none for any other. InvalidRequest for limits
            per minute or hour, on rolling windows and on concurrency.
        `for_each`: The limit is a selector, "end_user", "label:KEY" or "key:GROUP": each end user,
            each value of this label, or each key of this group within the organization or project
            gets a limit with these terms, from its first request on. Part of the limit's identity.
            InvalidRequest for a key, or with `for_new_keys`, `end_user` or `label`.
        `end_user`: Limits this end user within the organization or project, known or not. This
            limit replaces the one of a selector and keeps its usage. Part of the limit's identity.
            Bad names, a key as subject, or another of these fields: InvalidRequest.
        `label`: Limits the requests with this label, "KEY=VALUE", within the organization or
            project. Like `end_user` in all else.
        `window_minutes`: Length of a rolling window, 1 to 44,640 (31 days), in whole sixtieths of
            full minutes: any number up to 60, an even one up to 120. Part of the limit's identity.
            Required for dimensions of a window; InvalidRequest for any other.
        """
        request = wire.request(
            admin_service_pb2.SetQuotaRequest,
            subject=subject,
            subject_ref=subject_ref,
            dimension=dimension,
            limit_value=limit_value,
            model=model,
            for_new_keys=for_new_keys,
            enforced=enforced,
            input_weight_milli=input_weight_milli,
            cached_input_weight_milli=cached_input_weight_milli,
            output_weight_milli=output_weight_milli,
            alert_at=alert_at,
            for_each=for_each,
            end_user=end_user,
            label=label,
            window_minutes=window_minutes,
        )
        response = await self._call(self._stub.SetQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def preview_quota(
        self,
        subject: QuotaSubject,
        subject_ref: str,
        dimension: QuotaDimension,
        limit_value: int,
        *,
        model: str = "",
        input_weight_milli: int | None = None,
        cached_input_weight_milli: int | None = None,
        output_weight_milli: int | None = None,
        for_each: str = "",
        end_user: str = "",
        label: str = "",
        window_minutes: int = 0,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> QuotaPreview:
        """Returns what a limit would have refused in the past, if it had been set then: the
        recorded requests are admitted again, by the rules of admissions. Changes nothing.

        `subject`: Kind of the object that the limit applies to; `subject_ref` names it.
        `subject_ref`: Organization: its name or id. Project: "organization/project" or its id. Key:
            its id or prefix. Unknown: NotFound.
        `dimension`: What the limit counts, and over which window of time.
        `limit_value`: The limit, 0 or more.
        `model`: Limited model; empty: all models together. Unknown: NotFound.
        `input_weight_milli`: Thousandths that an uncached input token counts. Unset: 1000.
        `cached_input_weight_milli`: Thousandths that a cached input token counts. Unset: 1000.
        `output_weight_milli`: Thousandths that an output token counts. Unset: 1000.
        `for_each`: The limit is a selector, "end_user", "label:KEY" or "key:GROUP": each end user,
            each value of this label, or each key of this group within the organization or project
            gets a limit with these terms, from its first request on. Part of the limit's identity.
            InvalidRequest for a key, or with `for_new_keys`, `end_user` or `label`. For
            "key:GROUP", the keys that are in the group now.
        `end_user`: Only this end user.
        `label`: Only the requests with this label, "KEY=VALUE".
        `window_minutes`: Length of a rolling window in minutes. See
            `SetQuotaRequest.window_minutes`.
        `start_time`: First moment of the preview. Unset: seven days before `end_time`. More than 31
            days before it: InvalidRequest.
        `end_time`: End of the preview. Unset, or in the future: now.
        """
        request = wire.request(
            admin_service_pb2.PreviewQuotaRequest,
            subject=subject,
            subject_ref=subject_ref,
            dimension=dimension,
            limit_value=limit_value,
            model=model,
            input_weight_milli=input_weight_milli,
            cached_input_weight_milli=cached_input_weight_milli,
            output_weight_milli=output_weight_milli,
            for_each=for_each,
            end_user=end_user,
            label=label,
            window_minutes=window_minutes,
            start_time=start_time,
            end_time=end_time,
        )
        response = await self._call(self._stub.PreviewQuota, request)
        return wire.read(QuotaPreview, response)

    async def override_quota(
        self, quota_id: str, limit_value: int, expire_time: datetime, reason: str
    ) -> QuotaStatus:
        """Overrides a limit with a higher one until a time, or ends the override. Idempotent.

        `quota_id`: Id of the limit. Unknown: NotFound. InvalidRequest for one that a selector
            gives: override the selector, or set a limit of this end user or label.
        `limit_value`: The temporary limit, above the regular one: InvalidRequest otherwise.
        `expire_time`: End of the override, within 366 days, by the database's clock. Unset: ends
            the present override.
        `reason`: Reason, 1 to 500 characters; shown with the limit and recorded in the audit log.
        """
        request = wire.request(
            admin_service_pb2.OverrideQuotaRequest,
            quota_id=quota_id,
            limit_value=limit_value,
            expire_time=expire_time,
            reason=reason,
        )
        response = await self._call(self._stub.OverrideQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def set_price(
        self,
        model: str,
        *,
        currency_code: str = "",
        input_picos_per_token: int,
        cached_input_picos_per_token: int,
        output_picos_per_token: int,
        effective_time: datetime | None = None,
        request_id: str | None = None,
        organization: str = "",
        embedding_picos_per_token: int | None = None,
        batch_multiplier_milli: int | None = None,
        reasoning_picos_per_token: int | None = None,
    ) -> list[PriceVersion]:
        """Adds a price version. Past prices never change: InvalidRequest for an effective time in
        the past.

        `model`: The model. Unknown models are allowed, so that a price can be set before a model
            appears.
        `currency_code`: ISO 4217 code. Default: the organization's, or "USD". InvalidRequest for
            another one than the organization's.
        `input_picos_per_token`: Picos per uncached input token, 0 or more.
        `cached_input_picos_per_token`: Picos per cached input token, 0 or more.
        `output_picos_per_token`: Picos per output token, 0 or more.
        `effective_time`: Start of validity. Unset: now.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        `organization`: Name or id of the organization for its own price; empty: the list price.
            Unknown: NotFound.
        `embedding_picos_per_token`: Picos per embedded token, 0 or more. Unset: unchanged; at first
            0.
        `batch_multiplier_milli`: The batch tier's price in thousandths of these prices, 0 to
            1,000,000, set as a second version. Unset: unchanged; at first the same price.
            InvalidRequest, with the nearest valid values, if a price would be a fraction of a pico.
        `reasoning_picos_per_token`: Picos per output token of the model's thinking, 0 or more.
            Unset: as `output_picos_per_token`.
        """
        request = wire.request(
            admin_service_pb2.SetPriceRequest,
            model=model,
            currency_code=currency_code,
            input_picos_per_token=input_picos_per_token,
            cached_input_picos_per_token=cached_input_picos_per_token,
            output_picos_per_token=output_picos_per_token,
            effective_time=effective_time,
            request_id=request_id or str(uuid.uuid4()),
            organization=organization,
            embedding_picos_per_token=embedding_picos_per_token,
            batch_multiplier_milli=batch_multiplier_milli,
            reasoning_picos_per_token=reasoning_picos_per_token,
        )
        response = await self._call(self._stub.SetPrice, request)
        return [wire.read(PriceVersion, each) for each in response.versions]

    async def withdraw_price(
        self,
        organization: str,
        model: str,
        *,
        effective_time: datetime | None = None,
        request_id: str | None = None,
    ) -> list[PriceVersion]:
        """Ends an organization's own price of a model: the list price applies from then on.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `model`: The model. NotFound if the organization has no own price of it at that time.
        `effective_time`: Time from which the list price applies. Unset: now. In the past:
            InvalidRequest.
        `request_id`: Idempotency key, as in `CreateOrganizationRequest`. Not a UUID:
            InvalidRequest.
        """
        request = wire.request(
            prices_pb2.WithdrawPriceRequest,
            organization=organization,
            model=model,
            effective_time=effective_time,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.WithdrawPrice, request)
        return [wire.read(PriceVersion, each) for each in response.versions]

    async def list_prices(
        self,
        organization: str = "",
        *,
        model: str = "",
        currency_code: str = "",
        time: datetime | None = None,
        history: bool = False,
    ) -> PriceList:
        """Lists the prices of an organization, or the list prices, by model and tier, with source
        and start.

        `organization`: Name or id of an organization for its prices. Empty: list prices. Unknown:
            NotFound.
        `model`: Only this model; empty: all.
        `currency_code`: Only in this currency. Empty: the organization's; without an organization
            all.
        `time`: At this time. Unset: now.
        `history`: Returns also all past and future versions.
        """
        request = wire.request(
            prices_pb2.ListPricesRequest,
            organization=organization,
            model=model,
            currency_code=currency_code,
            time=time,
            history=history,
        )
        response = await self._call(self._stub.ListPrices, request)
        return wire.read(PriceList, response)

    async def grant_credit(
        self,
        organization: str,
        amount_picos: int,
        *,
        first_month: str = "",
        last_month: str,
        reason: str,
        request_id: str | None = None,
    ) -> CreditGrant:
        """Grants an organization credit.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `amount_picos`: Amount in picos of the organization's currency, more than 0.
        `first_month`: First month that it covers, as YYYY-MM. Empty: this one.
        `last_month`: Last month that it covers. A past month: InvalidRequest.
        `reason`: Reason, 1 to 500 characters; recorded in the ledger.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            plans_pb2.GrantCreditRequest,
            organization=organization,
            amount_picos=amount_picos,
            first_month=first_month,
            last_month=last_month,
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.GrantCredit, request)
        return wire.read(CreditGrant, response.grant)

    async def _list_credit_grants_pages(
        self, organization: str = "", *, page_size: int = 100
    ) -> AsyncIterator[list[CreditGrant]]:
        """Lists credit grants with their spent and remaining amounts.

        `organization`: Name or id of an organization; empty: all. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            plans_pb2.ListCreditGrantsRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListCreditGrants, request):
            yield [wire.read(CreditGrant, each) for each in page.grants]

    list_credit_grants = items_of(_list_credit_grants_pages)

    async def get_credit_balance(self, organization: str) -> CreditBalance:
        """Returns an organization's current credit.

        `organization`: Name or id of the organization. Unknown: NotFound.
        """
        request = wire.request(plans_pb2.GetCreditBalanceRequest, organization=organization)
        response = await self._call(self._stub.GetCreditBalance, request)
        return wire.read(CreditBalance, response)

    async def set_prepaid(
        self, organization: str, prepaid: bool, *, alert_at: Sequence[int] | None = None
    ) -> bool:
        """Switches an organization to prepaid, limited to its credit, or back.

        `organization`: Name or id of the organization. Unknown: NotFound. With a plan that has
            rules: InvalidRequest.
        `prepaid`: True: requests are admitted only within the credit; beyond it FailedPrecondition,
            reason INSUFFICIENT_CREDIT.
        `alert_at`: Remaining picos of credit that trigger an alert. Unset: unchanged; at first
            none. InvalidRequest if `prepaid` is false.
        """
        request = wire.request(
            plans_pb2.SetPrepaidRequest,
            organization=organization,
            prepaid=prepaid,
            alert_at=alert_at,
        )
        response = await self._call(self._stub.SetPrepaid, request)
        return response.existed

    async def list_live_requests(
        self, organization: str = "", *, page_size: int = 200, stuck_only: bool = False
    ) -> LiveView:
        """Lists the live requests of all processes: owner, phase and usage, never content.

        `organization`: Name or id of an organization; empty: all. Unknown: NotFound.
        `page_size`: Largest number of requests, 1 to 1000. Default 200. Sums cover all requests.
        `stuck_only`: Only holds that are overdue by more than 30 s. Always none while a worker
            runs.
        """
        request = wire.request(
            live_requests_pb2.ListLiveRequestsRequest,
            organization=organization,
            page_size=page_size,
            stuck_only=stuck_only,
        )
        response = await self._call(self._stub.ListLiveRequests, request)
        return wire.read(LiveView, response)

    async def get_request(self, request_id: str, *, project: str = "") -> RecordedRequest:
        """Returns one request of any project by its id: state, usage, cost and timings. NotFound if
        no project has such a request, and for one that ended before any billable work.

        `request_id`: Id chosen by the client. Not a UUID: InvalidRequest.
        `project`: Its project, as "organization/project" or id. Required if several projects have a
            request of this id: InvalidRequest otherwise.
        """
        request = wire.request(
            live_requests_pb2.GetRequestRequest, request_id=request_id, project=project
        )
        response = await self._call(self._stub.GetRequest, request)
        return wire.read(RecordedRequest, response)

    async def kill_request(
        self, request_id: str, *, project: str = "", reason: str = ""
    ) -> KilledRequest:
        """Ends a running request in any process. Its client gets `failed` with the reason
        CANCELLED_BY_ADMIN and its final usage.

        `request_id`: Id chosen by the client. Not a UUID: InvalidRequest. Unknown: NotFound.
        `project`: Its project, as "organization/project" or id. Required if several projects run a
            request of this id: InvalidRequest otherwise.
        `reason`: Reason, for its client and for the audit log; up to 200 printable characters. May
            be empty.
        """
        request = wire.request(
            live_requests_pb2.KillRequestRequest,
            request_id=request_id,
            project=project,
            reason=reason,
        )
        response = await self._call(self._stub.KillRequest, request)
        return wire.read(KilledRequest, response)

    async def expire_overdue_holds(self) -> int:
        """Expires overdue holds, as the worker does every ten seconds."""
        request = wire.request(
            live_requests_pb2.ExpireOverdueHoldsRequest,
        )
        response = await self._call(self._stub.ExpireOverdueHolds, request)
        return response.expired_count

    async def apply_configuration(
        self, configuration: Mapping[str, Any], *, dry_run: bool = False
    ) -> AppliedConfiguration:
        """Applies a configuration of organizations, projects, keys, limits and prices, all or
        nothing. Idempotent.

        `configuration`: Desired state.
        `dry_run`: Returns the changes without applying them.
        """
        request = wire.request(
            configuration_pb2.ApplyConfigurationRequest,
            configuration=configuration,
            dry_run=dry_run,
        )
        response = await self._call(self._stub.ApplyConfiguration, request, idempotent=False)
        return wire.read(AppliedConfiguration, response)

    async def list_replicas(self, model: str = "") -> ReplicaList:
        """Lists the engines of all models, in all processes, and the drain orders.

        `model`: Name of a model, or `name@version`; empty: all. Unknown: NotFound.
        """
        request = wire.request(replicas_pb2.ListReplicasRequest, model=model)
        response = await self._call(self._stub.ListReplicas, request)
        return wire.read(ReplicaList, response)

    async def drain_replica(
        self, model: str, name: str, *, reason: str = "", move_after_s: float | None = None
    ) -> DrainedReplica:
        """Drains a replica in all processes: running requests finish, new ones go elsewhere.
        Idempotent.

        `model`: The model, as `name` or `name@version`. Unknown: NotFound. Several versions have a
            replica of this name: InvalidRequest.
        `name`: Name of the replica, as in `ListReplicas`. No process has it: NotFound.
        `reason`: Reason, for the audit log and lists of replicas; up to 200 printable characters.
        `move_after_s`: Time after the order, 0 to 30 days, when running requests move to other
            replicas: each as soon as one has room, and only those that can continue elsewhere. The
            others run to their end. Unset: all run to their end.
        """
        request = wire.request(
            replicas_pb2.DrainReplicaRequest,
            model=model,
            replica=name,
            reason=reason,
            move_after=move_after_s,
        )
        response = await self._call(self._stub.DrainReplica, request)
        return wire.read(DrainedReplica, response)

    async def undrain_replica(self, model: str, name: str, *, reason: str = "") -> UndrainedReplica:
        """Returns a drained replica to service. Idempotent.

        `model`: The model, as `name` or `name@version`. Unknown: NotFound. Several versions have a
            replica of this name: InvalidRequest.
        `name`: Name of the replica. No process and no order has it: NotFound.
        `reason`: Reason, for the audit log; up to 200 printable characters.
        """
        request = wire.request(
            replicas_pb2.UndrainReplicaRequest, model=model, replica=name, reason=reason
        )
        response = await self._call(self._stub.UndrainReplica, request)
        return wire.read(UndrainedReplica, response)

    async def set_alert_webhook(
        self, organization: str, url: str, *, request_id: str | None = None
    ) -> CreatedAlertWebhook:
        """Posts an organization's alerts to a URL from now on, signed. The secret is returned only
        in this response; setting the same URL again creates a new one.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `url`: URL to post alerts to: https, on a public address, up to 2000 characters;
            InvalidRequest otherwise, unless the operator allows others. Host names are resolved and
            checked at each attempt.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            alerts_pb2.SetAlertWebhookRequest,
            organization=organization,
            url=url,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.SetAlertWebhook, request)
        return wire.read(CreatedAlertWebhook, response)

    async def _list_alert_webhooks_pages(
        self, organization: str = "", *, page_size: int = 100
    ) -> AsyncIterator[list[AlertWebhook]]:
        """Lists webhooks with their pending and failed deliveries.

        `organization`: Name or id of an organization; empty: all. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            alerts_pb2.ListAlertWebhooksRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListAlertWebhooks, request):
            yield [wire.read(AlertWebhook, each) for each in page.webhooks]

    list_alert_webhooks = items_of(_list_alert_webhooks_pages)

    async def delete_alert_webhook(self, organization: str, *, allow_missing: bool = False) -> bool:
        """Removes an organization's webhook. NotFound if it has none.

        `organization`: Name or id of the organization. Unknown, or without a webhook: NotFound.
        `allow_missing`: Succeeds instead of NotFound if the organization has no webhook.
        """
        request = wire.request(
            alerts_pb2.DeleteAlertWebhookRequest,
            organization=organization,
            allow_missing=allow_missing,
        )
        response = await self._call(self._stub.DeleteAlertWebhook, request)
        return response.deleted

    async def test_alert_webhook(
        self, organization: str, *, request_id: str | None = None
    ) -> Alert:
        """Sends a test to an organization's webhook, and ends its pause after failures.

        `organization`: Name or id of the organization. Unknown, or without a webhook: NotFound.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            alerts_pb2.TestAlertWebhookRequest,
            organization=organization,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.TestAlertWebhook, request)
        return wire.read(Alert, response.alert)

    async def erase_end_user(
        self, organization: str, end_user: str, *, allow_missing: bool = False
    ) -> ErasedEndUser:
        """Erases the name of an end user: its limits end, and labels with this value are removed
        from all requests of the organization. Its usage stays in every sum, without a name. Running
        requests continue. A later request with the name is one of a new end user. NotFound if
        nothing has the name. After an interruption, the same call continues.

        `organization`: Organization, by name or id.
        `end_user`: Its name, as requests gave it in `end_user`.
        `allow_missing`: Succeeds instead of NotFound if nothing has the name.
        """
        request = wire.request(
            admin_service_pb2.EraseEndUserRequest,
            organization=organization,
            end_user=end_user,
            allow_missing=allow_missing,
        )
        response = await self._call(self._stub.EraseEndUser, request)
        return wire.read(ErasedEndUser, response)

    async def create_token_issuer(
        self,
        organization: str,
        issuer: str,
        audience: str,
        projects: Sequence[str],
        *,
        algorithms: Sequence[str] = (),
        keys_url: str = "",
        keys: str = "",
        leeway: timedelta | None = None,
        lifetime_max: timedelta | None = None,
        token_type: str = "",
        requires_id: bool = False,
        project_claim: str = "",
        end_user_claim: str = "",
        models_claim: str = "",
        max_output_tokens_claim: str = "",
        label_claims: Sequence[str] = (),
        models: Sequence[str] = (),
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        allowed_networks: Sequence[str] = (),
        group: str = "",
        request_id: str | None = None,
        single_use: bool = False,
    ) -> TokenIssuer:
        """Trusts an issuer: its tokens authenticate callers of an organization from now on.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `issuer`: URL of the issuer, exactly as in the claim `iss`. Https, on a public address,
            unless the operator allows others. AlreadyExists if an issuer is trusted for the
            audience.
        `audience`: Audience that must be in the claim `aud`. 1 to 255 characters.
        `projects`: The project of the organization, by name or id. With a `project_claim`: up to
            50, each after the value of the claim, such as "team-7=search".
        `algorithms`: Accepted algorithms, such as "ES256". Empty: all asymmetric ones. Unknown or
            symmetric: InvalidRequest.
        `keys_url`: URL of the issuer's public keys. Empty, without `keys`: its discovery document
            has it.
        `keys`: Public keys as a JSON Web Key Set. Empty: they are read from the issuer. Up to
            65,536 characters. With `keys_url`: InvalidRequest.
        `leeway`: By how much the clocks of issuer and service may differ. 0 to 300 s. Unset: 30 s.
        `lifetime_max`: Longest life of a token, from `iat` to `exp`. 1 s to 24 hours. Unset: 1
            hour.
        `token_type`: Required header `typ`, such as "at+jwt". Empty: "JWT", "at+jwt" or none.
        `requires_id`: True if tokens without `jti` are refused.
        `project_claim`: Claim that chooses the project. Empty: there is one project.
        `end_user_claim`: Claim that names the end user, such as "sub". Empty: requests name it.
        `models_claim`: Claim with the allowed models, a list or a text with blanks. Empty: those of
            the key.
        `max_output_tokens_claim`: Claim with the output tokens per request. Empty: the key's limit.
        `label_claims`: Claims that become labels of each request. At most 8.
        `models`: Models of the bound keys. Empty: all.
        `max_input_tokens`: Input tokens per request of the bound keys; 0: no limit.
        `max_output_tokens`: Output tokens per request of the bound keys; 0: no limit.
        `allowed_networks`: Networks that the tokens may be used from. Empty: all.
        `group`: Group of the bound keys. Empty: none.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        `single_use`: True if each token is good for one call: the second one is refused, even on
            another server. True implies `requires_id`.
        """
        request = wire.request(
            tokens_pb2.CreateTokenIssuerRequest,
            organization=organization,
            issuer=issuer,
            audience=audience,
            projects=projects,
            algorithms=algorithms,
            keys_url=keys_url,
            keys=keys,
            leeway=leeway,
            lifetime_max=lifetime_max,
            token_type=token_type,
            requires_id=requires_id,
            project_claim=project_claim,
            end_user_claim=end_user_claim,
            models_claim=models_claim,
            max_output_tokens_claim=max_output_tokens_claim,
            label_claims=label_claims,
            models=models,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            allowed_networks=allowed_networks,
            group=group,
            request_id=request_id or str(uuid.uuid4()),
            single_use=single_use,
        )
        response = await self._call(self._stub.CreateTokenIssuer, request)
        return wire.read(TokenIssuer, response.token_issuer)

    async def delete_token_issuer(self, token_issuer: str, *, allow_missing: bool = False) -> bool:
        """Trusts an issuer no more; requests with its tokens end in every process.

        `token_issuer`: Id of the issuer. Unknown: NotFound.
        `allow_missing`: Succeeds instead of NotFound.
        """
        request = wire.request(
            tokens_pb2.DeleteTokenIssuerRequest,
            token_issuer_id=token_issuer,
            allow_missing=allow_missing,
        )
        response = await self._call(self._stub.DeleteTokenIssuer, request)
        return response.deleted

    async def _list_token_issuers_pages(
        self, organization: str = "", *, page_size: int = 100
    ) -> AsyncIterator[list[TokenIssuer]]:
        """Lists trusted issuers.

        `organization`: Name or id of an organization; empty: all. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            tokens_pb2.ListTokenIssuersRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListTokenIssuers, request):
            yield [wire.read(TokenIssuer, each) for each in page.token_issuers]

    list_token_issuers = items_of(_list_token_issuers_pages)

    async def revoke_tokens(self, token_issuer: str, claim: str, value: str) -> TokenRevocation:
        """Revokes a token, or all of a session or subject; their requests end in every process.
        Idempotent.

        `token_issuer`: Id of the issuer. Unknown: NotFound.
        `claim`: The claim that names the tokens: "jti" for one token, "sid" for those of a session,
            "sub" for those of a subject that were issued until now.
        `value`: Its value: 1 to 255 characters.
        """
        request = wire.request(
            tokens_pb2.RevokeTokensRequest, token_issuer_id=token_issuer, claim=claim, value=value
        )
        response = await self._call(self._stub.RevokeTokens, request)
        return wire.read(TokenRevocation, response.revocation)

    async def get_fleet(self, number: int = 0) -> ServedFleet:
        """Returns a version of the fleet, and the version that each process serves.

        `number`: Number; 0: the version in force. Unknown: NotFound.
        """
        request = wire.request(fleet_pb2.GetFleetRequest, number=number)
        response = await self._call(self._stub.GetFleet, request)
        return wire.read(ServedFleet, response)

    async def apply_fleet(
        self,
        document: str = "",
        *,
        base_directory: str = "",
        from_settings: bool = False,
        expected_number: int | None = None,
        dry_run: bool = False,
        reason: str = "",
        request_id: str | None = None,
    ) -> AppliedFleet:
        """Replaces the fleet as a whole, while everything runs: models, versions, weights, targets,
        aliases and regions. A document with errors changes nothing and is answered with them.

        `document`: The whole fleet, as YAML with the keys of a fleet file. `engine_config` cannot
            name a file here.
        `base_directory`: Absolute path, on the machines of the servers, at which relative paths of
            the document start. Empty: the document has absolute paths only. InvalidRequest for a
            relative one.
        `from_settings`: Uses the fleet of the settings of the process that answers instead of
            `document`, which must be empty then: InvalidRequest otherwise.
        `expected_number`: Number of the version that this one is to follow; 0: none is stored.
            InvalidRequest if another one is in force by now. Unset: whichever is in force.
        `dry_run`: Checks the document and returns the changes, but makes none.
        `reason`: Reason, for the audit log and lists of versions; up to 200 printable characters.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            fleet_pb2.ApplyFleetRequest,
            document=document,
            base_directory=base_directory,
            from_settings=from_settings,
            expected_number=expected_number,
            dry_run=dry_run,
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.ApplyFleet, request)
        return wire.read(AppliedFleet, response)

    async def list_fleet_versions(
        self, *, page_size: int = 0, before_number: int = 0
    ) -> list[FleetVersion]:
        """Lists the versions of the fleet, newest first.

        `page_size`: Largest number of versions, 1 to 1000. Default 100.
        `before_number`: Only versions with a smaller number; 0: from the newest.
        """
        request = wire.request(
            fleet_pb2.ListFleetVersionsRequest, page_size=page_size, before_number=before_number
        )
        response = await self._call(self._stub.ListFleetVersions, request)
        return [wire.read(FleetVersion, each) for each in response.versions]

    async def _list_members_pages(
        self, organization: str, *, search: str = "", page_size: int = 100
    ) -> AsyncIterator[list[Member]]:
        """Lists the members of an organization.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `search`: Only addresses that begin with this.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            members_pb2.ListMembersRequest,
            organization=organization,
            search=search,
            page_size=page_size,
        )
        async for page in self._pages(self._stub.ListMembers, request):
            yield [wire.read(Member, each) for each in page.members]

    list_members = items_of(_list_members_pages)

    async def _list_invitations_pages(
        self, organization: str, *, page_size: int = 100
    ) -> AsyncIterator[list[Invitation]]:
        """Lists the invitations of an organization that are neither accepted nor revoked.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            members_pb2.ListInvitationsRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListInvitations, request):
            yield [wire.read(Invitation, each) for each in page.invitations]

    list_invitations = items_of(_list_invitations_pages)

    async def _list_service_accounts_pages(
        self, organization: str, *, page_size: int = 100
    ) -> AsyncIterator[list[ServiceAccount]]:
        """Lists the service accounts of an organization by name.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            members_pb2.ListServiceAccountsRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListServiceAccounts, request):
            yield [wire.read(ServiceAccount, each) for each in page.service_accounts]

    list_service_accounts = items_of(_list_service_accounts_pages)

    async def _list_provisioned_groups_pages(
        self, organization: str, *, page_size: int = 100
    ) -> AsyncIterator[list[ProvisionedGroup]]:
        """Lists the groups that the identity provider of an organization provisions, and the roles
        that are set for groups that do not exist yet.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            members_pb2.ListProvisionedGroupsRequest, organization=organization, page_size=page_size
        )
        async for page in self._pages(self._stub.ListProvisionedGroups, request):
            yield [wire.read(ProvisionedGroup, each) for each in page.groups]

    list_provisioned_groups = items_of(_list_provisioned_groups_pages)

    async def _list_persons_pages(
        self, *, search: str = "", page_size: int = 100
    ) -> AsyncIterator[list[Person]]:
        """Lists the persons of all organizations by e-mail address.

        `search`: Only addresses that begin with this.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(members_pb2.ListPersonsRequest, search=search, page_size=page_size)
        async for page in self._pages(self._stub.ListPersons, request):
            yield [wire.read(Person, each) for each in page.persons]

    list_persons = items_of(_list_persons_pages)

    async def invite_member(
        self,
        organization: str,
        email: str,
        role: str,
        *,
        project: str = "",
        lifetime: timedelta | None = None,
        request_id: str | None = None,
    ) -> CreatedInvitation:
        """Invites a person to an organization, with a token that works once. The token is returned
        only in this response; nothing is sent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `email`: E-mail address. A member, or an address with a pending invitation: AlreadyExists.
        `role`: "owner", "admin", "developer", "finance" or "viewer"; or "operator", of the whole
            service. A role that the caller does not have: PermissionDenied with the reason
            ROLE_EXCEEDED.
        `project`: Name or id of the project of the member. Empty: the oldest project.
        `lifetime`: Lifetime of the token, at most 30 days. Unset: 7 days.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            members_pb2.InviteMemberRequest,
            organization=organization,
            email=email,
            role=role,
            project=project,
            lifetime=lifetime,
            request_id=request_id,
        )
        response = await self._call(self._stub.InviteMember, request, idempotent=False)
        return wire.read(CreatedInvitation, response)

    async def resend_invitation(
        self, invitation_id: str, *, lifetime: timedelta | None = None
    ) -> ResentInvitation:
        """Gives an invitation a new token and a new end. The former token is refused from now on.

        `invitation_id`: Id of the invitation. Unknown, accepted or revoked: NotFound.
        `lifetime`: Lifetime of the new token, at most 30 days. Unset: 7 days.
        """
        request = wire.request(
            members_pb2.ResendInvitationRequest, invitation_id=invitation_id, lifetime=lifetime
        )
        response = await self._call(self._stub.ResendInvitation, request, idempotent=False)
        return wire.read(ResentInvitation, response)

    async def revoke_invitation(self, invitation_id: str, *, allow_missing: bool = False) -> bool:
        """Revokes an invitation: its token is refused from now on. NotFound if there is none.

        `invitation_id`: Id of the invitation. Unknown, accepted or revoked: NotFound.
        `allow_missing`: Succeeds instead of NotFound if there is no such invitation.
        """
        request = wire.request(
            members_pb2.RevokeInvitationRequest,
            invitation_id=invitation_id,
            allow_missing=allow_missing,
        )
        response = await self._call(self._stub.RevokeInvitation, request)
        return response.revoked

    async def accept_invitation(
        self, display_name: str = "", *, create_key: bool = False
    ) -> AcceptedInvitation:
        """Makes the caller a member. The bearer token of the call is that of the invitation:
        unknown, used, revoked or expired, UNAUTHENTICATED with the reason INVITATION_INVALID.

        `display_name`: Name of the person, at most 100 characters. Empty: the part of the address
            before the "@". The name of a member of another organization stays.
        `create_key`: Also creates a key with a secret, of the same role, which belongs to the
            person.
        """
        request = wire.request(
            members_pb2.AcceptInvitationRequest, display_name=display_name, create_key=create_key
        )
        response = await self._call(self._stub.AcceptInvitation, request, idempotent=False)
        return wire.read(AcceptedInvitation, response)

    async def update_member(self, organization: str, member: str, role: str) -> Member:
        """Gives a member another role, at once on every server. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `member`: The member, by e-mail address or id of the person. Unknown: NotFound.
        `role`: The new role: see `Member.role`. More than the caller has: PermissionDenied with the
            reason ROLE_EXCEEDED. Another one than owner for the last owner: FailedPrecondition,
            LAST_OWNER.
        """
        request = wire.request(
            members_pb2.UpdateMemberRequest, organization=organization, member=member, role=role
        )
        response = await self._call(self._stub.UpdateMember, request)
        return wire.read(Member, response.member)

    async def remove_member(
        self, organization: str, member: str, *, revoke_keys: bool | None = None
    ) -> RemovedMember:
        """Removes a member, and revokes the keys that belong to the person. NotFound if there is
        none.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `member`: The member, by e-mail address or id of the person. Unknown: NotFound. The last
            owner: FailedPrecondition, LAST_OWNER.
        `revoke_keys`: Whether to revoke the active keys that the person created for others than
            itself. Unset while there are any: InvalidRequest, which lists them. The person's own
            keys are always revoked.
        """
        request = wire.request(
            members_pb2.RemoveMemberRequest,
            organization=organization,
            member=member,
            revoke_keys=revoke_keys,
        )
        response = await self._call(self._stub.RemoveMember, request)
        return wire.read(RemovedMember, response)

    async def create_service_account(
        self, organization: str, name: str, *, role: str = "", request_id: str | None = None
    ) -> ServiceAccount:
        """Creates a service account: an owner of keys that no person's leave ends.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `name`: Name, 1 to 100 characters. Taken: AlreadyExists.
        `role`: Role of its keys: see `ApiKey.role`. Empty: its keys are for models. More than the
            caller has: PermissionDenied, ROLE_EXCEEDED.
        `request_id`: Idempotency key: see the service. Not a UUID: InvalidRequest.
        """
        request = wire.request(
            members_pb2.CreateServiceAccountRequest,
            organization=organization,
            name=name,
            role=role,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.CreateServiceAccount, request)
        return wire.read(ServiceAccount, response.service_account)

    async def update_service_account(
        self, organization: str, service_account: str, role: str
    ) -> ServiceAccount:
        """Gives a service account, and its keys, another role. Idempotent.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `service_account`: The service account, by name or id. Unknown: NotFound.
        `role`: The new role: see `ServiceAccount.role`.
        """
        request = wire.request(
            members_pb2.UpdateServiceAccountRequest,
            organization=organization,
            service_account=service_account,
            role=role,
        )
        response = await self._call(self._stub.UpdateServiceAccount, request)
        return wire.read(ServiceAccount, response.service_account)

    async def delete_service_account(
        self, organization: str, service_account: str, *, allow_missing: bool = False
    ) -> bool:
        """Deletes a service account and revokes its keys. NotFound if there is none.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `service_account`: The service account, by name or id. Unknown: NotFound.
        `allow_missing`: Succeeds instead of NotFound if there is no such service account.
        """
        request = wire.request(
            members_pb2.DeleteServiceAccountRequest,
            organization=organization,
            service_account=service_account,
            allow_missing=allow_missing,
        )
        response = await self._call(self._stub.DeleteServiceAccount, request)
        return response.deleted

    async def update_person(self, person: str, display_name: str) -> Person:
        """Changes the name of a person. Idempotent.

        `person`: The person, by e-mail address or id. Unknown: NotFound.
        `display_name`: New name, 1 to 100 characters.
        """
        request = wire.request(
            members_pb2.UpdatePersonRequest, person=person, display_name=display_name
        )
        response = await self._call(self._stub.UpdatePerson, request)
        return wire.read(Person, response.person)

    async def deactivate_person(self, person: str) -> Person:
        """Refuses all keys of a person in every organization from now on, and ends its running
        requests. Keys of service accounts go on. Idempotent.

        `person`: The person, by e-mail address or id. Unknown: NotFound. The last owner of an
            organization: FailedPrecondition, LAST_OWNER.
        """
        request = wire.request(members_pb2.DeactivatePersonRequest, person=person)
        response = await self._call(self._stub.DeactivatePerson, request)
        return wire.read(Person, response.person)

    async def reactivate_person(self, person: str) -> Person:
        """Accepts the keys of a deactivated person again, as they were. Idempotent.

        `person`: The person, by e-mail address or id. Unknown: NotFound.
        """
        request = wire.request(members_pb2.ReactivatePersonRequest, person=person)
        response = await self._call(self._stub.ReactivatePerson, request)
        return wire.read(Person, response.person)

    async def create_sign_in_link(self, person: str, *, lifetime: timedelta | None = None) -> str:
        """Creates a link with which a person signs in to the console, once. Its opener is the
        person for this server: send it by a safe way. The link is returned only in this response.

        `person`: The person, by e-mail address or id. Unknown: NotFound. Deactivated:
            InvalidRequest.
        `lifetime`: How long the link works: more than zero, at most a day. Default: 15 minutes.
        """
        request = wire.request(
            members_pb2.CreateSignInLinkRequest, person=person, lifetime=lifetime
        )
        response = await self._call(self._stub.CreateSignInLink, request, idempotent=False)
        return response.url

    async def erase_person(self, person: str, *, dry_run: bool = False) -> ErasedPerson:
        """Erases a person: name, address, identity and sessions, in all organizations. Its
        memberships and keys end; keys that it made for programs stay. Usage, bills and audit log
        keep its acts, under its id. An erasure cannot be undone. Idempotent.

        `person`: The person, by e-mail address or id. Unknown: NotFound. The last owner of an
            organization: FailedPrecondition, LAST_OWNER.
        `dry_run`: Erases nothing, and returns what would be erased.
        """
        request = wire.request(members_pb2.ErasePersonRequest, person=person, dry_run=dry_run)
        response = await self._call(self._stub.ErasePerson, request)
        return wire.read(ErasedPerson, response)

    async def set_group_role(
        self, organization: str, group: str, role: str, *, project: str = ""
    ) -> ProvisionedGroup:
        """Lets the group with a name give its members a role in the organization, or none. It
        applies at once, and to the members that the identity provider adds and removes later.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `group`: Name of the group, 1 to 255 characters. It need not be provisioned yet.
        `role`: "owner", "admin", "developer", "finance" or "viewer". Empty: none. If a person is in
            several groups, the first of them in this order counts. A change that leaves no owner:
            FailedPrecondition, LAST_OWNER.
        `project`: Name or id of the project of the members; a developer has access to no other.
            Empty: the oldest project.
        """
        request = wire.request(
            members_pb2.SetGroupRoleRequest,
            organization=organization,
            group=group,
            role=role,
            project=project,
        )
        response = await self._call(self._stub.SetGroupRole, request)
        return wire.read(ProvisionedGroup, response.group)

    async def get_traffic(self, period: TrafficPeriod = TrafficPeriod.UNSPECIFIED) -> Traffic:
        """Returns requests, tokens, latencies and queues of all models over time, for charts. All
        api processes are in it. Readers of one process share a report, so that many open pages cost
        one.

        `period`: The period. Not listed: InvalidRequest.
        """
        request = wire.request(operation_pb2.GetTrafficRequest, period=period)
        response = await self._call(self._stub.GetTraffic, request)
        return wire.read(Traffic, response)

    async def list_concerns(self) -> list[Concern]:
        """Lists what an operator should look at: usage that is not billed, months to close, and
        more.
        """
        request = wire.request(
            operation_pb2.ListConcernsRequest,
        )
        response = await self._call(self._stub.ListConcerns, request)
        return [wire.read(Concern, each) for each in response.concerns]


class BlockingAdminCalls(BlockingUnaryClient):
    """Blocking twins of `AsyncAdminCalls`."""

    create_organization = blocking(AsyncAdminCalls.create_organization)
    update_organization = blocking(AsyncAdminCalls.update_organization)
    suspend_organization = blocking(AsyncAdminCalls.suspend_organization)
    resume_organization = blocking(AsyncAdminCalls.resume_organization)
    close_organization = blocking(AsyncAdminCalls.close_organization)
    bind_organization = blocking(AsyncAdminCalls.bind_organization)
    list_organizations = blocking_items(AsyncAdminCalls._list_organizations_pages)
    set_billing_profile = blocking(AsyncAdminCalls.set_billing_profile)
    set_queue_weight = blocking(AsyncAdminCalls.set_queue_weight)
    create_project = blocking(AsyncAdminCalls.create_project)
    update_project = blocking(AsyncAdminCalls.update_project)
    suspend_project = blocking(AsyncAdminCalls.suspend_project)
    resume_project = blocking(AsyncAdminCalls.resume_project)
    close_project = blocking(AsyncAdminCalls.close_project)
    export_audit_entries = blocking(AsyncAdminCalls.export_audit_entries)
    list_projects = blocking_items(AsyncAdminCalls._list_projects_pages)
    create_api_key = blocking(AsyncAdminCalls.create_api_key)
    rotate_api_key = blocking(AsyncAdminCalls.rotate_api_key)
    update_api_key = blocking(AsyncAdminCalls.update_api_key)
    revoke_api_key = blocking(AsyncAdminCalls.revoke_api_key)
    list_api_keys = blocking_items(AsyncAdminCalls._list_api_keys_pages)
    set_quota = blocking(AsyncAdminCalls.set_quota)
    preview_quota = blocking(AsyncAdminCalls.preview_quota)
    override_quota = blocking(AsyncAdminCalls.override_quota)
    set_price = blocking(AsyncAdminCalls.set_price)
    withdraw_price = blocking(AsyncAdminCalls.withdraw_price)
    list_prices = blocking(AsyncAdminCalls.list_prices)
    grant_credit = blocking(AsyncAdminCalls.grant_credit)
    list_credit_grants = blocking_items(AsyncAdminCalls._list_credit_grants_pages)
    get_credit_balance = blocking(AsyncAdminCalls.get_credit_balance)
    set_prepaid = blocking(AsyncAdminCalls.set_prepaid)
    list_live_requests = blocking(AsyncAdminCalls.list_live_requests)
    get_request = blocking(AsyncAdminCalls.get_request)
    kill_request = blocking(AsyncAdminCalls.kill_request)
    expire_overdue_holds = blocking(AsyncAdminCalls.expire_overdue_holds)
    apply_configuration = blocking(AsyncAdminCalls.apply_configuration)
    list_replicas = blocking(AsyncAdminCalls.list_replicas)
    drain_replica = blocking(AsyncAdminCalls.drain_replica)
    undrain_replica = blocking(AsyncAdminCalls.undrain_replica)
    set_alert_webhook = blocking(AsyncAdminCalls.set_alert_webhook)
    list_alert_webhooks = blocking_items(AsyncAdminCalls._list_alert_webhooks_pages)
    delete_alert_webhook = blocking(AsyncAdminCalls.delete_alert_webhook)
    test_alert_webhook = blocking(AsyncAdminCalls.test_alert_webhook)
    erase_end_user = blocking(AsyncAdminCalls.erase_end_user)
    create_token_issuer = blocking(AsyncAdminCalls.create_token_issuer)
    delete_token_issuer = blocking(AsyncAdminCalls.delete_token_issuer)
    list_token_issuers = blocking_items(AsyncAdminCalls._list_token_issuers_pages)
    revoke_tokens = blocking(AsyncAdminCalls.revoke_tokens)
    get_fleet = blocking(AsyncAdminCalls.get_fleet)
    apply_fleet = blocking(AsyncAdminCalls.apply_fleet)
    list_fleet_versions = blocking(AsyncAdminCalls.list_fleet_versions)
    list_members = blocking_items(AsyncAdminCalls._list_members_pages)
    list_invitations = blocking_items(AsyncAdminCalls._list_invitations_pages)
    list_service_accounts = blocking_items(AsyncAdminCalls._list_service_accounts_pages)
    list_provisioned_groups = blocking_items(AsyncAdminCalls._list_provisioned_groups_pages)
    list_persons = blocking_items(AsyncAdminCalls._list_persons_pages)
    invite_member = blocking(AsyncAdminCalls.invite_member)
    resend_invitation = blocking(AsyncAdminCalls.resend_invitation)
    revoke_invitation = blocking(AsyncAdminCalls.revoke_invitation)
    accept_invitation = blocking(AsyncAdminCalls.accept_invitation)
    update_member = blocking(AsyncAdminCalls.update_member)
    remove_member = blocking(AsyncAdminCalls.remove_member)
    create_service_account = blocking(AsyncAdminCalls.create_service_account)
    update_service_account = blocking(AsyncAdminCalls.update_service_account)
    delete_service_account = blocking(AsyncAdminCalls.delete_service_account)
    update_person = blocking(AsyncAdminCalls.update_person)
    deactivate_person = blocking(AsyncAdminCalls.deactivate_person)
    reactivate_person = blocking(AsyncAdminCalls.reactivate_person)
    create_sign_in_link = blocking(AsyncAdminCalls.create_sign_in_link)
    erase_person = blocking(AsyncAdminCalls.erase_person)
    set_group_role = blocking(AsyncAdminCalls.set_group_role)
    get_traffic = blocking(AsyncAdminCalls.get_traffic)
    list_concerns = blocking(AsyncAdminCalls.list_concerns)


class AsyncBillingCalls(UnaryClient):
    """Calls of `BillingService` that need no code of their own."""

    @property
    def _stub(self) -> billing_service_pb2_grpc.BillingServiceAsyncStub:
        return billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)

    async def get_month_report(self, organization: str, month: str) -> MonthReport:
        """Returns the report of one calendar month (UTC) of one organization from the ledger.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `month`: The month as YYYY-MM. Malformed: InvalidRequest.
        """
        request = wire.request(
            billing_service_pb2.GetMonthReportRequest, organization=organization, month=month
        )
        response = await self._call(self._stub.GetMonthReport, request)
        return wire.read(MonthReport, response)

    async def get_month_document(
        self, organization: str, month: str, document_format: DocumentFormat
    ) -> bytes:
        """Returns the report of a month as a document. For a closed month the bytes never change.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `month`: The month as YYYY-MM. Malformed: InvalidRequest.
        `document_format`: File format.
        """
        request = wire.request(
            months_pb2.GetMonthDocumentRequest,
            organization=organization,
            month=month,
            format=document_format,
        )
        response = await self._call(self._stub.GetMonthDocument, request)
        return response.content

    async def list_months(self, organization: str) -> list[Month]:
        """Lists the months of an organization, the latest first, with state, author and invoice.

        `organization`: Name or id of the organization. Unknown: NotFound.
        """
        request = wire.request(months_pb2.ListMonthsRequest, organization=organization)
        response = await self._call(self._stub.ListMonths, request)
        return [wire.read(Month, each) for each in response.months]

    async def close_month(
        self,
        organization: str,
        month: str,
        *,
        leave_running: bool = False,
        validate_only: bool = False,
        before_first: bool = False,
        corrected_by: str = "",
    ) -> ClosedMonth:
        """Closes a month permanently and issues its invoice. Obstacles: FailedPrecondition with a
        PreconditionFailure, one violation each. Idempotent. Scope `admin`.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `month`: The month as YYYY-MM. Malformed: InvalidRequest.
        `leave_running`: Closes even while requests admitted in the month still run; they are billed
            in the month of their end.
        `validate_only`: Only returns the obstacles, and changes nothing.
        `before_first`: Closes even before the customer's first month: months are closed in order,
            so the empty months between must then be closed as well. Otherwise such a month is
            refused as MONTH_BEFORE_FIRST.
        `corrected_by`: Id of an approved adjustment of exactly the cost of the usage reported as
            USAGE_MISSTATED: that usage is billed by the adjustment, and never rated. With an
            adjustment that does not match, the obstacle remains and has the reason.
        """
        request = wire.request(
            months_pb2.CloseMonthRequest,
            organization=organization,
            month=month,
            leave_running=leave_running,
            validate_only=validate_only,
            before_first=before_first,
            correcting_adjustment_id=corrected_by,
        )
        response = await self._call(self._stub.CloseMonth, request)
        return wire.read(ClosedMonth, response)

    async def verify_month(self, organization: str, month: str) -> MonthVerification:
        """Recomputes the report of a closed month from the ledger, and compares it with the digests
        of its close.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `month`: The month as YYYY-MM. Not closed: FailedPrecondition.
        """
        request = wire.request(
            months_pb2.VerifyMonthRequest, organization=organization, month=month
        )
        response = await self._call(self._stub.VerifyMonth, request)
        return wire.read(MonthVerification, response)

    async def create_adjustment(
        self, organization: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Proposes an amount for the next invoice; a person with another key must approve it. Scope
        `admin`.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `amount`: Positive: charged to the customer; negative: credited. The currency may be
            omitted; another currency than the organization's is InvalidRequest. Zero is
            InvalidRequest unless the customer has misstated usage, whose tokens may cost nothing
            (CloseMonthRequest.correcting_adjustment_id).
        `reason`: Reason, 1 to 200 characters, shown to the customer. Empty: InvalidRequest.
        `request_id`: Idempotency key, a UUID: repeating the call returns the same adjustment.
            Empty: each call proposes another one.
        """
        request = wire.request(
            months_pb2.CreateAdjustmentRequest,
            organization=organization,
            amount=amount,
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.CreateAdjustment, request)
        return wire.read(Adjustment, response.adjustment)

    async def create_credit_note(
        self, invoice_number: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Proposes a partial refund of an invoice; a person with another key must approve it. Scope
        `admin`.

        `invoice_number`: Number of the invoice. Unknown: NotFound.
        `amount`: Refunded amount: above zero, in whole minor units, together with earlier credit
            notes at most the invoice. The currency may be omitted. InvalidRequest otherwise.
        `reason`: Reason, 1 to 200 characters, shown to the customer. Empty: InvalidRequest.
        `request_id`: As in `CreateAdjustmentRequest`.
        """
        request = wire.request(
            months_pb2.CreateCreditNoteRequest,
            invoice_number=invoice_number,
            amount=amount,
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.CreateCreditNote, request)
        return wire.read(Adjustment, response.credit_note)

    async def approve_adjustment(self, adjustment_id: str) -> Adjustment:
        """Approves an adjustment or a credit note, and posts it to the first month that is not
        closed. By its author: FailedPrecondition. Scope `admin`.

        `adjustment_id`: Id of the adjustment. Unknown: NotFound. Already rejected:
            FailedPrecondition. Already approved by the same key: same response.
        """
        request = wire.request(months_pb2.ApproveAdjustmentRequest, adjustment_id=adjustment_id)
        response = await self._call(self._stub.ApproveAdjustment, request)
        return wire.read(Adjustment, response.adjustment)

    async def reject_adjustment(self, adjustment_id: str) -> Adjustment:
        """Rejects an adjustment or a credit note; its author may do so too. Scope `admin`.

        `adjustment_id`: Id of the adjustment. Unknown: NotFound. Already approved:
            FailedPrecondition.
        """
        request = wire.request(months_pb2.RejectAdjustmentRequest, adjustment_id=adjustment_id)
        response = await self._call(self._stub.RejectAdjustment, request)
        return wire.read(Adjustment, response.adjustment)

    async def _list_adjustments_pages(
        self, organization: str, *, undecided_only: bool = False, page_size: int = 100
    ) -> AsyncIterator[list[Adjustment]]:
        """Lists adjustments and credit notes, the latest first.

        `organization`: Name or id of the organization. Unknown: NotFound.
        `undecided_only`: Only pending ones.
        `page_size`: Number of items per call to the server, 1 to 1000.
        """
        request = wire.request(
            months_pb2.ListAdjustmentsRequest,
            organization=organization,
            undecided_only=undecided_only,
            page_size=page_size,
        )
        async for page in self._pages(self._stub.ListAdjustments, request):
            yield [wire.read(Adjustment, each) for each in page.adjustments]

    list_adjustments = items_of(_list_adjustments_pages)

    async def get_end_user(self, end_user: str, *, organization: str = "") -> EndUserLimits:
        """Returns one end user with its usage of the month and its limits.

        `end_user`: Name or id of the end user. Unknown: NotFound.
        `organization`: Name or id of the organization; empty: the key's own. Unknown: NotFound.
        """
        request = wire.request(
            end_users_pb2.GetEndUserRequest, end_user=end_user, organization=organization
        )
        response = await self._call(self._stub.GetEndUser, request)
        return wire.read(EndUserLimits, response)

    async def get_forecast(self, organization: str = "", month: str = "") -> UsageForecast:
        """Returns the cost of the current month so far, and its forecast.

        `organization`: Name or id of the organization; unknown: NotFound. Empty: the key's own.
        `month`: The month as YYYY-MM, in UTC: the current one or an earlier one. Empty: the current
            one. Later: InvalidRequest.
        """
        request = wire.request(
            usage_reports_pb2.GetForecastRequest, organization=organization, month=month
        )
        response = await self._call(self._stub.GetForecast, request)
        return wire.read(UsageForecast, response)

    async def set_resale_price(
        self,
        organization: str = "",
        model: str = "",
        *,
        markup_milli: int | None = None,
        input_picos_per_token: int | None = None,
        cached_input_picos_per_token: int | None = None,
        output_picos_per_token: int | None = None,
        reasoning_picos_per_token: int | None = None,
        embedding_picos_per_token: int | None = None,
        request_picos: int | None = None,
        withdrawn: bool = False,
        effective_time: datetime | None = None,
        request_id: str | None = None,
        replica_hour_picos: int | None = None,
    ) -> ResalePrice:
        """Sets what an organization charges its end users for a model, or for all models, from a
        time on. It changes statements only, never the organization's own bill: the scope `billing`
        is enough.

        `organization`: Name or id of the organization; empty: the key's own. Unknown: NotFound.
        `model`: The model; empty: all models without a version of their own.
        `markup_milli`: Thousandths of the organization's cost, 0 to 1000000. Unset: 1000, the cost
            itself. Required unless a price is given.
        `input_picos_per_token`: Picos per uncached input token. Unset: the markup.
        `cached_input_picos_per_token`: Picos per cached input token. Unset: the markup.
        `output_picos_per_token`: Picos per output token that is not thinking. Unset: the markup.
        `reasoning_picos_per_token`: Picos per output token of the model's thinking. Unset: as
            output.
        `embedding_picos_per_token`: Picos per embedded token. Unset: the markup.
        `request_picos`: Picos per request, beside its tokens. Unset: 0.
        `withdrawn`: Ends the price instead. NotFound if there is none at that time.
        `effective_time`: Start of validity. Unset: now. In the past: InvalidRequest. As another
            version of the model: AlreadyExists.
        `request_id`: Idempotency key: a UUID. A repetition returns the version of the first call.
        `replica_hour_picos`: Picos per hour of each rented replica of the model. Unset: 0.
        """
        request = wire.request(
            resale_pb2.SetResalePriceRequest,
            organization=organization,
            model=model,
            markup_milli=markup_milli,
            input_picos_per_token=input_picos_per_token,
            cached_input_picos_per_token=cached_input_picos_per_token,
            output_picos_per_token=output_picos_per_token,
            reasoning_picos_per_token=reasoning_picos_per_token,
            embedding_picos_per_token=embedding_picos_per_token,
            request_picos=request_picos,
            withdrawn=withdrawn,
            effective_time=effective_time,
            request_id=request_id or str(uuid.uuid4()),
            replica_hour_picos=replica_hour_picos,
        )
        response = await self._call(self._stub.SetResalePrice, request)
        return wire.read(ResalePrice, response.price)

    async def rent_replicas(
        self,
        end_user: str,
        model: str,
        replica_count: int = 0,
        *,
        organization: str = "",
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        request_id: str | None = None,
    ) -> ReplicaRental:
        """Records that an organization rents replicas of a model to an end user, at its resale
        price per hour. It changes statements only: the scope `billing` is enough, and no replica is
        started.

        `end_user`: Name of the end user, known or not. Empty or malformed: InvalidRequest.
        `model`: The model. InvalidRequest if it has no resale price per hour at the start.
        `replica_count`: Number of replicas, 1 to 1000.
        `organization`: Name or id of the organization; empty: the key's own. Unknown: NotFound.
        `start_time`: Start, a whole second. Unset: now. InvalidRequest in a closed month.
        `end_time`: End, a whole second after the start. Unset: open, until EndReplicaRental.
        `request_id`: Idempotency key: a UUID. A repetition returns the rental of the first call.
        """
        request = wire.request(
            resale_pb2.RentReplicasRequest,
            end_user=end_user,
            model=model,
            replica_count=replica_count,
            organization=organization,
            start_time=start_time,
            end_time=end_time,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.RentReplicas, request)
        return wire.read(ReplicaRental, response.rental)

    async def end_replica_rental(
        self, rental_id: int, end_time: datetime | None = None, *, organization: str = ""
    ) -> ReplicaRental:
        """Sets the end of a rental, now or at another time of a month that is not closed.

        `rental_id`: Number of the rental. Unknown: NotFound.
        `end_time`: End, a whole second. Unset: now, and no change if it has ended. The start itself
            cancels the rental. InvalidRequest before the start and in a closed month; AlreadyExists
            if it then overlaps with another rental.
        `organization`: Name or id of the organization; empty: the key's own. Unknown: NotFound.
        """
        request = wire.request(
            resale_pb2.EndReplicaRentalRequest,
            rental_id=rental_id,
            end_time=end_time,
            organization=organization,
        )
        response = await self._call(self._stub.EndReplicaRental, request)
        return wire.read(ReplicaRental, response.rental)


class BlockingBillingCalls(BlockingUnaryClient):
    """Blocking twins of `AsyncBillingCalls`."""

    get_month_report = blocking(AsyncBillingCalls.get_month_report)
    get_month_document = blocking(AsyncBillingCalls.get_month_document)
    list_months = blocking(AsyncBillingCalls.list_months)
    close_month = blocking(AsyncBillingCalls.close_month)
    verify_month = blocking(AsyncBillingCalls.verify_month)
    create_adjustment = blocking(AsyncBillingCalls.create_adjustment)
    create_credit_note = blocking(AsyncBillingCalls.create_credit_note)
    approve_adjustment = blocking(AsyncBillingCalls.approve_adjustment)
    reject_adjustment = blocking(AsyncBillingCalls.reject_adjustment)
    list_adjustments = blocking_items(AsyncBillingCalls._list_adjustments_pages)
    get_end_user = blocking(AsyncBillingCalls.get_end_user)
    get_forecast = blocking(AsyncBillingCalls.get_forecast)
    set_resale_price = blocking(AsyncBillingCalls.set_resale_price)
    rent_replicas = blocking(AsyncBillingCalls.rent_replicas)
    end_replica_rental = blocking(AsyncBillingCalls.end_replica_rental)
