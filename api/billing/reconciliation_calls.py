"""The call of `BillingService` that compares the stages of a month. What they are, and when two of them differ, is metering's."""

from __future__ import annotations

from weir.v1 import reconciliation_pb2 as pb

from api.billing.billing_calls import BillingCalls, visible_or_own
from api.core import wire
from api.core.interceptor import Context
from metering.export.month_reconciliation import reconciled_here
from metering.export.reconciliation import Difference, StageSum


class ReconciliationCalls(BillingCalls):
    """See `proto/weir/v1/reconciliation.proto`."""

    async def GetReconciliation(self, request: pb.GetReconciliationRequest, context: Context) -> pb.GetReconciliationResponse:
        """Compares the stages of a month, all at one moment."""
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible_or_own(session, reader, request.organization)
            found, is_exported = await reconciled_here(session, request.month, organization.id)
        return pb.GetReconciliationResponse(
            organization_name=organization.name,
            month=request.month,
            sums=map(sum_message, found.ours.sums),
            differences=map(difference_message, found.differences),
            exported=is_exported,
            due_time=wire.timestamp(found.ours.until),
        )


def sum_message(each: StageSum) -> pb.StageSum:
    """One price version and kind of token."""
    return pb.StageSum(
        model=each.model,
        tier=each.tier,
        price_version=each.price_version,
        token_kind=each.token_kind,
        used_token_count=each.used,
        posted_token_count=each.posted,
        billed_token_count=each.billed,
        invoiced_token_count=each.invoiced,
        due_token_count=each.due,
        batched_token_count=each.batched,
        delivered_token_count=each.delivered,
    )


def difference_message(each: Difference) -> pb.StageDifference:
    """One difference."""
    return pb.StageDifference(
        stage=each.stage,
        model=each.model,
        price_version=each.price_version or 0,
        token_kind=each.token_kind,
        token_count=each.token_count,
        amount=wire.money(each.currency_code, each.amount_picos) if each.currency_code else None,
        since_time=wire.timestamp(each.since),
        detail=each.detail,
        remedy=each.remedy,
    )
