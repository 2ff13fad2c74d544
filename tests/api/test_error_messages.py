"""Messages of all errors that clients receive: short, plain, with a remedy or a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from weir_client.status import error_from_status

from api.core.settings import Settings
from api.core.statuses import (
    CODES_BY_CLASS,
    as_sentence,
    link_to_docs,
    message_of,
    status_of,
)
from api.openai.error_responses import error_response, translate_terms
from api.openai.messages import error_body
from common.settings import SettingInvalid
from infra import prose
from infra.error_examples import examples, quota_examples
from metering.core.errors import DatabaseUnavailable, PriceMissing
from metering.core.models import QuotaDimension
from metering.quotas.quotas import QuotaExceeded

ROOT = Path(__file__).parents[2]
CHARS_MAX = 300
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-")
REMEDY = re.compile(
    r"\b(?:Use|Send|Ask|Check|Set|Allow|Attach|Wait|Start|Shorten|Split|Add|Change|Create|Close|Post"
    r"|Correct|Propose|Approve|Tell|Update|Generate|List|Request|Open|Run|Mend|Read|Complete"
    r"|must be|send|ask|set|choose|add|use|shorten|close|has to)\b"
)
# Classes whose texts are fragments: of a field, of a sentence, or for operators.
FRAGMENTS = {
    "InvalidRequest", "InvalidValue", "RequestImpossible", "ChatTemplateFailed", "HoldEnded",
    "CheckpointInvalid", "EngineStartFailed", "EngineUnavailable", "EngineOverloaded",
    "EngineFailed", "InvariantViolated", "StripeFailed", "SafetyUnavailable", "KeyBoundExceeded",
    "WriteConflict", "PermissionDenied", "NotFound", "AlreadyExists", "PromptFiltered",
    "ModelMismatch", "ModelUnknown", "PriceMissing", "ModelNotAllowed", "CallMissing",
    "BillingDetailsMissing", "RequestOver", "PreparationLimit", "ApprovalRefused",
    "DatabaseUnavailable",
}  # fmt: skip


def test_every_class_has_an_example() -> None:
    assert {type(each) for each in examples()} == CODES_BY_CLASS.keys()


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
def test_a_message_is_short_plain_and_says_what_to_do(error: Exception) -> None:
    message = status_of(error).message

    assert len(message) <= CHARS_MAX
    assert not any(each.value in message for each in QuotaDimension if "_" in each.value)
    assert not UUID.search(message)
    assert REMEDY.search(message) or re.search(r"Try again in [\d.]+ (s|min|h|days)\.$", message)
    rules = [each for each in prose.RULES if prose.Kind.MESSAGE in each.kinds]
    assert [rule.name for rule in rules if rule.pattern.search(message)] == []


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
def test_http_has_the_text_of_grpc(error: Exception) -> None:
    status = status_of(error)
    answer = error_response(status)

    assert answer.message == translate_terms({}, status.message) or answer.param


MESSAGES = (
    "This API key may make 3 requests per minute and has made 3. Try again in 54 s.",
    "This API key may run 2 requests at once and has 2 running. Try again in 1 s.",
    "This API key may use 1,000 tokens per minute and has 20 left; this request needs 64."
    " Try again in 54 s.",
    "This API key may use 1,000 input tokens per minute and has 20 left; this request needs 64."
    " Try again in 54 s.",
    "This API key may use 1,000 output tokens per minute and has 20 left; this request needs 64."
    " Try again in 54 s.",
    "This API key may use 50,000 tokens per day and has 10 left; this request needs 64."
    " Try again in 15 h.",
    "This API key may use 50,000 tokens per month and has 50,000 left; this request needs 64,000."
    " Send a smaller request, or ask an administrator to raise the limit.",
    "Your organization may spend 5.00 USD per day and has 0.001 USD left; this request may cost"
    " 0.019 USD. Try again in 15 h.",
    "Your organization may spend 250.00 USD per month and has 0.00 USD left; this request may cost"
    " 0.019 USD. Try again in 4 days.",
    "This API key may make 1,000 requests per week and has made 1,000. Try again in 3 days.",
    "Your organization may spend 1.00 USD per hour and has 0.001 USD left; this request may cost"
    " 0.019 USD. Try again in 30 min.",
    "Your organization has 0.000004 USD of prepaid credit left that no running request holds, and"
    " this request needs at least 0.000037 USD. Add credit; a retry will fail too.",
)


@pytest.mark.parametrize(("error", "message"), [*zip(quota_examples(), MESSAGES, strict=True)])
def test_a_limit_is_named_with_its_value_and_the_time(error: Exception, message: str) -> None:
    assert status_of(error).message == message


def test_every_measure_and_every_window_has_its_message() -> None:
    quotas = [each for each in quota_examples() if isinstance(each, QuotaExceeded)]
    states = [state for each in quotas[:3] for state in each.failing]

    measures, windows = (
        {dimension.partition("_per_")[part] for dimension in QuotaDimension} for part in (0, 2)
    )
    shown = [each.failing[0].dimension.partition("_per_") for each in quotas]
    assert {measure for measure, _, _ in shown} == measures
    assert {window for _, _, window in shown} == windows
    assert " 2 other limits are in the way too." in str(QuotaExceeded(states, [1, 1, 1], "USD"))


def test_a_text_of_an_engine_becomes_a_sentence() -> None:
    assert as_sentence("the engine's queue is full") == "The engine's queue is full."
    assert as_sentence("wk_1 proposed it: approve it!") == "wk_1 proposed it: approve it!"
    assert as_sentence("config.json: is missing") == "config.json: is missing."


@pytest.mark.parametrize(
    ("wait_s", "time"), [(0, "now"), (0.21, "in 0.3 s"), (54, "in 54 s"), (121, "in 3 min")]
)
def test_the_time_of_a_retry_is_rounded_up(wait_s: float, time: str) -> None:
    message = message_of(DatabaseUnavailable("no answer", wait_s))

    assert message == f"No answer. Try again {time}."


def raised_texts() -> Iterator[tuple[str, str]]:
    """Find the constant texts with which errors are built, by class and place."""
    names = {kind.__name__ for kind in CODES_BY_CLASS} - FRAGMENTS
    for folder in ("api", "inference", "metering"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(text))]):
                        pass
                    case ast.Call(func=ast.Name(id=name), args=[ast.JoinedStr(values=parts)]):
                        text = "".join(
                            str(each.value) if isinstance(each, ast.Constant) else "1"
                            for each in parts
                        )
                    case _:
                        continue
                if name in names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_the_texts_where_errors_are_raised_say_what_to_do() -> None:
    texts = dict(raised_texts())
    silent = {
        where: text
        for where, text in texts.items()
        if not REMEDY.search(text) or not text.endswith(".") or len(text) > CHARS_MAX
    }

    assert silent == {}
    assert len(texts) > 20


@pytest.mark.parametrize(
    ("site", "link"),
    [
        ("", "docs/reference/errors/PRICE_MISSING.md"),
        ("https://docs.acme.com/", "https://docs.acme.com/reference/errors/PRICE_MISSING.html"),
    ],
)
def test_an_error_links_to_the_page_of_its_reason(site: str, link: str) -> None:
    link_to_docs(site)
    try:
        status = status_of(PriceMissing("large", "EUR"))
    finally:
        link_to_docs("")
    answer, error = error_response(status), error_from_status(status)

    assert answer.body()["error"]["doc_url"] == link
    assert error_body(answer, "")["error"]["doc_url"] == link
    assert (error.doc_url, error.__notes__) == (link, [f"See {link}"])
    assert link not in str(error)


def test_the_address_of_the_documentation_is_checked() -> None:
    assert Settings.from_environment({"WEIR_DOCS_URL": "https://docs.acme.com"}).listen.docs

    with pytest.raises(SettingInvalid, match="WEIR_DOCS_URL"):
        Settings.from_environment({"WEIR_DOCS_URL": "docs.acme.com"})
