"""From a valid start frame to what an engine is asked: everything that can be known without holding anything."""

from __future__ import annotations

import uuid

from api.decoding import check_against_model
from api.errors import FieldViolation, InvalidRequest, PromptTooLong
from api.tokenizing import check_prompt, tokenize
from api.wire import ValidStart
from inference.engine import Engine, GenerationRequest, SequenceId
from inference.safety import SafetyChecker
from inference.tokenizer import Tokenizer


async def prepare(
    start: ValidStart, engine: Engine, tokenizer: Tokenizer, safety: SafetyChecker | None, cache_salt: str
) -> GenerationRequest:
    """Tokenize the prompt and hold everything against the model and its context window.

    Raises: PromptTooLong, InvalidRequest, PromptFiltered, SafetyUnavailable, ChatTemplateFailed.
    """
    prompt_token_ids = await tokenize(tokenizer, start.prompt)
    window = engine.model.context_window_tokens
    wanted, room = start.stop.max_output_tokens, window - len(prompt_token_ids)
    if (wanted or 1) > room:
        raise PromptTooLong(len(prompt_token_ids), wanted, window)
    if (size := engine.model.vocabulary_size) <= max(prompt_token_ids, default=0) or min(prompt_token_ids, default=0) < 0:
        raise InvalidRequest([FieldViolation("token_ids.ids", f"must each be from 0 to {size - 1}")])
    request = GenerationRequest(
        sequence_id=SequenceId(str(uuid.uuid4())),
        prompt_token_ids=prompt_token_ids,
        sampling=start.sampling.over(engine.model.default_sampling),
        stop=start.stop.within(room),
        cache_salt=cache_salt,
        response_format=start.response_format,
        choice_count=start.choice_count,
        beam_search=start.beam_search,
    )
    check_against_model(request, size)
    if safety is not None:
        await check_prompt(safety, tokenizer, start.prompt)
    return request
