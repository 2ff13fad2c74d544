"""Requests to services with a safety stage, for its tests with rules and with classifiers."""

from __future__ import annotations

from typing import Any

from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb

from metering.core.models import QuotaDimension
from tests.service import Service, Stream


async def check_filtered(service: Service, field: str, rule: str, **fields: Any) -> None:
    """Check that a prompt is refused by its field and rule, before anything is held."""
    tenant = await service.tenant({QuotaDimension.REQUESTS_PER_MINUTE: 5})

    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(**fields))

    assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "PROMPT_FILTERED")
    assert refusal.fields == [field]
    assert refusal.info.metadata["rule"] == rule
    assert service.database.holds(tenant) == {}
    assert service.database.counters(tenant).get("requests_per_minute", (0, 0)) == (0, 0)


async def output(stream: Stream, text: str, max_output_tokens: int = 90) -> str:
    """Begin a request whose model outputs a text, in any tokens; return its id."""
    wanted = pb.ResponseFormat(regex=text.replace(".", "[.]"))
    return await stream.begin(
        response_format=wanted, ignore_eos=None, max_output_tokens=max_output_tokens
    )
