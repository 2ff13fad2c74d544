"""A model on another machine: received tokens are billed, even if that machine dies meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from weir.v1 import types_pb2

from inference.adapters.remote_settings import Service as Wire
from metering.core.models import QuotaDimension
from tests.faults.conftest import Start
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import server_process
from tests.service import MODEL, PLAIN_IDS, cost_picos, picos, until

pytestmark = pytest.mark.faults


async def test_what_another_machine_generates_is_billed_to_the_token(launch: Start, model: Path, tmp_path: Path) -> None:
    """Before its death, at its death, and after its return at the same address."""
    certificates = make_certificates(tmp_path / "certificates")
    with server_process(model, certificates) as server:
        targets = {MODEL: str(server.target(Wire.TRTLLM))}
        service = launch(engine_backend="remote", remote_targets=targets)
        tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100_000})
        prompt = list(PLAIN_IDS[:100])
        async with service.stream(tenant.secret) as stream:
            first_id = await stream.begin(prompt=prompt, max_output_tokens=60)
            first = await stream.finished(first_id)
            second = await stream.finished(await stream.begin(prompt=prompt, max_output_tokens=60))
            dying_id = await stream.begin(max_output_tokens=3000)
            await stream.received(dying_id, 20)
            server.process.kill()
            failed = await stream.failed(dying_id)
    assert service.host_pid is None, "the service has no engine of its own"

    port = int(server.address.rpartition(":")[2])
    with server_process(model, certificates, port=port):
        await until(service.serving, "the engine to be found again")
        async with service.stream(tenant.secret) as again:
            third_id = await again.begin(prompt=prompt, max_output_tokens=60)
            third = await again.finished(third_id)
        await service.no_hold_left(tenant)
        await asyncio.to_thread(service.stop)

    tokens = stream.token_ids(first_id)
    assert again.token_ids(third_id) == tokens
    assert stream.text(first_id) == service.tokenizer.decode(tuple(tokens))
    assert [each.usage.cached_input_token_count for each in (first, second, third)] == [0, 96, 0]
    for each in (first, second, third):
        assert each.reason == types_pb2.FINISH_REASON_LENGTH
        assert each.usage.billed_token_count == each.usage.generated_token_count == each.usage.delivered_token_count == 60
        assert picos(each.cost) == cost_picos(each.usage)
    assert failed.frame is not None
    assert failed.frame.usage.delivered_token_count == len(stream.token_ids(dying_id)) >= 20
    billed = {str(event["request_id"]): event["billed_token_count"] for event in service.books.events(tenant)}
    assert billed[dying_id] == len(stream.token_ids(dying_id))
    assert sum(billed.values()) == 3 * 60 + len(stream.token_ids(dying_id))
