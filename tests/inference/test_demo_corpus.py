"""Corpus, tokenizer files and reference workload of the demo model."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import inference.demo_model
from demo import scoring
from demo.corpus import (
    REFERENCE_PROMPT_TOKENS,
    SYSTEM_PROMPT,
    SYSTEM_PROMPT_TOKENS,
    Case,
    draw_case,
    evaluation_case,
    evaluation_follow_up,
    evaluation_small_talk,
    reference_messages,
    sized_reference_case,
)
from demo.first_attempts import prompt_of
from demo.hotels import Split, draw_hotels, split_of
from demo.messages import Call, Function, Line, Message, Talk
from demo.structured import draw_structured
from demo.tokenization import extend_tokenizer, token_ids_of, train_tokenizer
from demo.tool_talk import draw_long_talk, draw_tool_talk
from demo.turns import Criterion, draw_turn, search
from inference.core.options import KvDtype
from inference.engine import SamplingParams
from inference.text.tokenizer import Tokenizer as ProductTokenizer
from tests.inference.running import make_core, make_request, run_all

WEIGHTS = Path(inference.demo_model.__file__).parent / "weights"


def raise_template_error(message: str) -> None:
    raise TemplateError(message)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


def test_a_kv_cache_in_eight_bits_hardly_changes_the_log_probabilities_of_a_long_context(
    tokenizer: Tokenizer,
) -> None:
    def tokens(messages: list[Message]) -> list[int]:
        return list(token_ids_of(tokenizer, messages, generation_prompt=True))

    cases = [
        sized_reference_case(seed, lambda messages: len(tokens(messages))) for seed in range(4)
    ]
    prompt = [token for case in cases for token in tokens(case.messages(1))][:4000]

    def logprobs(kv_dtype: KvDtype) -> list[float]:
        core = make_core(
            WEIGHTS, kv_dtype=kv_dtype, kv_cache_bytes=64 << 20, context_window_tokens=4096
        )
        request = make_request(prompt, 1, sampling=SamplingParams(prompt_logprobs=0))
        return [each.chosen.logprob for each in run_all(core, [request])[0].prompt_logprobs]

    exact, stored = logprobs("auto"), logprobs("int8")

    assert len(exact) == len(prompt) == 4000
    differences = [abs(each - other) for each, other in zip(exact, stored, strict=True)]
    assert 0 < statistics.mean(differences) < 0.03
    assert abs(statistics.mean(exact) - statistics.mean(stored)) < 0.005


class ChatTemplate:
    """The shipped chat template, rendered as engines render it."""

    def __init__(self) -> None:
        config: dict[str, Any] = json.loads((WEIGHTS / "tokenizer_config.json").read_text())
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_template_error
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(config["chat_template"])
        self._tokens = {name: config[name] for name in ("bos_token", "eos_token")}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Function] = (),
    ) -> str:
        return self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=[tool.chat() for tool in tools],
            **self._tokens,
        )


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate()


def test_the_same_seed_draws_the_same_case() -> None:
    one = [draw_case(Random(seed), Split.TRAIN) for seed in range(30)]
    two = [draw_case(Random(seed), Split.TRAIN) for seed in range(30)]

    assert one == two
    assert len({case.messages()[-1]["content"] for case in one}) > 20


def test_training_and_evaluation_share_no_hotel_name() -> None:
    rng = Random(3)

    train = {hotel.name for _ in range(100) for hotel in draw_hotels(rng, 12, Split.TRAIN)}
    unseen = {hotel.name for seed in range(100) for hotel in evaluation_case(seed).hotels}

    assert train.isdisjoint(unseen)
    assert {split_of(name) for name in unseen} == {Split.EVAL}


def test_within_a_case_no_two_hotels_tie() -> None:
    for seed in range(50):
        hotels = evaluation_case(seed).hotels

        for values in (
            [hotel.name for hotel in hotels],
            [hotel.price for hotel in hotels],
            [hotel.rating_tenths for hotel in hotels],
            [hotel.distance_tenths for hotel in hotels],
        ):
            assert len(set(values)) == len(hotels)


def test_every_reference_answer_scores_full_marks() -> None:
    """Generator and scorer are independent; a wrong fact would lose a mark."""
    cases = [evaluation_case(seed) for seed in range(400)]
    cases += [evaluation_follow_up(seed) for seed in range(100)] + [
        evaluation_small_talk(seed) for seed in range(100)
    ]

    wrong = [
        case.turns[-1]
        for case in cases
        if not scoring.score(case, case.turns[-1].answer, ended=True).right
    ]

    assert wrong == []


@pytest.mark.parametrize("split", list(Split))
def test_the_fitting_listings_come_first_and_begin_the_answer(split: Split) -> None:
    rng = Random(4)
    for _ in range(300):
        found, turn = draw_turn(rng, draw_hotels(rng, 9, split), split)

        assert [hotel.index for hotel in found.hotels] == list(range(1, 10))
        assert turn.listed == tuple(range(1, len(turn.listed) + 1))
        if turn.kind not in ("nothing fits", "has an amenity"):
            assert len(turn.listed) == min(3, found.fit_count)
        assert found.line().startswith(f"Search: {found.fit_count or 'none'} of 9 fit")


def test_a_search_ranks_what_fits_then_what_nearly_fits() -> None:
    hotels = draw_hotels(Random(5), 12, Split.TRAIN)

    found = search(
        hotels,
        Criterion.PRICE,
        lambda hotel: hotel.pets == "welcome",
        lambda hotel: "pool" in hotel.amenities,
    )

    classes = [
        0 if hotel.pets == "welcome" else 1 if "pool" in hotel.amenities else 2
        for hotel in found.hotels
    ]
    assert classes == sorted(classes)
    assert found.fit_count == classes.count(0) > 1
    for same in range(3):
        prices = [
            hotel.price for hotel, one in zip(found.hotels, classes, strict=True) if one == same
        ]
        assert prices == sorted(prices)


def _first_case_with_others() -> Case:
    return next(case for case in map(evaluation_case, range(100)) if len(case.turns[0].listed) == 3)


def test_the_scorer_sees_a_wrong_price() -> None:
    case = _first_case_with_others()
    answer = re.sub(r"\$\d+", "$1", case.turns[0].answer)

    assert not scoring.score(case, answer, ended=True).faithful


def test_the_scorer_sees_the_price_of_another_hotel() -> None:
    case = _first_case_with_others()
    answer = case.turns[0].answer.replace(f"${case.hotels[0].price}", f"${case.hotels[1].price}")

    mark = scoring.score(case, answer, ended=True)

    assert not mark.faithful
    assert not mark.facts


def test_the_scorer_sees_an_invented_name() -> None:
    case = _first_case_with_others()
    answer = case.turns[0].answer.replace(case.hotels[0].name, "Hotel Nowhere")

    assert not scoring.score(case, answer, ended=True).faithful


def test_the_scorer_sees_a_missing_hotel() -> None:
    case = _first_case_with_others()
    answer = case.turns[0].answer.rpartition("\n")[0]

    assert not scoring.score(case, answer, ended=True).hotels


@pytest.mark.parametrize("seed", range(12))
def test_a_reference_prompt_has_exactly_its_size(
    seed: int, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    def count(messages: list[Message]) -> int:
        return len(tokenizer.encode(template.render(messages), add_special_tokens=False).ids)

    messages = reference_messages(seed, count)

    assert count(messages) == REFERENCE_PROMPT_TOKENS == 1025
    assert messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert [message["role"] for message in messages] == ["system", "user"]


def test_reference_prompts_differ_after_the_shared_system_prompt(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    def encode(messages: list[Message]) -> list[int]:
        ids: list[int] = tokenizer.encode(template.render(messages), add_special_tokens=False).ids
        return ids

    prompts = [
        encode(reference_messages(seed, lambda messages: len(encode(messages))))
        for seed in range(20)
    ]

    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert len({tuple(prompt[:SYSTEM_PROMPT_TOKENS]) for prompt in prompts}) == 1
    # Ends with the generation prompt, one token.
    system = encode([{"role": "system", "content": SYSTEM_PROMPT}])
    assert len(system) - 1 == SYSTEM_PROMPT_TOKENS == 200


def test_reference_answers_speak_of_three_hotels(tokenizer: Tokenizer) -> None:
    case = sized_reference_case(
        5, lambda messages: len(token_ids_of(tokenizer, messages, generation_prompt=True))
    )

    assert case.turns[0].listed == (1, 2, 3)


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference case of 50 tokens"):
        reference_messages(1, lambda messages: 1000, prompt_token_count=50)


def test_training_encodes_conversations_as_the_chat_template_does(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    rng = Random(8)
    for _ in range(20):
        messages = draw_case(rng, Split.TRAIN).messages()

        rendered = tokenizer.encode(
            template.render(messages, add_generation_prompt=False), add_special_tokens=False
        ).ids

        assert token_ids_of(tokenizer, messages, generation_prompt=False) == rendered


@pytest.mark.parametrize("draw", [draw_structured, draw_tool_talk])
def test_training_encodes_json_and_calls_as_engines_do(draw: Callable[[Random], Talk]) -> None:
    rng, product = Random(9), ProductTokenizer(WEIGHTS)
    for _ in range(30):
        talk = draw(rng)
        last = max(number for number, line in enumerate(talk.lines) if line.role == "assistant")
        requested = replace(talk, lines=talk.lines[:last])
        expected = token_ids_of(product.backend, requested.messages(), generation_prompt=True)

        assert list(prompt_of(product, requested)) == expected


def test_structured_answers_are_json_and_calls_name_an_offered_function() -> None:
    rng = Random(10)
    for _ in range(300):
        for line in draw_structured(rng).lines:
            assert line.role == "user" or isinstance(json.loads(line.text), dict)
        for talk in (draw_tool_talk(rng), draw_long_talk(rng, 900)):
            offered = {function.name: function for function in talk.functions}
            for call in (call for line in talk.lines for call in line.calls):
                assert set(call.arguments) == set(offered[call.name].properties)


def test_a_grammar_decides_the_first_token_of_forced_answers_only() -> None:
    call = Call("add", {"a": 1})
    talk = Talk((Line("user", "Add 1"), Line("assistant", call.text(), is_forced=True)), "Add.")

    assert talk.messages()[2]["content"] == '{"name": "add", "arguments": {"a": 1}}'
    assert talk.forced() == {2}


def test_the_chat_template_renders_tools_as_the_corpus_does(template: ChatTemplate) -> None:
    function = Function("add", "Adds <b>.", {"a": {"type": "integer"}})
    lines = (
        Line("user", "Add 1"),
        Line("assistant", "", (Call("add", {"a": 1}),)),
        Line("tool", "1"),
        Line("assistant", "The result is 1."),
    )
    for system in (None, "Be brief."):
        talk = Talk(lines, system, (function,))
        shown = "".join(
            f"<|{message['role']}|>{message['content']}<|end|>" for message in talk.messages()
        )

        rendered = template.render(talk.chat(), False, talk.functions)

        assert rendered == f"<|begin|>{shown}"
        assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>' in rendered
        assert "<|user|><tool_response>1</tool_response><|end|>" in rendered


def test_tokens_of_json_leave_the_text_of_hotels_as_it_is(tokenizer: Tokenizer) -> None:
    """Except for a rare invented name that the sample of hotels did not have."""
    raw = json.loads(tokenizer.to_str())
    merges = [
        pair for pair in raw["model"]["merges"] if raw["model"]["vocab"]["".join(pair)] < 2560
    ]
    raw["model"]["merges"] = merges
    first = Tokenizer.from_str(json.dumps(raw))
    texts = [
        message["content"] for seed in range(200) for message in evaluation_case(seed).messages()
    ]

    changed = [text for text in texts if tokenizer.encode(text).ids != first.encode(text).ids]

    requested = '{"name": "Anna", "age": 34}'
    assert len(tokenizer.encode(requested).ids) < len(first.encode(requested).ids)
    assert len(changed) <= 4


def test_an_extended_tokenizer_has_the_markers_of_calls() -> None:
    first = train_tokenizer(1, 700, 50)

    extended = extend_tokenizer(first, 1, 50)

    assert extended.token_to_id("<tool_call>") == extended.get_vocab_size() - 4
    assert extended.decode(extended.encode("<tool_call>{}").ids) == "<tool_call>{}"


def test_the_chat_template_marks_each_turn(template: ChatTemplate) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye"},
    ]

    assert (
        template.render(messages) == "<|begin|><|system|>Be"
        " brief.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|><|user|>Bye<|end|><|assistant|>"
    )
    assert not template.render(messages, add_generation_prompt=False).endswith("<|assistant|>")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "critic", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}],
    ],
    ids=["unknown role", "late system message"],
)
def test_the_chat_template_refuses_what_it_cannot_render(
    messages: list[Message], template: ChatTemplate
) -> None:
    with pytest.raises(TemplateError):
        template.render(messages)


@pytest.mark.parametrize(
    "text", ["Zürich, 東京 and 🏨!", "  two  spaces\n\n\ttab", "1,234.567 [99] #@"]
)
def test_any_text_survives_the_tokenizer(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_shipped_files_agree_with_each_other(tokenizer: Tokenizer) -> None:
    config: dict[str, Any] = json.loads((WEIGHTS / "config.json").read_text())
    generation: dict[str, Any] = json.loads((WEIGHTS / "generation_config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.token_to_id("<|end|>")
    assert config["max_position_embeddings"] == 4096
    assert config["bos_token_id"] == tokenizer.token_to_id("<|begin|>")
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) < 10_000_000
