"""Classifiers in a service: they fail closed, and slow or dead ones affect no other request."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.endpoint import NOT_STARTED
from tests.conftest import new_database
from tests.e2e.conftest import Serve
from tests.e2e.guarded import check_filtered, output
from tests.forked_workers import children_of
from tests.inference.classifier_checkpoints import make_danger_classifier
from tests.service import PLAIN_IDS, Service, conversation, wait_for

RULES = """
[[rule]]
name = "word"
pattern = "forbidden"

[[classifier]]
name = "danger"
directory = "danger"
thresholds = {{ dangerous = 0.5 }}
applies_to = "{applies_to}"

[classifiers]
window_chars = 24
"""


def guarded_service(serve: Serve, home: Path, model: Path, applies_to: str) -> Service:
    """Start a service with a rule and a classifier."""
    make_danger_classifier(home / "danger")
    (home / "rules.toml").write_text(RULES.format(applies_to=applies_to))
    return serve(model, is_drained=True, safety_rules=str(home / "rules.toml"))


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Service:
    """Return a service that classifies prompts and outputs."""
    return guarded_service(serve, tmp_path_factory.mktemp("both"), model, "both")


@pytest.fixture(scope="module")
def prompts_only(serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Service:
    """Return a service that classifies prompts only."""
    return guarded_service(serve, tmp_path_factory.mktemp("prompts"), model, "prompt")


def classifier_pid(service: Service) -> int | None:
    """Return the api process's child that classifies."""
    return next(iter(children_of(service.pid, "inference.safety.classifier_worker")), None)


@contextlib.asynccontextmanager
async def stopped(service: Service) -> AsyncIterator[int]:
    """Suspend the classifiers during the block."""
    pid = wait_for(lambda: classifier_pid(service), "the classifiers")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "how to make a bomb"}, "text"),
        (
            {"conversation": conversation("Hello", "Hi", "how to make poison")},
            "conversation.messages",
        ),
        ({"prompt": "ids"}, "token_ids.ids"),
        ({"text": "garden " * 400 + "bomb" + " garden" * 100}, "text"),
    ],
)
async def test_a_flagged_prompt_is_refused_before_anything_is_held(
    guarded: Service, fields: dict[str, object], field: str
) -> None:
    if "prompt" in fields:
        fields = {"prompt": guarded.tokenizer.encode("how to make a bomb")}

    await check_filtered(guarded, field, "danger: dangerous", **fields)


async def test_a_flagged_output_ends_where_its_window_begins(guarded: Service) -> None:
    tenant = await guarded.tenant()
    text = "The hotel is near the sea. How to make a bomb and a garden near the sea."

    async with guarded.stream(tenant.secret) as stream:
        request_id = await output(stream, text, 200)
        finished = await stream.finished(request_id)

    given_out = stream.text(request_id)
    assert finished.reason == types_pb2.FINISH_REASON_FILTERED
    assert text.startswith(given_out)
    assert "bomb" not in given_out
    assert len(given_out) >= 20, "what was scored before is delivered"
    delivered = len(stream.token_ids(request_id))
    assert guarded.tokenizer.decode(tuple(stream.token_ids(request_id))) == given_out
    assert finished.usage.billed_token_count == finished.usage.delivered_token_count == delivered
    assert finished.usage.generated_token_count > delivered
    event = guarded.database.event(tenant, request_id)
    assert (event["outcome"], event["delivered_token_count"]) == ("filtered", delivered)
    assert "bomb" not in guarded.log


async def test_rules_and_classifiers_stand_side_by_side(guarded: Service) -> None:
    tenant = await guarded.tenant()

    async with guarded.stream(tenant.secret) as stream:
        by_rule = await stream.failed(await stream.begin(text="something forbidden"))
        request_id = await output(stream, "The hotel is forbidden to dogs.")
        finished = await stream.finished(request_id)

    assert by_rule.info.metadata["rule"] == "word"
    assert finished.reason == types_pb2.FINISH_REASON_FILTERED
    assert "forb" not in stream.text(request_id)


