"""Encoders of end-to-end tests, and their price."""

from __future__ import annotations

from metering.pricing.prices import PriceTerms, set_price
from tests.service import Service

ENCODER = "encoder"
PICOS = 20_000  # a token


async def price_encoders(service: Service, *names: str) -> None:
    """Set the price of a token to embed for these encoders."""
    async with service.session() as session:
        for name in names:
            terms = PriceTerms(
                model=name,
                input_picos_per_token=0,
                cached_input_picos_per_token=0,
                output_picos_per_token=0,
                embedding_picos_per_token=PICOS,
            )
            await set_price(session, terms, actor="test")
