"""Messages of all errors that clients receive: short, plain, with a remedy or a time."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2
from weir_client.status import error_from_status

from api.core.errors import Interrupted
from api.core.settings import Settings
from api.core.statuses import (
    CODES_BY_CLASS,
    FOR_OPERATORS,
    as_sentence,
    link_to_docs,
    message_of,
    retry_after_of,
    status_of,
)
from api.generation.request.readiness import interrupted
from api.openai.error_responses import (
    FAULT_REASONS,
    ErrorResponse,
    HttpFault,
    detail_of,
    error_response,
    translate_terms,
)
from api.openai.messages import error_body
from common.settings import SettingInvalid
from infra import prose
from infra.error_examples import examples, http_examples, quota_examples
from metering.core.errors import DatabaseUnavailable, PriceMissing
from metering.core.models import QuotaDimension
from metering.quotas.quotas import QuotaExceeded

ROOT = Path(__file__).parents[2]
CHARS_MAX = 300
FILE, PAGE = (
    f"{each}/PRICE_MISSING.{end}"
    for each, end in (("docs/reference/errors", "md"), ("reference/errors", "html"))
)
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-")
REMEDY = re.compile(
    r"\b(?:Use|Send|Ask|Check|Set|Allow|Attach|Wait|Start|Shorten|Split|Add|Change|Create|Close|Post"
    r"|Correct|Propose|Approve|Tell|Update|Generate|List|Request|Open|open|Run|Mend|Read|Complete"
    r"|Sign in|Another person|must be|send|ask|set|choose|add|use|shorten|close|has to)\b"
)
# A description of a field says what is allowed or what to do: "must be a day", "…: leave it out".
ALLOWED = re.compile(r"\bmust\b|is required|(?::|;|,) (?:and )?[a-z`1]+")


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


@pytest.mark.parametrize("fault", http_examples(), ids=lambda fault: fault.refusal.code)
@pytest.mark.parametrize("form", [ErrorResponse.body, error_body])
def test_an_error_that_begins_in_http_is_like_the_others(
    fault: HttpFault, form: Callable[[ErrorResponse, str], dict[str, Any]]
) -> None:
    error = form(fault.refusal, "id")["error"]

    assert error["doc_url"] == f"docs/reference/errors/{error['weir']['reason']}.md"
    assert (ROOT / error["doc_url"]).is_file()
    assert not error["message"][0].islower()
    assert error["message"].endswith(".")
    assert REMEDY.search(error["message"]) or ALLOWED.search(error["message"])


def test_every_code_of_an_error_that_begins_in_http_has_an_example() -> None:
    assert {fault.refusal.code for fault in http_examples()} == FAULT_REASONS.keys()


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
    "This API key may use 100,000 tokens in any 300 minutes and has 20 left; this request needs 64."
    " Try again in 6 h.",
    "Your organization may spend 20.00 USD in total and has 0.00 USD left; this request may cost"
    " 0.019 USD. Send a smaller request, or ask an administrator to raise the limit.",
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


def position_of_text(kind: type) -> int | None:
    """Find which argument of an error is its text; None if the class builds it."""
    init = next(vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each))
    parameters = [*inspect.signature(init).parameters][1:]
    named = [each for each in parameters if each in ("message", "remedy", "wrong", "args")]
    return parameters.index(named[0]) if named else None


def text_of(node: ast.expr, path: Path) -> str | None:
    """Return a text in the source, with constants of its module and 1 for what varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(each, path) or "1" for each in parts)
        case ast.FormattedValue(value=value):
            return text_of(value, path)
        case ast.Name(id=name) if name.isupper():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            return str(getattr(importlib.import_module(module), name))
    return None


def raised_texts() -> Iterator[tuple[type, str, str]]:
    """Find the texts with which errors that clients receive are built: class, place, text."""
    kinds = {
        kind.__name__: (kind, position)
        for kind, code in CODES_BY_CLASS.items()
        if code != code_pb2.INTERNAL and kind not in FOR_OPERATORS
        if (position := position_of_text(kind)) is not None
    }
    for folder in ("api", "inference", "metering"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                    kind, position = kinds.get(name, (None, 0))
                    if kind is not None and len(node.args) > position:
                        text = text_of(node.args[position], path)
                        if text is not None:
                            yield kind, f"{path.relative_to(ROOT)}:{node.lineno}", text


def is_helpful(kind: type, text: str) -> bool:
    """Return whether an error's text says what to do, as the client receives it."""
    example = next(each for each in examples() if type(each) is kind)
    if len(text) > CHARS_MAX:
        return False
    if status_fields(example):
        return bool(REMEDY.search(text) or ALLOWED.search(text) or text.endswith("1"))
    if retry_after_of(example) is not None:
        return True  # the message ends with the time of the retry
    return bool(REMEDY.search(text)) and not text[0].islower() and text.endswith((".", "1"))


def status_fields(error: Exception) -> list[str]:
    """List the fields of a request that an error names."""
    bad_request = detail_of(status_of(error), error_details_pb2.BadRequest)
    return [each.field for each in bad_request.field_violations] if bad_request else []


def test_the_texts_where_errors_are_raised_say_what_to_do() -> None:
    found = [*raised_texts()]

    assert [(where, text) for kind, where, text in found if not is_helpful(kind, text)] == []
    assert len(found) > 200


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
def test_no_error_advises_to_repeat_a_request_id_after_the_first_token(error: Exception) -> None:
    """The id has its usage by then, and returns nothing else."""
    assert interrupted(error, 0) is error

    ended = interrupted(error, 120)

    assert retry_after_of(ended) is None
    if retry_after_of(error) is not None:
        assert isinstance(ended, Interrupted)
        assert ended.facts["retry_with"] == "new_request_id"
        assert str(ended).startswith("Your request ended after 120 tokens, which are delivered")


@pytest.mark.parametrize(
    ("site", "local", "link"),
    [
        ("", False, FILE),
        ("", True, (ROOT / FILE).as_uri()),
        ("https://docs.acme.com/", False, f"https://docs.acme.com/{PAGE}"),
        ("https://docs.acme.com/", True, f"https://docs.acme.com/{PAGE}"),
    ],
)
def test_an_error_links_to_the_page_of_its_reason(site: str, local: bool, link: str) -> None:
    link_to_docs(site, local=local)
    try:
        status = status_of(PriceMissing("large", "EUR"))
    finally:
        link_to_docs("")
    answer, error = error_response(status), error_from_status(status)

    assert answer.body()["error"]["doc_url"] == link
    assert error_body(answer, "")["error"]["doc_url"] == link
    assert (error.doc_url, error.__notes__) == (link, [f"See {link}"])
    assert link not in str(error)


@pytest.mark.parametrize(
    ("listeners", "local"),
    [
        ({}, True),
        ({"WEIR_LISTEN": "unix:/run/weir", "WEIR_OPENAI_LISTEN": "off"}, True),
        ({"WEIR_LISTEN": "0.0.0.0:8443"}, False),
        ({"WEIR_OPENAI_LISTEN": "0.0.0.0:9443"}, False),
    ],
)
def test_files_are_linked_only_where_no_other_machine_reaches_the_server(
    listeners: dict[str, str], local: bool
) -> None:
    assert Settings.from_environment(listeners).listen.is_local is local


def test_the_address_of_the_documentation_is_checked() -> None:
    assert Settings.from_environment({"WEIR_DOCS_URL": "https://docs.acme.com"}).listen.docs

    with pytest.raises(SettingInvalid, match="WEIR_DOCS_URL"):
        Settings.from_environment({"WEIR_DOCS_URL": "docs.acme.com"})
