"""Generating APIs over HTTP: for each, its parameters, their conversion, and its responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from api.core.errors import InvalidRequest
from api.openai.answers import Answer, ServedModel
from api.openai.error_responses import ErrorResponse
from api.openai.parameters import ParsedRequest, decode, tolerate
from api.openai.tolerance import Notes


@dataclass(frozen=True, slots=True)
class Api:
    """Generating API: body type, conversion to start frames, responses and errors."""

    parameters: type[Any]
    parse: Callable[[Any], ParsedRequest]
    answer: Callable[[ParsedRequest, ServedModel, str, int], Answer]
    tolerate: Callable[[Any, Notes], None] = tolerate
    error_body: Callable[[ErrorResponse, str], dict[str, Any]] = ErrorResponse.body


def parsed_body(body: bytes, api: Api, *, strict: bool) -> tuple[ParsedRequest, dict[str, str]]:
    """Parse the body of a generating request; return it with the header that names what is ignored.

    With `strict`, unknown parameters are refused. Raises: InvalidRequest, HttpFault.
    """
    notes = Notes(strict=strict)
    requested = decode(body, api.parameters, notes)
    try:
        if not strict:
            api.tolerate(requested, notes)
        parsed: ParsedRequest = api.parse(requested)
    except InvalidRequest as error:
        raise notes.as_sent(error) from error
    if notes.sent:
        parsed = replace(parsed, names=notes.names_as_sent(parsed.names))
    return parsed, notes.headers()
