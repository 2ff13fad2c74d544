"""The calls of the admin API about plans, prepaid credit and simulations."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict
from weir.v1 import plans_pb2 as pb
from weir.v1 import types_pb2

from weir_client import wire
from weir_client.admin_prices import AsyncPriceCalls
from weir_client.billing_terms import CreditBalance, CreditGrant, Plan, PlanAssignment, PlanList, SimulatedCustomer


class AsyncTermCalls(AsyncPriceCalls):
    """Part of `AsyncAdminClient`."""

    async def simulate_prices(self, month: str, proposal: Mapping[str, Any], *, organization: str = "") -> list[SimulatedCustomer]:
        """What a past month (`YYYY-MM`, UTC) would have come to with other prices or plans. Changes nothing.

        proposal: `prices` and `plans`, JSON mappings of `weir.v1.PriceConfiguration` and `PlanConfiguration`. Raises:
        google.protobuf.json_format.ParseError if it is none.
        """
        request = pb.SimulatePricesRequest()
        ParseDict(dict(proposal), request)
        request.month, request.organization = month, organization
        response = await self._call(self._stub.SimulatePrices, request)
        return [wire.read(SimulatedCustomer, each) for each in response.customers]

    async def create_plan(self, plan: Mapping[str, Any]) -> Plan:
        """A plan, or the next version of one; the latest version if that says the same.

        plan: JSON mapping of `weir.v1.PlanConfiguration`. Raises: google.protobuf.json_format.ParseError if it is none.
        """
        request = pb.CreatePlanRequest()
        ParseDict(dict(plan), request.plan)
        response = await self._call(self._stub.CreatePlan, request)
        return wire.read(Plan, response.plan, existed=response.existed)

    async def list_plans(self, name: str = "", *, organization: str = "") -> PlanList:
        """Plans, and who has which."""
        request = pb.ListPlansRequest(name=name, organization=organization)
        return wire.read(PlanList, await self._call(self._stub.ListPlans, request))

    async def assign_plan(self, organization: str, plan: str, *, version: int = 0, first_month: str = "") -> PlanAssignment:
        """Gives an organization a plan, by default its latest version, from a month (`YYYY-MM`) on, by default this one.

        An empty plan: none from then on. Doing it twice changes nothing.
        """
        request = pb.AssignPlanRequest(organization=organization, plan=plan, version=version, first_month=first_month)
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
        request = pb.GrantCreditRequest(
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
        response = await self._call(self._stub.ListCreditGrants, pb.ListCreditGrantsRequest(organization=organization))
        return [wire.read(CreditGrant, each) for each in response.grants]

    async def get_credit_balance(self, organization: str) -> CreditBalance:
        """What there is of an organization's credit at this moment."""
        request = pb.GetCreditBalanceRequest(organization=organization)
        return wire.read(CreditBalance, await self._call(self._stub.GetCreditBalance, request))

    async def set_prepaid(self, organization: str, prepaid: bool, *, alert_at: Sequence[int] | None = None) -> bool:
        """Keeps an organization to its credit, or no longer; whether that was so before.

        alert_at: it alerts when so many picos of credit are left; None: as it stands, none at first.
        """
        thresholds = None if alert_at is None else types_pb2.AlertThresholds(values=alert_at)
        request = pb.SetPrepaidRequest(organization=organization, prepaid=prepaid, alert_at=thresholds)
        return (await self._call(self._stub.SetPrepaid, request)).existed
