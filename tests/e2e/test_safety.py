"""Safety stage of a service: blocked prompts are free, blocked outputs end before the match."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.conftest import new_database
from tests.e2e.guarded import check_filtered, output
from tests.service import PLAIN_IDS, Service, conversation, running

RULES = """
[[rule]]
name = "forbidden-topic"
pattern = 'forbidden\\s+topic'
applies_to = "prompt"

[[rule]]
name = "secret"
pattern = '\\bsecret \\d+'
applies_to = "output"
"""


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a service with rules."""
    home = tmp_path_factory.mktemp("guarded")
    rules = home / "rules.toml"
    rules.write_text(RULES)
    with new_database(postgres_server, template=template_database) as url:
        with running(Service(home, url, model, safety_rules=str(rules))) as service:
            yield service
            assert service.stop() == 0, service.log[-4000:]
        assert service.database.held_hold_count() == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "About a FORBIDDEN  topic, please"}, "text"),
        (
            {"conversation": conversation("Hello", "Hi", "the forbidden\ntopic")},
            "conversation.messages",
        ),
        ({"prompt": "ids"}, "token_ids.ids"),
    ],
)
async def test_a_forbidden_prompt_is_refused_before_anything_is_held(
    guarded: Service, fields: dict[str, object], field: str
) -> None:
    if "prompt" in fields:
        fields = {"prompt": guarded.tokenizer.encode("a forbidden topic")}

    await check_filtered(guarded, field, "forbidden-topic", **fields)


async def test_a_forbidden_output_ends_before_it_begins(guarded: Service) -> None:
    tenant = await guarded.tenant()

    async with guarded.stream(tenant.secret) as stream:
        request_id = await output(stream, "The code is secret 1234 and more.")
        finished = await stream.finished(request_id)

    text = stream.text(request_id)
    assert finished.reason == types_pb2.FINISH_REASON_FILTERED
    assert "The code is".startswith(text.rstrip()), "nothing of the secret, by text or by token"
    assert guarded.tokenizer.decode(tuple(stream.token_ids(request_id))) == text
    assert len(text) >= len("The code")
    delivered = len(stream.token_ids(request_id))
    assert finished.usage.billed_token_count == finished.usage.delivered_token_count == delivered
    assert finished.usage.generated_token_count > delivered
    event = guarded.database.event(tenant, request_id)
    assert (event["outcome"], event["delivered_token_count"]) == ("filtered", delivered)
    assert "secret 1" not in guarded.log


async def test_text_that_only_begins_like_a_match_passes_whole(guarded: Service) -> None:
    tenant = await guarded.tenant()

    async with guarded.stream(tenant.secret) as stream:
        request_id = await output(stream, "A secret garden. A secret")
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_STOP
    assert stream.text(request_id) == "A secret garden. A secret"
    assert (
        finished.usage.billed_token_count
        == len(stream.token_ids(request_id))
        == finished.usage.generated_token_count
    )


async def test_one_filtered_choice_ends_the_request(guarded: Service) -> None:
    tenant = await guarded.tenant()
    either = pb.ResponseFormat(regex="(secret 12345678|harmless [a-z]{200})")

    async with guarded.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            response_format=either,
            ignore_eos=None,
            max_output_tokens=250,
            choice_count=16,
            sampling=pb.Sampling(temperature=2.0, seed=1),
        )
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_FILTERED
    assert types_pb2.FINISH_REASON_FILTERED in {end.reason for end in finished.choices}
    texts = {
        i: "".join(d.text for d in stream.of(request_id, "delta") if d.choice_index == i)
        for i in range(16)
    }
    assert not any("secret 1" in text for text in texts.values())
    assert finished.usage.billed_token_count == len(stream.token_ids(request_id))


async def test_others_are_not_concerned(guarded: Service, service: Service) -> None:
    """Equal seeds give equal tokens with and without the stage."""
    answers = []
    for each in (guarded, service):
        tenant = await each.tenant()
        async with each.stream(tenant.secret) as stream:
            request_id = await stream.begin(
                prompt=PLAIN_IDS[:30],
                max_output_tokens=60,
                sampling=pb.Sampling(temperature=1.0, seed=4),
            )
            await stream.finished(request_id)
            answers.append((stream.token_ids(request_id), stream.text(request_id)))

    assert answers[0] == answers[1]
