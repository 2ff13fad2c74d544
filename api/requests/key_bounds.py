"""The tokens that one request of a key may have: what is too much is refused by name, and what is not said is bounded."""

from __future__ import annotations

from api.core.errors import FieldViolation, InvalidRequest, KeyBoundExceeded
from inference.engine import GenerationRequest
from metering.tenants.keys import TokenBounds


def check_input_bound(bounds: TokenBounds, token_count: int, field: str, *, is_least: bool = False) -> None:
    """field: where the input stands. is_least: it was not tokenized, and has so many tokens at least. Raises: KeyBoundExceeded."""
    most = bounds.max_input_tokens
    if most is not None and token_count > most:
        least = "at least " if is_least else ""
        raise KeyBoundExceeded(
            field,
            f"has {least}{token_count} tokens, {token_count - most} more than the {most} that this key may send in one request: "
            "send less, or let an administrator raise the key's max_input_tokens",
            token_count,
            most,
        )


def output_room(bounds: TokenBounds, wanted: int | None, choice_count: int, room: int) -> int:
    """Output tokens that each choice may have if nothing else is said. wanted: what is said; room: what the context window leaves.

    Raises: KeyBoundExceeded for more than the key may have; InvalidRequest for more choices than it has tokens for.
    """
    most = bounds.max_output_tokens
    if most is None:
        return room
    if choice_count > most:
        wrong = f"must be at most {most}: this key may have {most} output tokens in one request, of all choices together"
        raise InvalidRequest([FieldViolation("choice_count", wrong)])
    if wanted is not None:
        check_output_bound(bounds, wanted, choice_count, "max_output_tokens")
    return min(room, most // choice_count)


def is_bounded(bounds: TokenBounds, wanted: int | None, request: GenerationRequest) -> bool:
    """Whether it is the key that bounds the output of a request, which does not say how much it wants."""
    most = bounds.max_output_tokens
    return wanted is None and most is not None and request.stop.max_output_tokens == most // request.choice_count


def check_output_bound(bounds: TokenBounds, wanted: int, choice_count: int, field: str) -> None:
    """wanted: of each choice; field: where that is said. Raises: KeyBoundExceeded."""
    most = bounds.max_output_tokens
    if most is not None and wanted * choice_count > most:
        each = "" if choice_count == 1 else f" for each of {choice_count} choices"
        raise KeyBoundExceeded(
            field,
            f"must be at most {most // choice_count}{each}, not {wanted}: this key may have {most} output tokens in one request; "
            "ask for less, or let an administrator raise the key's max_output_tokens",
            wanted * choice_count,
            most,
        )
