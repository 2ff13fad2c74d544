"""The clients of the admin API: tenants, keys, limits, prices, plans, credit, what runs, replicas, webhooks, the audit log."""

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
from weir_client.accounts import ApiKey, AuditEntry, BillingProfile, CreatedApiKey, Organization, Project, RotatedApiKey
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
    """Manages who may use the service, and how much. Needs a key with the scope `admin`.

    Organizations, projects and keys are named as the admin API takes them: a name or an id, `organization/project`, a key's
    prefix. Every call raises WeirError: NotFound for an unknown name, AlreadyExists for a taken one, InvalidRequest for a bad
    value.
    """

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)

    async def create_organization(
        self, name: str, *, currency_code: str = "USD", allow_existing: bool = False, request_id: str | None = None
    ) -> Organization:
        """A new customer, billed in one currency (ISO 4217). allow_existing: or the one of this name and currency.

        request_id: a UUID of your own; the same call with it again makes nothing new.
        """
        request = admin_service_pb2.CreateOrganizationRequest(
            name=name, currency_code=currency_code, allow_existing=allow_existing, request_id=request_id or str(uuid.uuid4())
        )
        response = await self._call(self._stub.CreateOrganization, request)
        return wire.read(Organization, response.organization)

    async def list_organizations(self) -> list[Organization]:
        """All customers, by name."""
        request = admin_service_pb2.ListOrganizationsRequest()
        response = await self._call(self._stub.ListOrganizations, request)
        return [wire.read(Organization, each) for each in response.organizations]

    async def set_billing_profile(self, organization: str, profile: BillingProfile) -> Organization:
        """Replaces the billing profile of an organization: a field that is empty is empty afterwards."""
        request = admin_service_pb2.SetBillingProfileRequest(
            organization=organization, billing_profile=types_pb2.BillingProfile(**asdict(profile))
        )
        response = await self._call(self._stub.SetBillingProfile, request)
        return wire.read(Organization, response.organization)

    async def create_project(
        self, organization: str, name: str, *, allow_existing: bool = False, request_id: str | None = None
    ) -> Project:
        """A new project of an organization. allow_existing: or the one of this name. request_id: as in `create_organization`."""
        request = admin_service_pb2.CreateProjectRequest(
            organization=organization, name=name, allow_existing=allow_existing, request_id=request_id or str(uuid.uuid4())
        )
        response = await self._call(self._stub.CreateProject, request)
        return wire.read(Project, response.project)

    async def list_projects(self, organization: str) -> list[Project]:
        """The projects of an organization, by name."""
        request = admin_service_pb2.ListProjectsRequest(organization=organization)
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
        request = admin_service_pb2.CreateApiKeyRequest(
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
        expire_time: datetime | None = None,
        never_expires: bool = False,
    ) -> ApiKey:
        """Changes what is given of a key, by id or prefix. A time that has passed ends it now; 0 tokens: no limit."""
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
            never_expires=never_expires,
        )
        if expire_time is not None:
            request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.UpdateApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def revoke_api_key(self, api_key: str) -> ApiKey:
        """Ends a key for good, by id or prefix. Doing it twice changes nothing."""
        request = admin_service_pb2.RevokeApiKeyRequest(api_key=api_key)
        response = await self._call(self._stub.RevokeApiKey, request)
        return wire.read(ApiKey, response.api_key)

    async def list_api_keys(
        self, organization: str = "", *, api_key: str = "", unused_for: timedelta | None = None
    ) -> list[ApiKey]:
        """The keys of one organization, or all, newest first. api_key: only the one of this id or prefix.

        unused_for: only those that are not revoked and were not used for so long, as far as that is known.
        """
        request = admin_service_pb2.ListApiKeysRequest(organization=organization, api_key=api_key)
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

    async def raise_quota(self, quota_id: str, limit_value: int, expire_time: datetime, reason: str) -> QuotaStatus:
        """Lets a higher limit hold until a time (an aware datetime); `reason` is told with it and stands in the audit log."""
        request = admin_service_pb2.RaiseQuotaRequest(quota_id=quota_id, limit_value=limit_value, reason=reason)
        request.expire_time.FromDatetime(expire_time)
        response = await self._call(self._stub.RaiseQuota, request)
        return wire.read(QuotaStatus, response.quota)

    async def end_quota_raise(self, quota_id: str) -> QuotaStatus:
        """Ends a raise before its time."""
        response = await self._call(self._stub.RaiseQuota, admin_service_pb2.RaiseQuotaRequest(quota_id=quota_id))
        return wire.read(QuotaStatus, response.quota)

    async def delete_quota(self, quota_id: str, *, allow_missing: bool = False) -> bool:
        """Removes one limit, and tells whether it was there. allow_missing: instead of raising NotFound if it was not."""
        request = admin_service_pb2.DeleteQuotaRequest(quota_id=quota_id, allow_missing=allow_missing)
        response = await self._call(self._stub.DeleteQuota, request, idempotent=allow_missing)
        return response.deleted or not allow_missing  # older servers do not tell

    async def list_quotas(self, organization: str = "") -> list[QuotaStatus]:
        """The limits of one organization with its projects and keys, or all, with what is left of each."""
        request = admin_service_pb2.ListQuotasRequest(organization=organization)
        response = await self._call(self._stub.ListQuotas, request)
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def list_key_quotas(self, api_key: str, model: str = "") -> list[QuotaStatus]:
        """Every limit that a key meets, for one model or all: its own and those further up, and which of them bind."""
        request = admin_service_pb2.ListQuotasRequest(api_key=api_key, model=model)
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
        request = admin_service_pb2.ListAuditEntriesRequest(
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

    async def simulate_prices(self, month: str, proposal: Mapping[str, Any], *, organization: str = "") -> list[SimulatedCustomer]:
        """What a past month (`YYYY-MM`, UTC) would have come to with other prices or plans. Changes nothing.

        proposal: `prices` and `plans`, JSON mappings of `weir.v1.PriceConfiguration` and `PlanConfiguration`. Raises:
        google.protobuf.json_format.ParseError if it is none.
        """
        request = plans_pb2.SimulatePricesRequest()
        ParseDict(dict(proposal), request)
        request.month, request.organization = month, organization
        response = await self._call(self._stub.SimulatePrices, request)
        return [wire.read(SimulatedCustomer, each) for each in response.customers]

    async def create_plan(self, plan: Mapping[str, Any]) -> Plan:
        """A plan, or the next version of one; the latest version if that says the same.

        plan: JSON mapping of `weir.v1.PlanConfiguration`. Raises: google.protobuf.json_format.ParseError if it is none.
        """
        request = plans_pb2.CreatePlanRequest()
        ParseDict(dict(plan), request.plan)
        response = await self._call(self._stub.CreatePlan, request)
        return wire.read(Plan, response.plan, existed=response.existed)

    async def list_plans(self, name: str = "", *, organization: str = "") -> PlanList:
        """Plans, and who has which."""
        request = plans_pb2.ListPlansRequest(name=name, organization=organization)
        return wire.read(PlanList, await self._call(self._stub.ListPlans, request))

    async def assign_plan(self, organization: str, plan: str, *, version: int = 0, first_month: str = "") -> PlanAssignment:
        """Gives an organization a plan, by default its latest version, from a month (`YYYY-MM`) on, by default this one.

        An empty plan: none from then on. Doing it twice changes nothing.
        """
        request = plans_pb2.AssignPlanRequest(organization=organization, plan=plan, version=version, first_month=first_month)
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
        """Credit for what is billed from a month (`YYYY-MM`) on, by default this one, up to `last_month`.

        request_id: as in `create_organization`.
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
        """Credit of one organization or all, those that end first in front."""
        response = await self._call(self._stub.ListCreditGrants, plans_pb2.ListCreditGrantsRequest(organization=organization))
        return [wire.read(CreditGrant, each) for each in response.grants]

    async def get_credit_balance(self, organization: str) -> CreditBalance:
        """What there is of an organization's credit at this moment."""
        request = plans_pb2.GetCreditBalanceRequest(organization=organization)
        return wire.read(CreditBalance, await self._call(self._stub.GetCreditBalance, request))

    async def set_prepaid(self, organization: str, prepaid: bool, *, alert_at: Sequence[int] | None = None) -> bool:
        """Keeps an organization to its credit, or no longer; whether that was so before.

        alert_at: it alerts when so many picos of credit are left; None: as it stands, none at first.
        """
        thresholds = None if alert_at is None else types_pb2.AlertThresholds(values=alert_at)
        request = plans_pb2.SetPrepaidRequest(organization=organization, prepaid=prepaid, alert_at=thresholds)
        return (await self._call(self._stub.SetPrepaid, request)).existed

    async def set_price(
        self,
        model: str,
        *,
        input_picos_per_token: int,
        cached_input_picos_per_token: int,
        output_picos_per_token: int,
        embedding_picos_per_token: int | None = None,
        batch_multiplier_milli: int | None = None,
        organization: str = "",
        currency_code: str = "",
        effective_time: datetime | None = None,
        request_id: str | None = None,
    ) -> list[PriceVersion]:
        """Adds a price version, and one for the batch tier where that pays another price; tells them, the interactive one first.

        organization: whose own price it is; empty for the list. currency_code: empty for the organization's, or USD. The batch
        multiplier (thousandths) and the embedding price stay as they are where they are None. `effective_time` None: from now on;
        an aware datetime otherwise. request_id: as in `create_organization`.
        """
        request = admin_service_pb2.SetPriceRequest(
            model=model,
            currency_code=currency_code,
            input_picos_per_token=input_picos_per_token,
            cached_input_picos_per_token=cached_input_picos_per_token,
            output_picos_per_token=output_picos_per_token,
            embedding_picos_per_token=embedding_picos_per_token,
            batch_multiplier_milli=batch_multiplier_milli,
            organization=organization,
            effective_time=_stamp(effective_time),
            request_id=request_id or str(uuid.uuid4()),
        )
        response = await self._call(self._stub.SetPrice, request)
        return [wire.read(PriceVersion, each) for each in response.versions]

    async def withdraw_price(
        self, organization: str, model: str, *, effective_time: datetime | None = None, request_id: str | None = None
    ) -> list[PriceVersion]:
        """Ends an organization's own price of a model: from then on, or from now, it pays as the list says."""
        request = prices_pb2.WithdrawPriceRequest(
            organization=organization,
            model=model,
            effective_time=_stamp(effective_time),
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
        """What an organization, or the list, pays for which model and tier, where that comes from and since when.

        time: at another time than now. history: tells also every version there ever was and will be.
        """
        request = prices_pb2.ListPricesRequest(
            organization=organization, model=model, currency_code=currency_code, time=_stamp(time), history=history
        )
        return wire.read(PriceList, await self._call(self._stub.ListPrices, request))

    async def list_live_requests(self, organization: str = "", *, page_size: int = 200, stuck_only: bool = False) -> LiveView:
        """What runs in all processes, of one organization or all. stuck_only: holds that should have ended by themselves."""
        request = live_requests_pb2.ListLiveRequestsRequest(organization=organization, page_size=page_size, stuck_only=stuck_only)
        return wire.read(LiveView, await self._call(self._stub.ListLiveRequests, request))

    async def get_request(self, request_id: str, *, project: str = "") -> RecordedRequest:
        """What is recorded of a request of any project. project: needed where several have one of this id. Raises: NotFound."""
        request = live_requests_pb2.GetRequestRequest(request_id=request_id, project=project)
        return wire.read(RecordedRequest, await self._call(self._stub.GetRequest, request))

    async def kill_request(self, request_id: str, *, project: str = "", reason: str = "") -> KilledRequest:
        """Ends a request wherever it runs; its client is told the reason. Doing it twice changes nothing."""
        request = live_requests_pb2.KillRequestRequest(request_id=request_id, project=project, reason=reason)
        return wire.read(KilledRequest, await self._call(self._stub.KillRequest, request))

    async def end_overdue_holds(self) -> int:
        """Ends the holds whose time is over, as the worker does; tells how many."""
        response = await self._call(self._stub.EndOverdueHolds, live_requests_pb2.EndOverdueHoldsRequest())
        return response.ended_count

    async def apply_configuration(self, configuration: Mapping[str, Any], *, dry_run: bool = False) -> AppliedConfiguration:
        """Makes organizations, projects, keys, limits and prices what the configuration says, all or nothing.

        configuration: JSON mapping of `weir.v1.Configuration`. Raises: google.protobuf.json_format.ParseError if it is none.
        """
        request = configuration_pb2.ApplyConfigurationRequest(dry_run=dry_run)
        ParseDict(dict(configuration), request.configuration)
        # Not tried again by itself: the secrets of new keys are in the first answer only.
        return wire.read(AppliedConfiguration, await self._call(self._stub.ApplyConfiguration, request, idempotent=False))

    async def export_configuration(self, organization: str = "") -> dict[str, Any]:
        """The present state as a configuration, of one organization or all."""
        request = configuration_pb2.ExportConfigurationRequest(organization=organization)
        response = await self._call(self._stub.ExportConfiguration, request)
        exported: dict[str, Any] = MessageToDict(response.configuration, preserving_proto_field_name=True)
        return exported

    async def list_replicas(self, model: str = "") -> ReplicaList:
        """The engines of all models, in all processes; of one model or one `name@version` if it is given."""
        answer = await self._call(self._stub.ListReplicas, replicas_pb2.ListReplicasRequest(model=model))
        return wire.read(ReplicaList, answer)

    async def drain_replica(self, model: str, name: str, *, reason: str = "", move_after_s: float | None = None) -> DrainedReplica:
        """Takes a replica out of use in all processes. Doing it twice changes nothing.

        move_after_s: so long after the order, what still runs there is moved to other replicas, as far as it can be; None: it
        ends where it runs.
        """
        request = replicas_pb2.DrainReplicaRequest(model=model, replica=name, reason=reason)
        if move_after_s is not None:
            request.move_after.CopyFrom(_duration(move_after_s))
        answer = await self._call(self._stub.DrainReplica, request)
        return wire.read(DrainedReplica, answer)

    async def undrain_replica(self, model: str, name: str, *, reason: str = "") -> UndrainedReplica:
        """Puts a replica into use again. Doing it twice changes nothing."""
        request = replicas_pb2.UndrainReplicaRequest(model=model, replica=name, reason=reason)
        answer = await self._call(self._stub.UndrainReplica, request)
        return wire.read(UndrainedReplica, answer)

    async def set_alert_webhook(self, organization: str, url: str, *, request_id: str | None = None) -> CreatedAlertWebhook:
        """Posts an organization's alerts to a URL from now on, signed with a new secret.

        request_id: a UUID of your own; the same call with it again changes nothing, and its secret is empty.
        """
        request = alerts_pb2.SetAlertWebhookRequest(organization=organization, url=url, request_id=request_id or str(uuid.uuid4()))
        response = await self._call(self._stub.SetAlertWebhook, request)
        return wire.read(CreatedAlertWebhook, response)

    async def list_alert_webhooks(self, organization: str = "") -> list[AlertWebhook]:
        """All, or that of one organization."""
        response = await self._call(self._stub.ListAlertWebhooks, alerts_pb2.ListAlertWebhooksRequest(organization=organization))
        return [wire.read(AlertWebhook, each) for each in response.webhooks]

    async def delete_alert_webhook(self, organization: str, *, allow_missing: bool = False) -> bool:
        """Posts them nowhere; whether there was a webhook."""
        request = alerts_pb2.DeleteAlertWebhookRequest(organization=organization, allow_missing=allow_missing)
        return (await self._call(self._stub.DeleteAlertWebhook, request)).deleted

    async def test_alert_webhook(self, organization: str, *, request_id: str | None = None) -> Alert:
        """Has a test sent, which `list_alerts` tells the delivery of. request_id: a UUID of your own; again, it sends no other."""
        request = alerts_pb2.TestAlertWebhookRequest(organization=organization, request_id=request_id or str(uuid.uuid4()))
        return wire.read(Alert, (await self._call(self._stub.TestAlertWebhook, request)).alert)


class AdminClient(BlockingUnaryClient):
    """Manages who may use the service, and how much. See `AsyncAdminClient` for every call and its errors.

    >>> with AdminClient() as admin:
    ...     organization = admin.create_organization("example", allow_existing=True)
    ...     limit = admin.set_quota(QuotaSubject.ORGANIZATION, "example", QuotaDimension.TOKENS_PER_MONTH, 1_000_000)
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
    raise_quota = blocking(AsyncAdminClient.raise_quota)
    end_quota_raise = blocking(AsyncAdminClient.end_quota_raise)
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
    end_overdue_holds = blocking(AsyncAdminClient.end_overdue_holds)
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
