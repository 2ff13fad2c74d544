"""The calls of the admin API about prices."""

from __future__ import annotations

import uuid
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import prices_pb2 as pb

from weir_client import wire
from weir_client.admin_live import AsyncLiveCalls
from weir_client.alerts import AsyncAlertWebhookCalls
from weir_client.billing_terms import PriceList, PriceVersion


class AsyncPriceCalls(AsyncLiveCalls, AsyncAlertWebhookCalls):
    """Part of `AsyncAdminClient`."""

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
        request = admin_pb.SetPriceRequest(
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
        request = pb.WithdrawPriceRequest(
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
        request = pb.ListPricesRequest(
            organization=organization, model=model, currency_code=currency_code, time=_stamp(time), history=history
        )
        return wire.read(PriceList, await self._call(self._stub.ListPrices, request))


def _stamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(time)
    return stamp
