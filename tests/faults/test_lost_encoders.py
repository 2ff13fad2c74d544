"""One of several encoders is killed within a batch: each call is answered and billed once."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from weir.v1 import admin_service_pb2_grpc, replicas_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.core.settings import bundled_models
from metering.pricing.prices import PriceTerms, set_price
from tests.conftest import new_database
from tests.forked_workers import children_of
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.service import PATIENCE_S, Service, bearer, running

pytestmark = pytest.mark.faults

MODEL = "encoder"
PICOS = 20_000
FLEET = """
models:
  {model}: {{engine: encoder, directory: {directory}, replicas: {{min: 2, max: 2}}}}
"""
CALLS = [
    [f"the garden number {call} is near the sea", "a hotel with breakfast", f"room {call}"]
    for call in range(8)
]


def encoder_pids(service: Service) -> list[int]:
    """Return the ids of the encoder processes."""
    return children_of(service.pid, "inference.encoder.worker")


async def test_calls_outlive_the_encoder_that_had_them_and_are_billed_once(
    tmp_path: Path, postgres_server: str, template_database: str
) -> None:
    """Both are suspended until each has calls; then one is killed, and the other continues."""
    directory = make_random_encoder(tmp_path / "encoder")
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(model=MODEL, directory=directory))
    with new_database(postgres_server, template=template_database) as url:
        service = Service(
            tmp_path / "home",
            url,
            directory,
            models=bundled_models(),
            fleet=str(file),
            hold_expiry_s=3600.0,
        )
        with running(service):
            tenant, admin = await service.tenant(), (await service.tenant(scopes=("admin",))).secret
            async with service.session() as session:
                prices = dict.fromkeys(("input", "cached_input", "output"), 0) | {
                    "embedding": PICOS
                }
                per_token: dict[str, Any] = {
                    f"{kind}_picos_per_token": picos for kind, picos in prices.items()
                }
                await set_price(session, PriceTerms(model=MODEL, **per_token), actor="test")
            async with service.channel() as channel:
                stub: Any = pb_grpc.InferenceServiceStub(channel)
                control: Any = admin_service_pb2_grpc.AdminServiceStub(channel)

                async def embed(texts: list[str]) -> pb.EmbedResponse:
                    inputs = [pb.EmbedInput(text=text) for text in texts]
                    request = pb.EmbedRequest(
                        request_id=str(uuid.uuid4()), model=MODEL, inputs=inputs
                    )
                    answer: pb.EmbedResponse = await stub.Embed(
                        request, metadata=bearer(tenant.secret), timeout=PATIENCE_S
                    )
                    return answer

                async def call_counts(state: Any = replicas_pb2.REPLICA_STATE_READY) -> list[int]:
                    reported = await control.ListReplicas(
                        replicas_pb2.ListReplicasRequest(),
                        metadata=bearer(admin),
                        timeout=PATIENCE_S,
                    )
                    return [each.request_count for each in reported.replicas if each.state == state]

                async with asyncio.timeout(PATIENCE_S):
                    while await call_counts() != [0, 0]:
                        pass
                undisturbed = [await embed(texts) for texts in CALLS]
                pids = encoder_pids(service)
                assert len(pids) == 2
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                calls = [asyncio.create_task(embed(texts)) for texts in CALLS]
                async with asyncio.timeout(PATIENCE_S):
                    while [count > 0 for count in await call_counts()] != [True, True]:
                        pass
                os.kill(pids[0], signal.SIGKILL)
                os.kill(pids[1], signal.SIGCONT)
                answers = await asyncio.gather(*calls)
                async with asyncio.timeout(PATIENCE_S):
                    while await call_counts() != [0, 0]:  # the killed one is back
                        pass

            for answer, true in zip(answers, undisturbed, strict=True):
                assert (answer.usage, answer.cost) == (true.usage, true.cost)
                assert answer.cost.picos == answer.usage.embedding_token_count * PICOS
                for reported, expected in zip(answer.embeddings, true.embeddings, strict=True):
                    assert list(reported.vector) == pytest.approx(list(expected.vector), abs=1e-5)
            await service.no_hold_left(tenant)
            billed = [event["embedding_token_count"] for event in service.database.events(tenant)]
            assert sorted(billed) == sorted(
                2 * [answer.usage.embedding_token_count for answer in answers]
            )
            assert service.stop() == 0, service.log[-4000:]
            assert service.database.held_hold_count() == 0
