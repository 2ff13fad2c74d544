"""Clients of the admin API: tenants, keys, limits, prices, live requests, replicas, webhooks."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    alerts_pb2,
    configuration_pb2,
    live_requests_pb2,
    plans_pb2,
    prices_pb2,
    replicas_pb2,
    types_pb2,
)

from weir_client import wire
from weir_client.accounts import (
    ApiKey,
    AuditEntry,
    BillingProfile,
    CreatedApiKey,
    Organization,
    Project,
    RotatedApiKey,
)
from weir_client.alerts import Alert, AlertWebhook, CreatedAlertWebhook
from weir_client.billing_terms import (
    CreditBalance,
    CreditGrant,
    Plan,
    PlanAssignment,
    PlanList,
    PriceList,
    PriceVersion,
    SimulatedCustomer,
)
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items
from weir_client.live import AppliedConfiguration, KilledRequest, LiveView, RecordedRequest
from weir_client.replicas import DrainedReplica, ReplicaList, UndrainedReplica
from weir_client.unary import UnaryClient, items_of
from weir_client.values import QuotaDimension, QuotaStatus, QuotaSubject


class AsyncAdminClient(UnaryClient):
    """Client of the admin API, which manages access and limits. Needs a key with the scope `admin`.

    You can name an organization, project or key by its name or id, as `organization/project`, or by
    the prefix of a key. Every call raises WeirError: NotFound for an unknown name, AlreadyExists
    for a taken one, InvalidRequest for a bad value.
    """

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)

    async def create_organization(
        self,
        name: str,
        *,
        currency_code: str = "USD",
        allow_existing: bool = False,
        request_id: str | None = None,
    ) -> Organization:
        """Create a customer, billed in one currency (ISO 4217).

        `allow_existing` returns the existing organization if it has this name and currency, instead
        of raising AlreadyExists. `request_id` is a UUID of your choice: a repeated call with it
        creates nothing new.
        """
        request = admin_service_pb2.CreateOrganizationRequest(
            name=name,
            currency_code=currency_code,
            allow_existing=allow_existing,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.CreateOrganization, request)
        return wire.read(Organization, response.organization)

    async def list_organizations(self) -> list[Organization]:
        """Return all customers, sorted by name."""
        request = admin_service_pb2.ListOrganizationsRequest()
        return await self._list(
            Organization, "organizations", self._stub.ListOrganizations, request
        )

    async def set_billing_profile(self, organization: str, profile: BillingProfile) -> Organization:
        """Replace the billing profile of an organization. Fields that are empty are cleared."""
        request = admin_service_pb2.SetBillingProfileRequest(
            organization=organization, billing_profile=types_pb2.BillingProfile(**asdict(profile))
        )
        response = await self._call(self._stub.SetBillingProfile, request)
        return wire.read(Organization, response.organization)

    async def create_project(
        self,
        organization: str,
        name: str,
        *,
        allow_existing: bool = False,
        request_id: str | None = None,
    ) -> Project:
        """Create a project of an organization. For `request_id`, see `create_organization`.

        `allow_existing` returns an existing project of this name instead of raising AlreadyExists.
        """
        request = admin_service_pb2.CreateProjectRequest(
            organization=organization,
            name=name,
            allow_existing=allow_existing,
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.CreateProject, request)
        return wire.read(Project, response.project)

    async def list_projects(self, organization: str) -> list[Project]:
        """Return the projects of an organization, sorted by name."""
        request = admin_service_pb2.ListProjectsRequest(organization=organization)
        return await self._list(Project, "projects", self._stub.ListProjects, request)

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
        strict_parameters: bool = False,
        lifetime: timedelta | None = None,
        allow_existing: bool = False,
        request_id: str = "",
    ) -> CreatedApiKey:
        """Create an API key and return it with its secret, which no later call returns.

        The key is valid for `lifetime`, or until it is revoked if that is None. It may use the
        models named in `models`, from the networks in `allowed_networks` (such as 203.0.113.0/24);
        an empty sequence allows all. `max_input_tokens` and `max_output_tokens` limit each request.
        With `strict_parameters`, the HTTP API refuses unknown parameters that it would otherwise
        ignore. `allow_existing` returns an active key of this name with the same permissions,
        without its secret. `request_id` is a UUID of your choice: a repeated call with it creates
        nothing new and returns no secret.
        """
        request = admin_service_pb2.CreateApiKeyRequest(
            organization=organization,
            project=project,
            name=name,
            scopes=scopes,
            models=models,
            allowed_networks=allowed_networks,
            max_input_tokens=max_input_tokens or 0,
            max_output_tokens=max_output_tokens or 0,
            strict_parameters=strict_parameters,
            allow_existing=allow_existing,
            request_id=request_id,
        )
        if lifetime is not None:
            request.lifetime.FromTimedelta(lifetime)
        response = await self._call(self._stub.CreateApiKey, request, idempotent=False)
        return wire.read(CreatedApiKey, response)

    async def rotate_api_key(
        self, api_key: str, *, overlap: timedelta | None = None, request_id: str = ""
    ) -> RotatedApiKey:
        """Replace the secret of a key, given by id or prefix. No later call returns the new secret.

        The old secret keeps working for `overlap`, one day if None. `request_id` is a UUID of your
        choice: a repeated call with it changes nothing and returns no secret.
        """
        request = admin_service_pb2.RotateApiKeyRequest(api_key=api_key, request_id=request_id)
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
        strict_parameters: bool | None = None,
        expire_time: datetime | None = None,
        never_expires: bool = False,
    ) -> ApiKey:
        """Change fields of a key, given by id or prefix. Arguments of None leave a field unchanged.

        An `expire_time` in the past ends the key now. A token limit of 0 removes the limit.
        """
        request = admin_service_pb2.UpdateApiKeyRequest(
            api_key=api_key,
            name=name,
            scopes=scopes,
            models=models,
            all_models=all_models,
            allowed_networks=allowed_networks,
            all_networks=all_networks,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            strict_parameters=strict_parameters,
            never_expires=never_expires,
        )
        if expire_time is not None:
            request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.UpdateApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def revoke_api_key(self, api_key: str) -> ApiKey:
        """Revoke a key, given by id or prefix, permanently. Idempotent."""
        request = admin_service_pb2.RevokeApiKeyRequest(api_key=api_key)
        response = await self._call(self._stub.RevokeApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def list_api_keys(
        self, organization: str = "", *, api_key: str = "", unused_for: timedelta | None = None
    ) -> list[ApiKey]:
        """Return the keys of one organization, or of all, newest first.

        `api_key` (an id or prefix) selects one key. `unused_for` selects the keys that are not
        revoked and have no recorded use for this long.
        """
        request = admin_service_pb2.ListApiKeysRequest(organization=organization, api_key=api_key)
        if unused_for is not None:
            request.unused_for.FromTimedelta(unused_for)
        return await self._list(ApiKey, "api_keys", self._stub.ListApiKeys, request)

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
        """Set a limit, in requests, tokens or picos by `dimension`. Past usage counts.

        A `limit_value` of 0 admits nothing. The weights say how much a token of a kind counts, in
        thousandths. None keeps the current value; a new limit counts each token as one and is
        enforced. With `for_new_keys`, the subject itself is not limited, but each key created under
        it from now on gets its own copy of the limit. `alert_at` has the percentages of the limit
        that send an alert, empty for none; a new limit per day or month alerts at 50, 80 and 100.
        """
        request = admin_service_pb2.SetQuotaRequest(
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

    async def override_quota(
        self, quota_id: str, limit_value: int, expire_time: datetime, reason: str
    ) -> QuotaStatus:
        """Replace a limit by a higher one until `expire_time`, an aware datetime.

        `reason` is shown with the limit and recorded in the audit log.
        """
        request = admin_service_pb2.OverrideQuotaRequest(
            quota_id=quota_id, limit_value=limit_value, reason=reason
        )
        request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.OverrideQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def end_quota_override(self, quota_id: str) -> QuotaStatus:
        """End a temporary override before its time; the limit itself applies again."""
        response = await self._call(
            self._stub.OverrideQuota, admin_service_pb2.OverrideQuotaRequest(quota_id=quota_id)
        )
        return wire.read(QuotaStatus, response.quota)

    async def delete_quota(self, quota_id: str, *, allow_missing: bool = False) -> bool:
        """Remove a limit and return whether it existed.

        `allow_missing` returns False instead of raising NotFound if there is no such limit.
        """
        request = admin_service_pb2.DeleteQuotaRequest(
            quota_id=quota_id, allow_missing=allow_missing
        )
        response = await self._call(self._stub.DeleteQuota, request, idempotent=allow_missing)
        return response.deleted or not allow_missing  # older servers do not return `deleted`

    async def list_quotas(self, organization: str = "") -> list[QuotaStatus]:
        """Return the limits of one organization, its projects and keys, or all, with remainders."""
        request = admin_service_pb2.ListQuotasRequest(organization=organization)
        return await self._list(QuotaStatus, "quotas", self._stub.ListQuotas, request)

    async def list_key_quotas(self, api_key: str, model: str = "") -> list[QuotaStatus]:
        """Return every limit that applies to a key, even those of its project and organization.

        `model` selects the limits that apply to this model.
        """
        request = admin_service_pb2.ListQuotasRequest(api_key=api_key, model=model)
        return await self._list(QuotaStatus, "quotas", self._stub.ListQuotas, request)

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
        """Yield entries of the audit log, newest first.

        `before_entry_id` selects older entries; 0 begins with the newest. `subject` selects entries
        about an organization, an "organization/project", the prefix of a key, or any id; `actor`
        the changes made with this key; `action_prefix` the actions that begin with it. `start_time`
        (inclusive) and `end_time` (exclusive) are aware datetimes.
        """
        request = admin_service_pb2.ListAuditEntriesRequest(
            page_size=page_size,
            before_entry_id=before_entry_id,
            subject=subject,
            actor=actor,
            action_prefix=action_prefix,
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

    async def simulate_prices(
        self, month: str, proposal: Mapping[str, Any], *, organization: str = ""
    ) -> list[SimulatedCustomer]:
        """Compute the bills of a past month (`YYYY-MM`, UTC) with other prices or plans. Read-only.

        `proposal` may have the keys `prices` and `plans`, JSON mappings of
        `weir.v1.PriceConfiguration` and `PlanConfiguration`. Raises:
        google.protobuf.json_format.ParseError if it is malformed.
        """
        request = plans_pb2.SimulatePricesRequest()
        ParseDict(dict(proposal), request)
        request.month, request.organization = month, organization
        return await self._list(SimulatedCustomer, "customers", self._stub.SimulatePrices, request)

    async def create_plan(self, plan: Mapping[str, Any]) -> Plan:
        """Create a plan or its next version; return the latest version if it is identical.

        `plan` is a JSON mapping of `weir.v1.PlanConfiguration`. Raises:
        google.protobuf.json_format.ParseError if it is malformed.
        """
        request = plans_pb2.CreatePlanRequest()
        ParseDict(dict(plan), request.plan)
        response = await self._call(self._stub.CreatePlan, request)
        return wire.read(Plan, response.plan, existed=response.existed)

    async def list_plans(self, name: str = "", *, organization: str = "") -> PlanList:
        """Return plans and their assignments, optionally of one name or organization."""
        request = plans_pb2.ListPlansRequest(name=name, organization=organization)
        return wire.read(PlanList, await self._call(self._stub.ListPlans, request))

    async def assign_plan(
        self, organization: str, plan: str, *, version: int = 0, first_month: str = ""
    ) -> PlanAssignment:
        """Assign a plan to an organization: by default its latest version, from this month on.

        `first_month` is `YYYY-MM`. An empty `plan` removes the plan from that month on. Idempotent.
        """
        request = plans_pb2.AssignPlanRequest(
            organization=organization, plan=plan, version=version, first_month=first_month
        )
        response = await self._call(self._stub.AssignPlan, request)
        return wire.read(PlanAssignment, response.assignment, existed=response.existed)

    async def grant_credit(
        self,
        organization: str,
        amount_picos: int,
        *,
        last_month: str,
        reason: str,
        first_month: str = "",
        request_id: str | None = None,
    ) -> CreditGrant:
        """Grant an organization credit for its charges from `first_month` through `last_month`.

        Months are `YYYY-MM`; the default of `first_month` is this one. For `request_id`, see
        `create_organization`.
        """
        request = plans_pb2.GrantCreditRequest(
            organization=organization,
            amount_picos=amount_picos,
            first_month=first_month,
            last_month=last_month,
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(CreditGrant, (await self._call(self._stub.GrantCredit, request)).grant)

    async def list_credit_grants(self, organization: str = "") -> list[CreditGrant]:
        """Return the credit grants of one organization, or of all; the first to expire leads."""
        return await self._list(
            CreditGrant,
            "grants",
            self._stub.ListCreditGrants,
            plans_pb2.ListCreditGrantsRequest(organization=organization),
        )

    async def get_credit_balance(self, organization: str) -> CreditBalance:
        """Return an organization's current credit."""
        request = plans_pb2.GetCreditBalanceRequest(organization=organization)
        return wire.read(CreditBalance, await self._call(self._stub.GetCreditBalance, request))

    async def set_prepaid(
        self, organization: str, prepaid: bool, *, alert_at: Sequence[int] | None = None
    ) -> bool:
        """Switch an organization to prepaid or back, and return the previous setting.

        `alert_at` has the amounts of remaining credit, in picos, that send an alert. None keeps the
        present ones; at first there are none.
        """
        thresholds = None if alert_at is None else types_pb2.AlertThresholds(values=alert_at)
        request = plans_pb2.SetPrepaidRequest(
            organization=organization, prepaid=prepaid, alert_at=thresholds
        )
        return (await self._call(self._stub.SetPrepaid, request)).existed

    async def set_price(
        self,
        model: str,
        *,
        input_picos_per_token: int,
        cached_input_picos_per_token: int,
        output_picos_per_token: int,
        embedding_picos_per_token: int | None = None,
        reasoning_picos_per_token: int | None = None,
        batch_multiplier_milli: int | None = None,
        organization: str = "",
        currency_code: str = "",
        effective_time: datetime | None = None,
        request_id: str | None = None,
    ) -> list[PriceVersion]:
        """Add a price version, and a second one for the batch tier if its price differs.

        The interactive version comes first. With an empty `organization` the price is the list
        price. An empty `currency_code` means the organization's currency, or USD. None keeps the
        embedding price and the batch multiplier (in thousandths); reasoning costs as much as output
        unless it has a price of its own. `effective_time` is an aware datetime, None means now. For
        `request_id`, see `create_organization`.
        """
        request = admin_service_pb2.SetPriceRequest(
            model=model,
            currency_code=currency_code,
            input_picos_per_token=input_picos_per_token,
            cached_input_picos_per_token=cached_input_picos_per_token,
            output_picos_per_token=output_picos_per_token,
            embedding_picos_per_token=embedding_picos_per_token,
            reasoning_picos_per_token=reasoning_picos_per_token,
            batch_multiplier_milli=batch_multiplier_milli,
            organization=organization,
            effective_time=_stamp(effective_time),
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._list(PriceVersion, "versions", self._stub.SetPrice, request)

    async def withdraw_price(
        self,
        organization: str,
        model: str,
        *,
        effective_time: datetime | None = None,
        request_id: str | None = None,
    ) -> list[PriceVersion]:
        """End an organization's own price of a model; the list price applies from then on.

        `effective_time` is an aware datetime; None means now.
        """
        request = prices_pb2.WithdrawPriceRequest(
            organization=organization,
            model=model,
            effective_time=_stamp(effective_time),
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._list(PriceVersion, "versions", self._stub.WithdrawPrice, request)

    async def list_prices(
        self,
        organization: str = "",
        *,
        model: str = "",
        currency_code: str = "",
        time: datetime | None = None,
        history: bool = False,
    ) -> PriceList:
        """Return list prices, or those that apply to an organization, by model and tier.

        Each price has its source and start. `time` is an aware datetime; None means now. With
        `history`, all past and future versions are returned too.
        """
        request = prices_pb2.ListPricesRequest(
            organization=organization,
            model=model,
            currency_code=currency_code,
            time=_stamp(time),
            history=history,
        )
        return wire.read(PriceList, await self._call(self._stub.ListPrices, request))

    async def list_live_requests(
        self, organization: str = "", *, page_size: int = 200, stuck_only: bool = False
    ) -> LiveView:
        """Return the live requests of one organization, or of all, in all processes.

        `stuck_only` selects requests whose hold is past its expiry.
        """
        request = live_requests_pb2.ListLiveRequestsRequest(
            organization=organization, page_size=page_size, stuck_only=stuck_only
        )
        return wire.read(LiveView, await self._call(self._stub.ListLiveRequests, request))

    async def get_request(self, request_id: str, *, project: str = "") -> RecordedRequest:
        """Return the record of a request of any project. Raises: NotFound.

        Name the `project` if several projects have a request with this id.
        """
        request = live_requests_pb2.GetRequestRequest(request_id=request_id, project=project)
        return wire.read(RecordedRequest, await self._call(self._stub.GetRequest, request))

    async def kill_request(
        self, request_id: str, *, project: str = "", reason: str = ""
    ) -> KilledRequest:
        """End a request in any process. Its client receives the reason. Idempotent."""
        request = live_requests_pb2.KillRequestRequest(
            request_id=request_id, project=project, reason=reason
        )
        return wire.read(KilledRequest, await self._call(self._stub.KillRequest, request))

    async def expire_overdue_holds(self) -> int:
        """Expire overdue holds at once, as the worker does regularly, and return their number."""
        response = await self._call(
            self._stub.ExpireOverdueHolds, live_requests_pb2.ExpireOverdueHoldsRequest()
        )
        return response.expired_count

    async def apply_configuration(
        self, configuration: Mapping[str, Any], *, dry_run: bool = False
    ) -> AppliedConfiguration:
        """Apply a configuration of organizations, projects, keys, limits and prices, all or none.

        `configuration` is a JSON mapping of `weir.v1.Configuration`; with `dry_run`, the changes
        are only returned. Raises: google.protobuf.json_format.ParseError if the mapping is
        malformed.
        """
        request = configuration_pb2.ApplyConfigurationRequest(dry_run=dry_run)
        ParseDict(dict(configuration), request.configuration)
        # Not retried automatically: only the first response holds the secrets of new keys.
        return wire.read(
            AppliedConfiguration,
            await self._call(self._stub.ApplyConfiguration, request, idempotent=False),
        )

    async def export_configuration(self, organization: str = "") -> dict[str, Any]:
        """Return the current state of one organization, or of all, as a configuration."""
        request = configuration_pb2.ExportConfigurationRequest(organization=organization)
        response = await self._call(self._stub.ExportConfiguration, request)
        exported: dict[str, Any] = MessageToDict(
            response.configuration, preserving_proto_field_name=True
        )
        return exported

    async def list_replicas(self, model: str = "") -> ReplicaList:
        """Return the engines of all processes, or those of one model or `name@version`."""
        answer = await self._call(
            self._stub.ListReplicas, replicas_pb2.ListReplicasRequest(model=model)
        )
        return wire.read(ReplicaList, answer)

    async def drain_replica(
        self, model: str, name: str, *, reason: str = "", move_after_s: float | None = None
    ) -> DrainedReplica:
        """Stop sending new requests to a replica, in all processes. Idempotent.

        Requests that still run after `move_after_s` seconds move to other replicas if possible;
        with None they finish where they run.
        """
        request = replicas_pb2.DrainReplicaRequest(model=model, replica=name, reason=reason)
        if move_after_s is not None:
            request.move_after.CopyFrom(_duration(move_after_s))
        answer = await self._call(self._stub.DrainReplica, request)
        return wire.read(DrainedReplica, answer)

    async def undrain_replica(self, model: str, name: str, *, reason: str = "") -> UndrainedReplica:
        """Let a drained replica take requests again. Idempotent."""
        request = replicas_pb2.UndrainReplicaRequest(model=model, replica=name, reason=reason)
        answer = await self._call(self._stub.UndrainReplica, request)
        return wire.read(UndrainedReplica, answer)

    async def set_alert_webhook(
        self, organization: str, url: str, *, request_id: str | None = None
    ) -> CreatedAlertWebhook:
        """Post an organization's alerts to a URL from now on, signed with a new secret.

        `request_id` is a UUID of your choice: a repeated call with it changes nothing and returns
        an empty secret.
        """
        request = alerts_pb2.SetAlertWebhookRequest(
            organization=organization, url=url, request_id=request_id or str(uuid.uuid4())
        )
        response = await self._call(self._stub.SetAlertWebhook, request)
        return wire.read(CreatedAlertWebhook, response)

    async def list_alert_webhooks(self, organization: str = "") -> list[AlertWebhook]:
        """Return the alert webhooks of one organization, or of all."""
        return await self._list(
            AlertWebhook,
            "webhooks",
            self._stub.ListAlertWebhooks,
            alerts_pb2.ListAlertWebhooksRequest(organization=organization),
        )

    async def delete_alert_webhook(self, organization: str, *, allow_missing: bool = False) -> bool:
        """Remove the webhook of an organization and return whether it existed.

        `allow_missing` returns False instead of raising NotFound if there is none.
        """
        request = alerts_pb2.DeleteAlertWebhookRequest(
            organization=organization, allow_missing=allow_missing
        )
        return (await self._call(self._stub.DeleteAlertWebhook, request)).deleted

    async def test_alert_webhook(
        self, organization: str, *, request_id: str | None = None
    ) -> Alert:
        """Send a test alert to an organization's webhook; `list_alerts` shows its delivery.

        `request_id` is a UUID of your choice: a repeated call with it sends no second test.
        """
        request = alerts_pb2.TestAlertWebhookRequest(
            organization=organization, request_id=request_id or str(uuid.uuid4())
        )
        return wire.read(Alert, (await self._call(self._stub.TestAlertWebhook, request)).alert)


class AdminClient(BlockingUnaryClient):
    """Blocking client of the admin API. `AsyncAdminClient` documents every call and its errors.

    >>> with AdminClient() as admin:
    ...     organization = admin.create_organization("example", allow_existing=True)
    ...     limit = admin.set_quota(
    ...         QuotaSubject.ORGANIZATION, "example", QuotaDimension.TOKENS_PER_MONTH, 1_000_000
    ...     )
    >>> organization.name, limit.limit_value
    ('example', 1000000)
    """

    _async_class = AsyncAdminClient

    create_organization = blocking(AsyncAdminClient.create_organization)
    list_organizations = blocking(AsyncAdminClient.list_organizations)
    set_billing_profile = blocking(AsyncAdminClient.set_billing_profile)
    create_project = blocking(AsyncAdminClient.create_project)
    list_projects = blocking(AsyncAdminClient.list_projects)
    create_api_key = blocking(AsyncAdminClient.create_api_key)
    rotate_api_key = blocking(AsyncAdminClient.rotate_api_key)
    update_api_key = blocking(AsyncAdminClient.update_api_key)
    revoke_api_key = blocking(AsyncAdminClient.revoke_api_key)
    list_api_keys = blocking(AsyncAdminClient.list_api_keys)
    set_quota = blocking(AsyncAdminClient.set_quota)
    override_quota = blocking(AsyncAdminClient.override_quota)
    end_quota_override = blocking(AsyncAdminClient.end_quota_override)
    delete_quota = blocking(AsyncAdminClient.delete_quota)
    list_quotas = blocking(AsyncAdminClient.list_quotas)
    list_key_quotas = blocking(AsyncAdminClient.list_key_quotas)
    list_audit_entries = blocking_items(AsyncAdminClient._audit_pages)

    set_price = blocking(AsyncAdminClient.set_price)
    withdraw_price = blocking(AsyncAdminClient.withdraw_price)
    list_prices = blocking(AsyncAdminClient.list_prices)

    simulate_prices = blocking(AsyncAdminClient.simulate_prices)
    create_plan = blocking(AsyncAdminClient.create_plan)
    list_plans = blocking(AsyncAdminClient.list_plans)
    assign_plan = blocking(AsyncAdminClient.assign_plan)
    grant_credit = blocking(AsyncAdminClient.grant_credit)
    list_credit_grants = blocking(AsyncAdminClient.list_credit_grants)
    get_credit_balance = blocking(AsyncAdminClient.get_credit_balance)
    set_prepaid = blocking(AsyncAdminClient.set_prepaid)

    list_live_requests = blocking(AsyncAdminClient.list_live_requests)
    get_request = blocking(AsyncAdminClient.get_request)
    kill_request = blocking(AsyncAdminClient.kill_request)
    expire_overdue_holds = blocking(AsyncAdminClient.expire_overdue_holds)
    apply_configuration = blocking(AsyncAdminClient.apply_configuration)
    export_configuration = blocking(AsyncAdminClient.export_configuration)

    list_replicas = blocking(AsyncAdminClient.list_replicas)
    drain_replica = blocking(AsyncAdminClient.drain_replica)
    undrain_replica = blocking(AsyncAdminClient.undrain_replica)

    set_alert_webhook = blocking(AsyncAdminClient.set_alert_webhook)
    list_alert_webhooks = blocking(AsyncAdminClient.list_alert_webhooks)
    delete_alert_webhook = blocking(AsyncAdminClient.delete_alert_webhook)
    test_alert_webhook = blocking(AsyncAdminClient.test_alert_webhook)


def _stamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(time)
    return stamp


def _duration(seconds: float) -> Duration:
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)
