"""Clients of the admin API: tenants, keys, limits, prices, live requests, replicas, webhooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from weir.v1 import admin_service_pb2, configuration_pb2, plans_pb2

from weir_client import wire
from weir_client.blocking import blocking, blocking_items
from weir_client.generated_calls import AsyncAdminCalls, BlockingAdminCalls
from weir_client.generated_values import (
    AuditEntry,
    Plan,
    PlanAssignment,
    PlanList,
    QuotaStatus,
    SimulatedCustomer,
)
from weir_client.unary import items_of

ASSIGNMENTS_PER_PAGE = 1000


class AsyncAdminClient(AsyncAdminCalls):
    """Client of the admin API, which manages access and limits. Needs a key with the scope `admin`.

    You can name an organization, project or key by its name or id, as `organization/project`, or by
    the prefix of a key. Every call raises WeirError: NotFound for an unknown name, AlreadyExists
    for a taken one, InvalidRequest for a bad value.
    """

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

    async def _quota_pages(
        self,
        organization: str = "",
        *,
        end_user: str = "",
        label: str = "",
        quota_id: str = "",
        page_size: int = 100,
    ) -> AsyncIterator[list[QuotaStatus]]:
        """Yield the limits of one organization, its projects and keys, or all, with remainders.

        `end_user`, or `label` as "KEY=VALUE", selects the limits of this end user or label instead,
        even those that selectors give it; they need an organization. `quota_id` selects one limit.
        """
        request = admin_service_pb2.ListQuotasRequest(
            organization=organization,
            end_user=end_user,
            label=label,
            quota_id=quota_id,
            page_size=page_size,
        )
        async for page in self._pages(self._stub.ListQuotas, request):
            yield [wire.read(QuotaStatus, each) for each in page.quotas]

    list_quotas = items_of(_quota_pages)

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
        the changes made with this key, or by the person of this e-mail address; `action_prefix` the
        actions that begin with it. `start_time` (inclusive) and `end_time` (exclusive) are aware
        datetimes.
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
        async for page in self._pages(self._stub.ListAuditEntries, request):
            yield [wire.read(AuditEntry, each) for each in page.entries]

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

    async def list_plans(self, name: str = "", *, organization: str = "") -> PlanList:
        """Return plans, or the versions of one, and to which organizations they are assigned.

        `organization` selects assignments, by name or id.
        """
        request = plans_pb2.ListPlansRequest(
            name=name, organization=organization, page_size=ASSIGNMENTS_PER_PAGE
        )
        found = plans_pb2.ListPlansResponse()
        async for page in self._pages(self._stub.ListPlans, request):
            found.MergeFrom(page)
        return wire.read(PlanList, found)

    async def create_plan(self, plan: Mapping[str, Any]) -> Plan:
        """Create a plan or its next version; return the latest version if it is identical.

        `plan` is a JSON mapping of `weir.v1.PlanConfiguration`. Raises:
        google.protobuf.json_format.ParseError if it is malformed.
        """
        request = plans_pb2.CreatePlanRequest()
        ParseDict(dict(plan), request.plan)
        response = await self._call(self._stub.CreatePlan, request)
        return wire.read(Plan, response.plan, existed=response.existed)

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

    async def export_configuration(self, organization: str = "") -> dict[str, Any]:
        """Return the current state of one organization, or of all, as a configuration."""
        request = configuration_pb2.ExportConfigurationRequest(organization=organization)
        response = await self._call(self._stub.ExportConfiguration, request)
        exported: dict[str, Any] = MessageToDict(
            response.configuration, preserving_proto_field_name=True
        )
        return exported


class AdminClient(BlockingAdminCalls):
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

    end_quota_override = blocking(AsyncAdminClient.end_quota_override)
    delete_quota = blocking(AsyncAdminClient.delete_quota)
    list_quotas = blocking_items(AsyncAdminClient._quota_pages)
    list_key_quotas = blocking(AsyncAdminClient.list_key_quotas)
    list_audit_entries = blocking_items(AsyncAdminClient._audit_pages)
    simulate_prices = blocking(AsyncAdminClient.simulate_prices)
    list_plans = blocking(AsyncAdminClient.list_plans)
    create_plan = blocking(AsyncAdminClient.create_plan)
    assign_plan = blocking(AsyncAdminClient.assign_plan)
    export_configuration = blocking(AsyncAdminClient.export_configuration)
