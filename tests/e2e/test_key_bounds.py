"""Token limits of a key, in every kind of request: oversized requests are refused, never cut."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from grpc import StatusCode
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.calls import Calls
from tests.conftest import new_database
from tests.e2e.encoders import ENCODER, price_encoders
from tests.e2e.openai_clients import TO_THE_END, connect_async, user_message
from tests.inference.encoder_checkpoints import PLAIN_IDS as ENCODER_IDS
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.service import MODEL, PLAIN_IDS, Refusal, Service, Tenant, refused, running, start

MOST_IN, MOST_OUT = 12, 30

HOT = pb.Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def bounded(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a service with both kinds of models, which stores uses of keys only at drain."""
    encoder = make_random_encoder(tmp_path_factory.mktemp("encoder"))
    with (
        new_database(postgres_server, template=template_database) as url,
        running(
            Service(
                tmp_path_factory.mktemp("bounded"),
                url,
                model,
                encoders={ENCODER: encoder},
                key_use_interval_s=3600.0,
            )
        ) as service,
    ):
        yield service
        used = "SELECT count(*) AS n FROM api_key_uses"
        assert service.database.rows(used) == [{"n": 0}]
        assert service.stop() == 0, service.log[-4000:]
        assert service.database.rows(used)[0]["n"] >= 2


