"""The asyncio client of the admin API: organizations, projects, keys, quotas, prices, audit."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta

from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import types_pb2

from weir_client import wire
from weir_client.accounts import ApiKey, AuditEntry, BillingProfile, CreatedApiKey, Organization, Project, RotatedApiKey
from weir_client.admin_terms import AsyncTermCalls
from weir_client.unary import items_of
from weir_client.values import QuotaDimension, QuotaStatus, QuotaSubject


class AsyncAdminClient(AsyncTermCalls):
    """Manages who may use the service, and how much. Needs a key with the scope `admin`.

    Organizations, projects and keys are named as the admin API takes them: a name or an id, `organization/project`, a key's
    prefix. Every call raises WeirError: NotFound for an unknown name, AlreadyExists for a taken one, InvalidRequest for a bad
    value.
    """

    async def create_organization(
        self, name: str, *, currency_code: str = "USD", allow_existing: bool = False, request_id: str | None = None
    ) -> Organization:
        """A new customer, billed in one currency (ISO 4217). allow_existing: or the one of this name and currency.

        request_id: a UUID of your own; the same call with it again makes nothing new.
        """
        request = admin_pb.CreateOrganizationRequest(
            name=name, currency_code=currency_code, allow_existing=allow_existing, request_id=request_id or str(uuid.uuid4())
        )
        response = await self._call(self._stub.CreateOrganization, request)
        return wire.read(Organization, response.organization)

    async def list_organizations(self) -> list[Organization]:
        """All customers, by name."""
        request = admin_pb.ListOrganizationsRequest()
        response = await self._call(self._stub.ListOrganizations, request)
        return [wire.read(Organization, each) for each in response.organizations]

    async def set_billing_profile(self, organization: str, profile: BillingProfile) -> Organization:
        """Replaces the billing profile of an organization: a field that is empty is empty afterwards."""
        request = admin_pb.SetBillingProfileRequest(
            organization=organization, billing_profile=types_pb2.BillingProfile(**asdict(profile))
        )
        response = await self._call(self._stub.SetBillingProfile, request)
        return wire.read(Organization, response.organization)

    async def create_project(
        self, organization: str, name: str, *, allow_existing: bool = False, request_id: str | None = None
    ) -> Project:
        """A new project of an organization. allow_existing: or the one of this name. request_id: as in `create_organization`."""
        request = admin_pb.CreateProjectRequest(
            organization=organization, name=name, allow_existing=allow_existing, request_id=request_id or str(uuid.uuid4())
        )
        response = await self._call(self._stub.CreateProject, request)
        return wire.read(Project, response.project)

    async def list_projects(self, organization: str) -> list[Project]:
        """The projects of an organization, by name."""
        request = admin_pb.ListProjectsRequest(organization=organization)
        response = await self._call(self._stub.ListProjects, request)
        return [wire.read(Project, each) for each in response.projects]

    async def create_api_key(
        self,
        organization: str,
        project: str,
        name: str,
        *,
        scopes: Sequence[str] = ("inference",),
        models: Sequence[str] = (),
        allowed_networks: Sequence[str] = (),
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        lifetime: timedelta | None = None,
        allow_existing: bool = False,
        request_id: str = "",
    ) -> CreatedApiKey:
        """A new key; its secret is told here and never again. `lifetime` None: it works until it is revoked.

        models: those that it may use, by name; none: every one. allowed_networks: that it may be used from, as 203.0.113.0/24;
        none: everywhere. max_input_tokens, max_output_tokens: of one request.
        allow_existing: or the working key of this name that is good for the same, without its secret. request_id: a UUID of your
        own; the same call with it again makes nothing new, and tells no secret.
        """
        request = admin_pb.CreateApiKeyRequest(
            organization=organization,
            project=project,
            name=name,
            scopes=scopes,
            models=models,
            allowed_networks=allowed_networks,
            max_input_tokens=max_input_tokens or 0,
            max_output_tokens=max_output_tokens or 0,
            allow_existing=allow_existing,
            request_id=request_id,
        )
        if lifetime is not None:
            request.lifetime.FromTimedelta(lifetime)
        response = await self._call(self._stub.CreateApiKey, request, idempotent=False)
        return wire.read(CreatedApiKey, response)

    async def rotate_api_key(self, api_key: str, *, overlap: timedelta | None = None, request_id: str = "") -> RotatedApiKey:
        """A new secret for a key, by id or prefix, told here and never again; the old one works for `overlap`, a day if None.

        request_id: a UUID of your own; the same call with it again makes nothing new, and tells no secret.
        """
        request = admin_pb.RotateApiKeyRequest(api_key=api_key, request_id=request_id)
        if overlap is not None:
            request.overlap.FromTimedelta(overlap)
        response = await self._call(self._stub.RotateApiKey, request, idempotent=False)
        return wire.read(RotatedApiKey, response)

    async def update_api_key(
        self,
        api_key: str,
        *,
        name: str | None = None,
        scopes: Sequence[str] = (),
        models: Sequence[str] = (),
        all_models: bool = False,
        allowed_networks: Sequence[str] = (),
        all_networks: bool = False,
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        expire_time: datetime | None = None,
        never_expires: bool = False,
    ) -> ApiKey:
        """Changes what is given of a key, by id or prefix. A time that has passed ends it now; 0 tokens: no limit."""
        request = admin_pb.UpdateApiKeyRequest(
            api_key=api_key,
            name=name,
            scopes=scopes,
            models=models,
            all_models=all_models,
            allowed_networks=allowed_networks,
            all_networks=all_networks,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            never_expires=never_expires,
        )
        if expire_time is not None:
            request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.UpdateApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def revoke_api_key(self, api_key: str) -> ApiKey:
        """Ends a key for good, by id or prefix. Doing it twice changes nothing."""
        request = admin_pb.RevokeApiKeyRequest(api_key=api_key)
        response = await self._call(self._stub.RevokeApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def list_api_keys(
        self, organization: str = "", *, api_key: str = "", unused_for: timedelta | None = None
    ) -> list[ApiKey]:
        """The keys of one organization, or all, newest first. api_key: only the one of this id or prefix.

        unused_for: only those that are not revoked and were not used for so long, as far as that is known.
        """
        request = admin_pb.ListApiKeysRequest(organization=organization, api_key=api_key)
        if unused_for is not None:
            request.unused_for.FromTimedelta(unused_for)
        response = await self._call(self._stub.ListApiKeys, request)
        return [wire.read(ApiKey, each) for each in response.api_keys]

    async def set_quota(
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
        enforced: bool | None = None,
        for_new_keys: bool = False,
        alert_at: Sequence[int] | None = None,
    ) -> QuotaStatus:
        """Sets one limit, in requests, tokens or picos by dimension; what was used is counted. 0 lets nothing in.

        Weights are thousandths that a token of a kind counts. What is None stays as it stands; a new limit counts each token as one
        and is enforced. `for_new_keys`: not a limit of the subject, but one that each key created under it from then on gets.
        `alert_at`: percentages at which it alerts, none for never; a new limit per day or month alerts at 50, 80 and 100.
        """
        request = admin_pb.SetQuotaRequest(
            subject=wire.SUBJECT_NUMBERS[subject],
            subject_ref=subject_ref,
            model=model,
            dimension=wire.DIMENSION_NUMBERS[dimension],
            limit_value=limit_value,
            input_weight_milli=input_weight_milli,
            cached_input_weight_milli=cached_input_weight_milli,
            output_weight_milli=output_weight_milli,
            enforced=enforced,
            for_new_keys=for_new_keys,
            alert_at=None if alert_at is None else types_pb2.AlertThresholds(values=alert_at),
        )
        response = await self._call(self._stub.SetQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def raise_quota(self, quota_id: str, limit_value: int, expire_time: datetime, reason: str) -> QuotaStatus:
        """Lets a higher limit hold until a time (an aware datetime); `reason` is told with it and stands in the audit log."""
        request = admin_pb.RaiseQuotaRequest(quota_id=quota_id, limit_value=limit_value, reason=reason)
        request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.RaiseQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def end_quota_raise(self, quota_id: str) -> QuotaStatus:
        """Ends a raise before its time."""
        response = await self._call(self._stub.RaiseQuota, admin_pb.RaiseQuotaRequest(quota_id=quota_id))
        return wire.read(QuotaStatus, response.quota)

    async def delete_quota(self, quota_id: str, *, allow_missing: bool = False) -> bool:
        """Removes one limit, and tells whether it was there. allow_missing: instead of raising NotFound if it was not."""
        request = admin_pb.DeleteQuotaRequest(quota_id=quota_id, allow_missing=allow_missing)
        response = await self._call(self._stub.DeleteQuota, request, idempotent=allow_missing)
        return response.deleted or not allow_missing  # older servers do not tell

    async def list_quotas(self, organization: str = "") -> list[QuotaStatus]:
        """The limits of one organization with its projects and keys, or all, with what is left of each."""
        request = admin_pb.ListQuotasRequest(organization=organization)
        response = await self._call(self._stub.ListQuotas, request)
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def list_key_quotas(self, api_key: str, model: str = "") -> list[QuotaStatus]:
        """Every limit that a key meets, for one model or all: its own and those further up, and which of them bind."""
        request = admin_pb.ListQuotasRequest(api_key=api_key, model=model)
        response = await self._call(self._stub.ListQuotas, request)
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def _audit_pages(
        self,
        *,
        page_size: int = 100,
        before_entry_id: int = 0,
        subject: str = "",
        actor: str = "",
        action_prefix: str = "",
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> AsyncIterator[list[AuditEntry]]:
        """Changes, newest first.

        before_entry_id: only those before it; 0: all. subject: only what concerns it: an organization, "organization/project", a
        key's prefix, any id. actor: only of this key. action_prefix: only actions that begin so. start_time, end_time: aware; from
        the one on, before the other.
        """
        request = admin_pb.ListAuditEntriesRequest(
            page_size=page_size, before_entry_id=before_entry_id, subject=subject, actor=actor, action_prefix=action_prefix
        )
        for stamp, time in ((request.start_time, start_time), (request.end_time, end_time)):
            if time is not None:
                stamp.FromDatetime(time)
        while True:
            response = await self._call(self._stub.ListAuditEntries, request)
            yield [wire.read(AuditEntry, each) for each in response.entries]
            if len(response.entries) < page_size:
                return
            request.before_entry_id = response.entries[-1].entry_id

    list_audit_entries = items_of(_audit_pages)
