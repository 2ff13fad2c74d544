"""What a key may ask about itself: the models that it may use at which prices, and single requests of its project."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.core.messages import input_count_max, receipt_messages
from inference.engine import ModelInfo
from inference.routing.router import Router
from metering.core.models import Hold, HoldState, UsageEvent
from metering.pricing.prices import CustomerPrice, customer_prices, versions_in_force
from metering.receipts.months import receipts_of_hold
from metering.reports.usage_reports import find_recorded_request
from metering.store.db import Sessions
from metering.tenants.tenants import Principal

STATES = {
    HoldState.HELD: pb.Generation.STATE_RUNNING,
    HoldState.SETTLED: pb.Generation.STATE_SETTLED,
    HoldState.VOIDED: pb.Generation.STATE_VOIDED,
    HoldState.EXPIRED: pb.Generation.STATE_EXPIRED,
}


async def models_for(router: Router, sessions: Sessions, principal: Principal) -> list[pb.Model]:
    """The models that the caller may use, with what it pays for them."""
    owner = principal.organization_id
    async with sessions() as session:
        found = await versions_in_force(session, currency_code=principal.currency_code, organization_id=owner)
    paid = customer_prices(found, owner)
    return [
        model_message(model, [price_message(each) for each in paid if each.price.model == model.name], router)
        for model in router.models()
        if principal.may_use(model.name)
    ]


def model_message(model: ModelInfo, prices: Sequence[pb.Price], router: Router) -> pb.Model:
    """One model that can be asked for. prices: what the caller pays for it, by tier, the interactive one first."""
    replicas = router.replicas(model.name)
    return wire.message_of(
        pb.Model,
        model,
        price=prices[0] if prices else None,
        tier_prices=prices,
        task=pb.MODEL_TASK_EMBED if model.embedding_dimension else pb.MODEL_TASK_GENERATE,
        embedding_input_count_max=input_count_max(model),
        aliases=router.aliases(model.name),
        versions=[pb.ModelVersion(version=version, share=share) for version, share in router.versions(model.name).items()],
        ready_replica_count=replicas.ready,
        replica_count=replicas.total,
        drained_replica_count=replicas.drained,
    )


def price_message(paid: CustomerPrice) -> pb.Price:
    is_own = paid.price.organization_id is not None
    return wire.message_of(pb.Price, paid.price.prices, effective_time=paid.price.effective_at, tier=paid.tier, own=is_own)


def restrictions(principal: Principal) -> pb.KeyRestrictions:
    """What the key itself is good for."""
    lifetime_s, bounds = principal.secret_lifetime_s, principal.bounds
    return pb.KeyRestrictions(
        prefix=principal.key_prefix,
        scopes=sorted(principal.scopes),
        models=sorted(principal.models),
        allowed_networks=map(str, principal.networks),
        max_input_tokens=bounds.max_input_tokens or 0,
        max_output_tokens=bounds.max_output_tokens or 0,
        secret_expire_time=None if lifetime_s is None else wire.timestamp(datetime.now(UTC) + timedelta(seconds=lifetime_s)),
    )


async def find_generation(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> pb.Generation:
    """What is recorded of one request. Raises: NotFound if the project has no such request."""
    hold, currency_code, events = await find_recorded_request(session, project_id, request_id)
    generation = pb.Generation(
        request_id=str(request_id),
        state=STATES[HoldState(hold.state)],
        model=hold.model,
        admit_time=wire.timestamp(hold.admitted_at),
        usage=running_usage(hold) if hold.state == HoldState.HELD else total_usage(events),
        labels={str(key): str(value) for key, value in hold.labels.items()},
        receipts=receipt_messages(await receipts_of_hold(session, hold.id)),
    )
    if hold.ended_at is not None:
        generation.settle_time.CopyFrom(wire.known_time(hold.ended_at))
        generation.cost.CopyFrom(wire.money(currency_code, sum(event.cost_picos for event in events)))
    if events:
        generation.outcome = events[-1].outcome.upper()
        generation.migration_count = sum(event.migration_count for event in events)
        if events[0].timings is not None:
            generation.timings.CopyFrom(types_pb2.Timings(**events[0].timings))
    return generation


def running_usage(hold: Hold) -> types_pb2.Usage:
    """What the database knows of a request that runs: the counts of its last extension."""
    if hold.embedding:
        return types_pb2.Usage(embedding_token_count=hold.input_token_count)
    return types_pb2.Usage(
        input_token_count=hold.input_token_count,
        cached_input_token_count=hold.cached_input_token_count,
        generated_token_count=hold.delivered_token_count,
        delivered_token_count=hold.delivered_token_count,
    )


def total_usage(events: Sequence[UsageEvent]) -> types_pb2.Usage:
    names = types_pb2.Usage.DESCRIPTOR.fields_by_name
    return types_pb2.Usage(**{name: sum(getattr(event, name) for event in events) for name in names})