@pytest.fixture
async def key(bounded: Service) -> AsyncIterator[Key]:
    """Yield a key with both limits, and an admin."""
    tenant, admin = await bounded.tenant(), await bounded.tenant(scopes=("admin",))
    await price_encoders(bounded, ENCODER)
    async with bounded.channel() as channel:
        made = Key(bounded, tenant, Calls(channel, tenant.secret), Calls(channel, admin.secret))
        await made.update(max_input_tokens=MOST_IN, max_output_tokens=MOST_OUT)
        yield made


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a tenant, calls with it, and calls of an admin."""

    service: Service
    tenant: Tenant
    call: Calls
    admin: Calls

    @property
    def secret(self) -> str:
        return self.tenant.secret

    async def update(self, **fields: Any) -> admin_pb.ApiKey:
        """Change the key, as an admin."""
        answer = await self.admin("UpdateApiKey", api_key=self.tenant.key.prefix, **fields)
        return answer.api_key  # type: ignore[no-any-return]

    def embed(self, *lengths: int) -> Any:
        """Embed texts of this many tokens."""
        inputs = [
            pb.EmbedInput(token_ids=pb.TokenIds(ids=ENCODER_IDS[:length])) for length in lengths
        ]
        return pb.EmbedRequest(request_id=str(uuid.uuid4()), model=ENCODER, inputs=inputs)


def facts(refusal: Refusal) -> tuple[StatusCode, str, list[str], str, str]:
    """Return the facts of a refusal that a client reads."""
    values = refusal.info.metadata
    bounds = values["limit"], values["excess_token_count"]
    return (refusal.code, refusal.reason, refusal.fields, *bounds)


def by(field: str, limit: int, excess: int) -> tuple[StatusCode, str, list[str], str, str]:
    """Return the expected facts."""
    return StatusCode.INVALID_ARGUMENT, "KEY_LIMIT_EXCEEDED", [field], str(limit), str(excess)


async def test_too_much_input_is_refused_by_name_and_number_everywhere(key: Key) -> None:
    long = start(prompt=PLAIN_IDS[: MOST_IN + 3])
    async with key.service.stream(key.secret) as stream:
        generated = await stream.failed(await stream.begin(prompt=PLAIN_IDS[: MOST_IN + 3]))
        await stream.finished(await stream.begin(prompt=PLAIN_IDS[:MOST_IN]))
    embedded = await key.call.refused("Embed", key.embed(8, 8))
    quoted = await key.call.refused("Quote", start=long.start)
    quoted_embed = await key.call.refused("Quote", embed=key.embed(8, 8))
    fits = await key.call("Embed", key.embed(6, 6))
    counted = await key.call("CountTokens", model=MODEL, text="one two three " * 10)
    async with connect_async(key.service, key.secret) as client:
        with pytest.raises(openai.BadRequestError) as chat:
            await client.chat.completions.create(
                model=MODEL, messages=user_message("one two " * 15)
            )
        with pytest.raises(openai.BadRequestError) as list_of_texts:
            await client.embeddings.create(
                model=ENCODER, input=[list(ENCODER_IDS[:8]), list(ENCODER_IDS[:8])]
            )

    assert facts(generated) == by("prompt", MOST_IN, 3)
    assert facts(quoted) == by("prompt", MOST_IN, 3)
    assert facts(embedded) == facts(quoted_embed) == by("inputs", MOST_IN, 4)
    assert f"15 tokens, 3 more than the limit of {MOST_IN}" in generated.status.message
    assert fits.usage.embedding_token_count == MOST_IN
    assert counted.input_token_count > MOST_IN, "counting is how a client finds out"
    assert (chat.value.code, list_of_texts.value.code) == ("key_limit_exceeded",) * 2
    assert list_of_texts.value.param == "input"
    assert len(key.service.database.events(key.tenant)) == 2


async def test_too_much_output_is_refused_and_the_default_is_bounded(key: Key) -> None:
    async with key.service.stream(key.secret) as stream:
        more = await stream.failed(await stream.begin(max_output_tokens=MOST_OUT + 1))
        three = await stream.begin(max_output_tokens=11, choice_count=3, sampling=HOT)
        several = await stream.failed(three)
        many = await stream.begin(max_output_tokens=None)
        exact = await stream.begin(max_output_tokens=MOST_OUT)
        shared = await stream.begin(max_output_tokens=None, choice_count=4, sampling=HOT)
        ends = [await stream.finished(each) for each in (many, exact, shared)]
        admitted = [stream.of(each, "admitted")[0] for each in (many, exact, shared)]
    quoted = await key.call.refused("Quote", start=start(max_output_tokens=MOST_OUT + 1).start)
    quote = await key.call("Quote", start=start(max_output_tokens=None).start)
    async with connect_async(key.service, key.secret) as client:
        with pytest.raises(openai.BadRequestError) as chat:
            await client.chat.completions.create(
                model=MODEL, messages=user_message("a"), max_tokens=MOST_OUT + 5
            )
        answer = await client.chat.completions.create(
            model=MODEL, messages=user_message("a"), extra_body=TO_THE_END
        )

    assert facts(more) == facts(quoted) == by("max_output_tokens", MOST_OUT, 1)
    assert facts(several) == by("max_output_tokens", MOST_OUT, 3)
    assert [end.usage.delivered_token_count for end in ends] == [MOST_OUT, MOST_OUT, 28]
    assert {end.reason for end in ends} == {types_pb2.FINISH_REASON_LENGTH}
    assert [(each.max_output_token_count, each.limited_by_key) for each in admitted] == [
        (30, True),
        (30, False),
        (28, True),
    ]
    assert quote.max_output_token_count == MOST_OUT
    assert (chat.value.code, chat.value.param) == ("key_limit_exceeded", "max_tokens")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == MOST_OUT


async def test_a_running_request_is_not_raised_beyond_its_key(key: Key) -> None:
    """It is raised early: a limit has no effect on a request with all its output."""
    await key.update(max_output_tokens=3000)
    async with key.service.stream(key.secret) as stream:
        request_id = await stream.begin(max_output_tokens=2900, initial_credit_tokens=1)
        await stream.received(request_id, 1)
        for limit in (3001, 3000, 40):
            await stream.update(request_id, max_output_tokens=limit)
        await stream.credit(request_id, 4000)
        end = await stream.finished(request_id)
        refusal, taken, lowered = stream.of(request_id, "updated")

    assert facts(Refusal(refusal.refusal)) == by("update.max_output_tokens", 3000, 1)
    assert (taken.max_output_tokens, lowered.max_output_tokens) == (3000, 40)
    assert end.reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_key_knows_its_bounds_a_rotation_keeps_them_and_zero_lifts_them(key: Key) -> None:
    prefix = key.tenant.key.prefix
    own = (await key.call("GetQuota")).restrictions
    rotated = await key.admin("RotateApiKey", api_key=prefix)
    async with key.service.stream(rotated.secret) as stream:
        kept = await stream.failed(await stream.begin(max_output_tokens=MOST_OUT + 1))
    lifted = await key.update(max_output_tokens=0)
    wrong = await refused(key.update(max_input_tokens=-1))
    async with key.service.stream(rotated.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=MOST_OUT + 1))
    changes = await key.admin("ListAuditEntries", subject=prefix, action_prefix="api_key.update")
    [entry, *_] = changes.entries

    assert own.prefix == prefix
    assert (own.max_input_tokens, own.max_output_tokens) == (MOST_IN, MOST_OUT)
    assert facts(kept) == by("max_output_tokens", MOST_OUT, 1)
    assert (lifted.max_input_tokens, lifted.max_output_tokens) == (MOST_IN, 0)
    assert (wrong.code, wrong.fields) == (StatusCode.INVALID_ARGUMENT, ["max_input_tokens"])
    assert '"max_output_tokens": 30' in entry.before_json
    assert '"max_output_tokens": null' in entry.after_json