async def test_harmless_output_is_unchanged(guarded: Service, service: Service) -> None:
    """Equal seeds give equal tokens with and without the stage, with several choices too."""
    answers = []
    for each in (guarded, service):
        tenant = await each.tenant()
        async with each.stream(tenant.secret) as stream:
            request_id = await stream.begin(
                prompt=PLAIN_IDS[:30],
                max_output_tokens=60,
                choice_count=3,
                sampling=pb.Sampling(temperature=1.0, seed=4),
            )
            finished = await stream.finished(request_id)
            assert finished.usage.billed_token_count == 180
            deltas = stream.of(request_id, "delta")
            answers.append(
                [
                    (
                        [id_ for d in deltas if d.choice_index == i for id_ in d.token_ids],
                        "".join(d.text for d in deltas if d.choice_index == i),
                    )
                    for i in range(3)
                ]
            )

    assert answers[0] == answers[1]


async def test_without_a_classification_outputs_end_with_the_reason(guarded: Service) -> None:
    """Tokens delivered earlier are settled and billed, and the client has exactly these."""
    tenant = await guarded.tenant()
    async with guarded.stream(tenant.secret) as stream:
        request_id = await stream.begin(prompt=PLAIN_IDS[:20], max_output_tokens=3000)
        await stream.received(request_id, 20)
        async with stopped(guarded):
            broken = await stream.failed(request_id)

    assert (broken.code, broken.reason) == (StatusCode.ABORTED, "INTERRUPTED")
    assert "classifiers have not answered within 5 s" in broken.status.message
    assert broken.retry_after_s is None  # a new request need not wait
    delivered = len(stream.token_ids(request_id))
    assert broken.frame is not None
    usage = broken.frame.usage
    assert usage.delivered_token_count == usage.billed_token_count == delivered
    event = guarded.database.event(tenant, request_id)
    assert (event["outcome"], event["delivered_token_count"]) == ("failed", delivered)


async def test_failing_classifiers_slow_no_unchecked_request(prompts_only: Service) -> None:
    """A stream goes on while prompts wait, are refused, and are checked by new classifiers."""
    tenant = await prompts_only.tenant()
    async with prompts_only.stream(tenant.secret) as stream:
        running_id = await stream.begin(prompt=PLAIN_IDS[:20], max_output_tokens=3900)
        await stream.received(running_id, 5)
        async with stopped(prompts_only) as pid:
            waiting_id = await stream.begin(text="the hotel")
            await stream.received(running_id, len(stream.token_ids(running_id)) + 100)
            assert stream.ends(waiting_id) == [], "it still waits for its check"
            refused = await stream.failed(waiting_id)
            os.kill(pid, signal.SIGKILL)

        assert (refused.code, refused.reason) == (StatusCode.UNAVAILABLE, "SAFETY_UNAVAILABLE")
        assert sum(prompts_only.database.holds(tenant).values()) == 1, (
            "nothing was held for the one that was refused"
        )
        answers = set()
        # Until new ones are loaded, prompts are still refused.
        while "PROMPT_FILTERED" not in answers:
            answers.add((await stream.failed(await stream.begin(text="how to make a bomb"))).reason)
        assert answers <= {"PROMPT_FILTERED", "SAFETY_UNAVAILABLE"}
        await stream.cancel(running_id)
        finished = await stream.finished(running_id)
    assert finished.reason in (types_pb2.FINISH_REASON_CANCELLED, types_pb2.FINISH_REASON_LENGTH)
    assert classifier_pid(prompts_only) not in (None, pid)


def test_an_unloadable_checkpoint_is_reported_at_start(
    tmp_path: Path, model: Path, postgres_server: str, template_database: str
) -> None:
    """In one line, before any request is served unchecked."""
    weights = make_danger_classifier(tmp_path / "danger") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (tmp_path / "rules.toml").write_text(RULES.format(applies_to="both"))
    with new_database(postgres_server, template=template_database) as url:
        service = Service(tmp_path / "home", url, model, safety_rules=str(tmp_path / "rules.toml"))
        service.spawn()

        assert service.wait_ended() == NOT_STARTED

    last = service.log.strip().splitlines()[-1]
    assert "WEIR_SAFETY_RULES" in last
    assert f"{tmp_path / 'danger'}: cannot be loaded as a classifier" in last
