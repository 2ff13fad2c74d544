"""Text at its borders: first tokens, log-probabilities, offsets, and stops on control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from tests.e2e.conftest import Serve
from tests.e2e.openai_clients import connect, user_message
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.tool_checkpoints import write_chains
from tests.service import MODEL, Service, Tenant

anthropic: Any = pytest.importorskip("anthropic")
LLAMA = "llama"  # has a sentencepiece-like tokenizer
WORDS = ("▁The", "▁capital", "▁is", "▁Paris", "▁user", "▁in", "<0x0A>")
USER, END_OF_TURN = "<|user|>", "<|turn|>"

PROMPT = "The capital is"
STOPS = [
    ([END_OF_TURN], "\n", END_OF_TURN),
    (["x", f"\n{END_OF_TURN}"], "", None),
    ([f"{END_OF_TURN} user"], "\n", END_OF_TURN),
]


def llama_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's. A chat ends with ` in`, which ` Paris` follows."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for word in WORDS[:-1]:
        for end in range(1, len(word) + 1):
            for piece in (word[:end], word[end - 1]):
                vocabulary.setdefault(piece, len(vocabulary))
            if end > 1 and (merge := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(merge)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ("<s>", "</s>", USER, END_OF_TURN)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def make_llama(directory: Path) -> Path:
    make_checkpoint(
        directory,
        shape=LlamaShape(layer_count=1),
        chat_template="{% for m in messages %}{{ '<|user|> ' + m['content'] }}{% endfor %} in",
    )
    tokenizer = llama_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | names), encoding="utf-8")
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}', encoding="utf-8")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(
        json.dumps(config | {"eos_token_id": 2, "bos_token_id": 1}), encoding="utf-8"
    )
    the, _, is_, paris, user, in_, newline, turn = ids_of(tokenizer, *WORDS, END_OF_TURN)
    chains = [[is_, paris, 2], [in_, newline, turn, user, the, 2], [1, the]]
    write_chains(directory, chains, vocabulary_size=tokenizer.get_vocab_size())
    return directory


def make_torn(directory: Path) -> Path:
    """Return a byte-level one, which answers token 5 with parts of characters."""
    make_checkpoint(directory, shape=LlamaShape(layer_count=1))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = ids_of(tokenizer, *"âĤĥĦħ")  # bytes E2, 82 to 85
    others = [(token_id, 100.0 - 10 * rank) for rank, token_id in enumerate(ids) if rank]
    write_chains(
        directory,
        [[5, ids[0], 2]],
        vocabulary_size=tokenizer.get_vocab_size(),
        alternatives={5: [(token_id, weight / 8) for token_id, weight in others]},
    )
    return directory


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("borders")
    made = {MODEL: make_torn(directory / "torn"), LLAMA: make_llama(directory / "llama")}
    return serve(made[MODEL], models=made)


async def test_the_first_word_of_a_completion_keeps_its_blank(service: Service) -> None:
    tenant = await service.tenant()
    requested: Any = {"model": LLAMA, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with connect(service, tenant.secret) as client:
        create = client.completions.create
        [whole] = create(**requested, logprobs=0).choices
        [echoed] = create(**requested, logprobs=0, echo=True).choices
        ids = llama_tokenizer().encode(PROMPT).ids
        [by_ids] = create(**requested | {"prompt": ids}, logprobs=0, echo=True).choices
        [plain] = create(**requested, echo=True).choices
        [stopped] = create(**requested, stop=[" Paris"]).choices
        chunks = list(create(**requested, stream=True, logprobs=0))

    assert whole.text == " Paris"
    assert (whole.logprobs.tokens, whole.logprobs.text_offset) == ([" Paris", ""], [0, 6])
    assert list(whole.logprobs.top_logprobs[0]) == [" Paris"]
    for choice in (echoed, by_ids):
        assert choice.text == "".join(choice.logprobs.tokens) == "The capital is Paris"
        assert choice.logprobs.tokens == ["", "The", " capital", " is", " Paris", ""]
        assert choice.logprobs.text_offset == [0, 0, 3, 11, 14, 20]
    assert plain.text == "The capital is Paris"
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices]
    reported = [choice.logprobs for choice in streamed if choice.logprobs]
    assert "".join(choice.text for choice in streamed) == " Paris"
    assert [token for each in reported for token in each.tokens] == [" Paris", ""]
    assert [offset for each in reported for offset in each.text_offset] == [0, 6]


async def test_nothing_precedes_an_empty_prompt(service: Service, tenant: Tenant) -> None:
    with connect(service, tenant.secret) as client:
        answer: Any = client.completions.create(
            model=LLAMA, prompt=[1], max_tokens=1, temperature=0, logprobs=0
        )
    [choice] = answer.choices

    assert (choice.text, choice.logprobs.tokens) == ("The", ["The"])


async def test_parts_of_characters_are_distinguished(service: Service, tenant: Tenant) -> None:
    requested: dict[str, Any] = {"model": MODEL, "prompt": [5], "max_tokens": 1, "temperature": 0}
    with connect(service, tenant.secret) as client:
        answers = [
            client.completions.create(**requested, logprobs=5).choices[0],
            client.completions.create(**requested, logprobs=5, echo=True).choices[0],
        ]

    for choice in answers:
        [*_, top], [*_, logprob] = choice.logprobs.top_logprobs, choice.logprobs.token_logprobs
        assert list(top)[1:] == [f"bytes:\\x{byte:x}" for byte in range(0x82, 0x86)]
        assert top[choice.logprobs.tokens[-1]] == logprob == max(top.values())
        assert choice.text == "".join(choice.logprobs.tokens) == "\N{REPLACEMENT CHARACTER}"


async def test_offsets_are_those_of_the_text_that_is_sent(service: Service, tenant: Tenant) -> None:
    prompt = "Zoë 🙂 ok"
    with connect(service, tenant.secret) as client:
        create = client.completions.create
        requested: Any = {"model": MODEL, "max_tokens": 3, "temperature": 0, "logprobs": 1}
        [choice] = create(
            **requested, prompt=prompt, echo=True, extra_body={"ignore_eos": True}
        ).choices
        [named] = create(**requested, prompt="a<|end|>b", echo=True).choices

    reported = choice.logprobs
    assert reported.tokens[0] == ""
    assert reported.text_offset[:2] == [0, 0], "BOS has no text"
    assert "".join(reported.tokens) == choice.text
    for token, offset in zip(reported.tokens, reported.text_offset, strict=True):
        assert choice.text.startswith(token, offset)
    assert reported.text_offset[-3] == len(prompt) == 8
    assert named.text.startswith("a<|end|>b")
    assert named.logprobs.text_offset[:4] == [0, 0, 1, 8]
    assert "".join(named.logprobs.tokens) == named.text


@pytest.mark.parametrize(("stops", "text", "_matched"), STOPS)
async def test_a_control_token_that_is_a_stop_ends_the_output(
    service: Service, tenant: Tenant, stops: list[str], text: str, _matched: str | None
) -> None:
    requested: dict[str, Any] = {"model": LLAMA, "temperature": 0}
    with connect(service, tenant.secret) as client:
        chat: Any = client.chat.completions.create(
            **requested, messages=user_message("The"), stop=stops, max_tokens=9
        )
        chunks = list(
            client.chat.completions.create(
                **requested, messages=user_message("The"), stop=stops, max_tokens=9, stream=True
            )
        )
        plain = client.completions.create(**requested, prompt="The in", stop=stops, max_tokens=9)
    with anthropic.Anthropic(
        base_url=service.openai_url.removesuffix("/v1"), api_key=tenant.secret
    ) as other:
        message: Any = other.messages.create(
            model=LLAMA,
            messages=[{"role": "user", "content": "The"}],
            stop_sequences=stops,
            max_tokens=9,
        )
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(
            model=LLAMA,
            text="The in",
            stop_sequences=stops,
            max_output_tokens=9,
            sampling=pb.Sampling(temperature=0.0),
        )
        finished = await stream.finished(request_id)

    assert chat.choices[0].message.content == plain.choices[0].text == text
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert chat.choices[0].finish_reason == plain.choices[0].finish_reason == "stop"
    assert message.stop_reason == "stop_sequence"
    assert "".join(block.text for block in message.content) == text
    assert finished.reason == types_pb2.FINISH_REASON_STOP_SEQUENCE
    assert finished.usage.billed_token_count == chat.usage.completion_tokens
