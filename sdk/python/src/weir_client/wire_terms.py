"""From the messages about prices to the client's values."""

from __future__ import annotations

from weir.v1 import prices_pb2 as pb

from weir_client import billing_terms
from weir_client.wire import TIERS, time_of

_SOURCES = {pb.AppliedPrice.SOURCE_LIST: "list", pb.AppliedPrice.SOURCE_ORGANIZATION: "organization"}


def price_version(message: pb.PriceVersion) -> billing_terms.PriceVersion:
    """One price version."""
    return billing_terms.PriceVersion(
        version=message.version,
        model=message.model,
        currency_code=message.currency_code,
        tier=TIERS.get(message.tier, ""),
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        input_picos_per_token=message.input_picos_per_token,
        cached_input_picos_per_token=message.cached_input_picos_per_token,
        output_picos_per_token=message.output_picos_per_token,
        embedding_picos_per_token=message.embedding_picos_per_token,
        multiplier_milli=message.multiplier_milli,
        effective_time=time_of(message.effective_time) if message.HasField("effective_time") else None,
        withdrawn=message.withdrawn,
    )


def price_list(message: pb.ListPricesResponse) -> billing_terms.PriceList:
    """What is paid, and the history."""
    return billing_terms.PriceList(
        prices=tuple(
            billing_terms.AppliedPrice(
                each.model, TIERS.get(each.tier, ""), _SOURCES.get(each.source, ""), price_version(each.version)
            )
            for each in message.prices
        ),
        versions=tuple(map(price_version, message.versions)),
    )
