"""The calls of `AdminService` about prices: set, end, and tell who pays what and why."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import prices_pb2 as pb

from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.interceptor import Context
from metering.core.models import Organization
from metering.pricing import prices
from metering.pricing.prices import CustomerPrice, ModelPrice
from metering.tenants.tenants import find_organization

Names = Mapping[uuid.UUID, str]


class PriceCalls(AdminCalls):
    """See `proto/weir/v1/prices.proto`."""

    async def SetPrice(self, request: admin_pb.SetPriceRequest, context: Context) -> admin_pb.SetPriceResponse:
        """Adds a price version, and one for the batch tier where that pays another price."""
        effective_at = given_time(request.effective_time, present=request.HasField("effective_time"), field="effective_time")
        has_embedding, has_multiplier = request.HasField("embedding_picos_per_token"), request.HasField("batch_multiplier_milli")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price = await prices.set_price(
                    acting.session,
                    model=request.model,
                    currency_code=request.currency_code,
                    input_picos_per_token=request.input_picos_per_token,
                    cached_input_picos_per_token=request.cached_input_picos_per_token,
                    output_picos_per_token=request.output_picos_per_token,
                    embedding_picos_per_token=request.embedding_picos_per_token if has_embedding else None,
                    organization=request.organization,
                    batch_multiplier_milli=request.batch_multiplier_milli if has_multiplier else None,
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.made(request, price.prices.version)
            written = await prices.written_with(acting.session, price)
            names = await organization_names(acting.session, written)
            return admin_pb.SetPriceResponse(version=price.prices.version, versions=version_messages(written, names))

    async def WithdrawPrice(self, request: pb.WithdrawPriceRequest, context: Context) -> pb.WithdrawPriceResponse:
        """Ends an own price."""
        effective_at = given_time(request.effective_time, present=request.HasField("effective_time"), field="effective_time")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price, *_ = await prices.withdraw_price(
                    acting.session,
                    model=request.model,
                    organization=request.organization,
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.made(request, price.prices.version)
            written = await prices.written_with(acting.session, price)
            return pb.WithdrawPriceResponse(versions=version_messages(written, await organization_names(acting.session, written)))

    async def ListPrices(self, request: pb.ListPricesRequest, context: Context) -> pb.ListPricesResponse:
        """Tells who pays what, where that comes from and since when."""
        at = given_time(request.time, present=request.HasField("time"), field="time")
        async with self._transaction(context) as (session, _):
            owner = await find_organization(session, request.organization) if request.organization else None
            owner_id = None if owner is None else owner.id
            currency_code = request.currency_code or (owner.currency_code if owner else None)
            model = request.model or None
            found = await prices.versions_in_force(
                session, model=model, currency_code=currency_code, organization_id=owner_id, at=at
            )
            history: list[ModelPrice] = []
            if request.history:
                history = await prices.price_history(session, model=model, currency_code=currency_code, organization_id=owner_id)
            names = {} if owner is None else {owner.id: owner.name}
            return pb.ListPricesResponse(
                prices=[applied_message(each, names) for each in prices.customer_prices(found, owner_id)],
                versions=version_messages(history, names),
            )


async def organization_names(session: AsyncSession, versions: Collection[ModelPrice]) -> dict[uuid.UUID, str]:
    """Of the customers whose own prices are among the versions."""
    owners = {each.organization_id for each in versions if each.organization_id is not None}
    rows = await session.execute(select(Organization.id, Organization.name).where(Organization.id.in_(owners)))
    return {row.id: row.name for row in rows}


def version_messages(versions: Iterable[ModelPrice], names: Names) -> list[pb.PriceVersion]:
    """Price versions. names: by organization."""
    return [version_message(each, names) for each in versions]


def version_message(version: ModelPrice, names: Names) -> pb.PriceVersion:
    """One price version."""
    owner = version.organization_id
    return pb.PriceVersion(
        version=version.prices.version,
        model=version.model,
        currency_code=version.prices.currency_code,
        tier=wire.TIER_NUMBERS[version.tier],
        organization_id="" if owner is None else str(owner),
        organization_name="" if owner is None else names[owner],
        input_picos_per_token=version.prices.input_picos_per_token,
        cached_input_picos_per_token=version.prices.cached_input_picos_per_token,
        output_picos_per_token=version.prices.output_picos_per_token,
        embedding_picos_per_token=version.prices.embedding_picos_per_token,
        multiplier_milli=version.multiplier_milli,
        effective_time=wire.timestamp(version.effective_at),
        withdrawn=version.withdrawn,
    )


def applied_message(applied: CustomerPrice, names: Names) -> pb.AppliedPrice:
    """What somebody pays in a tier."""
    is_own = applied.price.organization_id is not None
    return pb.AppliedPrice(
        model=applied.price.model,
        tier=wire.TIER_NUMBERS[applied.tier],
        source=pb.AppliedPrice.SOURCE_ORGANIZATION if is_own else pb.AppliedPrice.SOURCE_LIST,
        version=version_message(applied.price, names),
    )


def given_time(message: Timestamp, *, present: bool, field: str) -> datetime | None:
    """A time of a request; None if it is unset. Raises: InvalidRequest."""
    return wire.parse_timestamp(message, field) if present else None
