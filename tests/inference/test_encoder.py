"""Embeddings: vectors equal those of `transformers` in any batch; unsupported models are refused; a
dead process costs its callers an error, and the next ones a short wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn.functional import cosine_similarity

from inference import errors
from inference.encoder.config import read_encoder_config, read_encoder_info
from inference.encoder.engine import EncoderSettings, TorchEncoder
from inference.encoder.network import EncoderNetwork
from inference.encoder.worker import EncodeBatch, LoadEncoder, encode_batch, load_network
from inference.engine import EmbeddingRequest, Embeddings, EngineState
from inference.routing.memory import MemoryBudget, Needs
from inference.routing.on_demand import ManagedEncoder, ManagedTerms
from inference.text.tokenizer import Tokenizer
from tests.inference.classifier_checkpoints import edit_config
from tests.inference.encoder_checkpoints import (
    ARCHITECTURES,
    CLS,
    DIMENSION,
    INPUT_TOKENS_MAX,
    PLAIN_IDS,
    SEP,
    make_random_encoder,
    minilm_directory,
    reference_vectors,
    write_json,
    write_modules,
)
from tests.inference.test_checkpoint import ENTRIES
from tests.inference.worker_engines import WAIT_S, served, until

MEAN, FIRST = "pooling_mode_mean_tokens", "pooling_mode_cls_token"
SENTENCES = (
    "A cat sits on the mat.",
    "A kitten is resting on a rug.",
    "The stock market fell sharply this morning.",
    "Shares dropped steeply in early trading today.",
    "weir",
    "Ein Wehr staut einen Fluss auf, misst ihn und regelt seinen Abfluss. " * 12,
)

LAYER = "encoder.layer.1.output.dense"


def texts(seed: int, *lengths: int) -> list[list[int]]:
    """Return random texts of these lengths in tokens, special ones included."""
    chance = random.Random(seed)
    return [[CLS, *chance.choices(PLAIN_IDS, k=length - 2), SEP] for length in lengths]


def network_of(directory: Path, **changes: Any) -> EncoderNetwork:
    """Return the encoder without a process."""
    options: dict[str, Any] = {"compute_dtype": "float32", "device": "cpu", "torch_thread_count": 1}
    return load_network(
        LoadEncoder(str(directory), **(options | changes)), lambda stage, fraction: None
    )


def request_of(given: Sequence[Sequence[int]], **options: Any) -> EmbeddingRequest:
    return EmbeddingRequest(tuple(tuple(text) for text in given), **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random BERT of two layers."""
    return make_random_encoder(tmp_path_factory.mktemp("encoder"))


class TestVectors:
    """Computed vectors, without a process."""

    @pytest.mark.parametrize(
        ("architecture", "pooling", "normalized"),
        [
            ("Bert", MEAN, True),
            ("Bert", FIRST, False),
            ("Roberta", FIRST, True),
            ("XLMRoberta", MEAN, False),
            ("DistilBert", MEAN, True),
            ("MPNet", FIRST, False),
        ],
    )
    def test_equal_those_of_transformers(
        self, architecture: str, pooling: str, normalized: bool, tmp_path: Path
    ) -> None:
        directory = make_random_encoder(
            tmp_path, architecture, pooling=pooling, normalized=normalized
        )
        given = texts(1, 9, 3, INPUT_TOKENS_MAX, 9, 2, 17)

        vectors = network_of(directory).embed(given)

        expected = torch.tensor(
            reference_vectors(directory, given, pooling=pooling, normalized=normalized)
        )
        assert vectors.shape == (len(given), DIMENSION)
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)

    def test_of_relative_positions_equal_transformers_at_any_distance(self, tmp_path: Path) -> None:
        """Near tokens have a bias each, farther ones share one, and beyond 128 all do."""
        directory = make_random_encoder(tmp_path, "MPNet", input_tokens_max=160)
        given = texts(6, 160, 3, 129, 40)

        vectors = network_of(directory).embed(given)

        expected = torch.tensor(reference_vectors(directory, given, pooling=MEAN, normalized=True))
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
        edit_config(directory, relative_attention_num_buckets=16)
        with pytest.raises(
            errors.CheckpointInvalid, match="relative_attention_num_buckets = 16 is not supported"
        ):
            read_encoder_config(directory)

    def test_depend_on_the_text_alone(self, tiny: Path) -> None:
        """The batch and its order change no more than the rounding of a matrix product."""
        network = network_of(tiny)
        given = texts(2, *(random.Random(3).randint(2, INPUT_TOKENS_MAX) for _ in range(60)))

        together = network.embed(given)

        for text, vector in zip(given, together, strict=True):
            torch.testing.assert_close(network.embed([text])[0], vector, atol=1e-5, rtol=0)
        torch.testing.assert_close(network.embed(given[::-1]), together.flip(0), atol=1e-5, rtol=0)
        # Otherwise nothing was compared.
        assert float((together[0] - together[1]).abs().max()) > 1e-3

    @pytest.mark.parametrize("compute_dtype", ["bfloat16", "int8"])
    def test_of_smaller_types_point_the_same_way(self, compute_dtype: str, tiny: Path) -> None:
        given = texts(4, 5, 30, 12)

        small = network_of(tiny, compute_dtype=compute_dtype).embed(given)

        assert float(cosine_similarity(small, network_of(tiny).embed(given)).min()) > 0.99

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_of_an_encoder_inside_another_are_the_same(
        self, architecture: str, tmp_path: Path
    ) -> None:
        """Some checkpoints keep the tensor prefix and heads of the model they are part of."""
        directory = make_random_encoder(tmp_path, architecture)
        given = texts(5, 7, 20)
        expected = network_of(directory).embed(given)
        prefix = read_encoder_config(directory).prefix
        tensors = load_file(directory / "model.safetensors")
        renamed = {f"{prefix}{name}": tensor for name, tensor in tensors.items()} | {
            "cls.predictions.bias": tensors.popitem()[1]
        }
        save_file(renamed, directory / "model.safetensors", {"format": "pt"})

        assert torch.equal(network_of(directory).embed(given), expected)


class TestMiniLm:
    """A published checkpoint, compared with its reference vectors."""

    def test_vectors_and_their_order_are_those_of_the_reference(self) -> None:
        """The reference tokenizes, pads, masks and pools as the library documents it."""
        from transformers import AutoModel, AutoTokenizer

        directory = minilm_directory()
        tokenizer, auto_tokenizer, auto_model = Tokenizer(directory), AutoTokenizer, AutoModel
        reference: Any = auto_tokenizer.from_pretrained(str(directory))
        encoded = reference(
            list(SENTENCES), padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        model: Any = auto_model.from_pretrained(str(directory), dtype="float32")
        with torch.inference_mode():
            hidden = model.eval()(**encoded).last_hidden_state
        mask = encoded["attention_mask"][..., None].float()
        expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

        given = [tokenizer.encode_within(text, 256)[0] for text in SENTENCES]
        vectors = network_of(directory).embed(given)

        for index, text in enumerate(given):
            assert (
                list(text)
                == encoded["input_ids"][index][encoded["attention_mask"][index] == 1].tolist()
            )
        assert max(map(len, given)) == 256
        assert float(cosine_similarity(vectors, expected).min()) > 0.9999
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(given)), atol=1e-5, rtol=0)
        likeness = vectors @ vectors.T
        assert float(likeness[0, 1]) > 0.5 > 0.3 > float(likeness[0, 2])
        assert float(likeness[2, 3]) > 0.5 > 0.3 > float(likeness[1, 3])

    def test_says_what_it_is(self) -> None:
        info = read_encoder_info(minilm_directory(), name="minilm")

        assert info.architecture == "BertModel"
        assert info.embedding_dimension == 384
        assert info.context_window_tokens == 256


def entries(**changes: object) -> Callable[[Path], None]:
    """Return a fault of a checkpoint: other entries of config.json."""
    return lambda directory: edit_config(directory, **changes)


def file(name: str, value: object) -> Callable[[Path], None]:
    """Return a fault of a checkpoint: other contents of a file."""
    return lambda directory: write_json(directory / name, value)


def tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a fault of a checkpoint: other tensors."""

    def spoil(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors", {"format": "pt"})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (entries(model_type="deberta-v2"), "model_type deberta-v2"),
        (entries(position_embedding_type="relative_key"), "'relative_key'"),
        (entries(hidden_act="swish"), "activation swish"),
        (entries(is_decoder=True), "is_decoder = True"),
        (entries(is_causal=True), "is_causal = True"),
        (entries(add_cross_attention=True), "add_cross_attention = True"),
        (entries(quantization={"bits": 4}), "quantized"),
        (entries(num_attention_heads=3), "3 heads"),
        (entries(hidden_size=None), "hidden_size is missing"),
        (entries(num_hidden_layers=0), "num_hidden_layers = 0"),
        (entries(vocab_size="many"), "wrong type"),
        (entries(quantization_config={"bits": 8}), "quantized"),
        (
            lambda directory: (directory / "modules.json").unlink(),
            "modules.json: the file is missing",
        ),
        (
            lambda directory: write_modules(directory, ["Transformer", "Pooling", "Dense"]),
            "Transformer, Pooling, Dense",
        ),
        (file("modules.json", {"type": "Transformer"}), "list of JSON objects"),
        (
            file("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
            "pooling_mode_max_tokens = True",
        ),
        (file("1_Pooling/config.json", {MEAN: True, FIRST: True}), "pooling_mode_cls_token = True"),
        (
            file("1_Pooling/config.json", {MEAN: True, "word_embedding_dimension": 33}),
            "dimension 33",
        ),
        (file("sentence_bert_config.json", {"do_lower_case": True}), "do_lower_case"),
        (file("sentence_bert_config.json", {"max_seq_length": -1}), "max_seq_length = -1"),
        (
            file(
                "config_sentence_transformers.json",
                {"default_prompt_name": "q", "prompts": {"q": "query: "}},
            ),
            "default_prompt_name",
        ),
        (tensors(lambda found: found.pop(f"{LAYER}.bias")), f"{LAYER}.bias is missing"),
        (
            tensors(lambda found: found.update(adapter=found[f"{LAYER}.bias"])),
            "tensor adapter has no place",
        ),
        (tensors(lambda found: found[f"{LAYER}.bias"].fill(float("nan"))), "not finite"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(
    spoil: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    directory = make_random_encoder(tmp_path)
    spoil(directory)

    with pytest.raises(errors.CheckpointInvalid, match=named):
        network_of(directory)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_entry_that_changes_transformers_is_refused(architecture: str, tmp_path: Path) -> None:
    directory = make_random_encoder(tmp_path, architecture)
    texts = [list(PLAIN_IDS)[:9]]
    expected = reference_vectors(directory, texts, pooling=MEAN, normalized=False)
    raw = json.loads((directory / "config.json").read_text())

    for name, value in ENTRIES:
        if name in ("layer_norm_eps", "hidden_act", "pad_token_id", "chunk_size_feed_forward") or (
            name == "layer_types" and len(value) == 1
        ):
            continue  # computed as transformers does, or transformers refuses it
        write_json(directory / "config.json", raw | {name: value})
        with contextlib.suppress(errors.CheckpointInvalid):
            read_encoder_config(directory)
            found = reference_vectors(directory, texts, pooling=MEAN, normalized=False)
            assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-4), (
                name,
                value,
            )


def test_modules_reach_no_files_elsewhere(tmp_path: Path) -> None:
    directory = make_random_encoder(tmp_path / "inside")
    modules = [
        {"path": "../outside", "type": "x.Transformer"},
        {"path": "1_Pooling", "type": "x.Pooling"},
    ]
    write_json(directory / "modules.json", modules)

    with pytest.raises(errors.CheckpointInvalid, match="outside the checkpoint"):
        read_encoder_config(directory)


def test_a_batch_without_numbers_is_a_fault(tiny: Path) -> None:
    """A planted fault: noise must not be billed."""
    network = network_of(tiny)
    network._weights.embedding_norm.bias[0] = float("nan")

    answer = encode_batch(network, EncodeBatch(1, [(CLS, SEP)]))

    assert answer.vectors == []
    assert "not finite" in (answer.fault or "")


def serving(
    directory: Path, *, started: bool = True, **changes: Any
) -> AbstractAsyncContextManager[TorchEncoder]:
    """Serve an encoder during the block."""
    options: dict[str, Any] = {"torch_thread_count": 1, "restart_delay_s_min": 0.05}
    encoder = TorchEncoder(EncoderSettings(directory, "tiny", **(options | changes)))
    return served(encoder, started=started)


class TestProcess:
    """The encoder as the API process sees it."""

    @pytest.mark.usefixtures("executed_workers")
    async def test_serves_batches_and_refuses_what_it_cannot_embed(self, tiny: Path) -> None:
        given = texts(6, 9, 4, INPUT_TOKENS_MAX)
        too_long, strange = texts(6, 5, INPUT_TOKENS_MAX + 1), [*texts(6, 5), [CLS, 10_000]]
        expected = network_of(tiny).embed(given)
        async with serving(tiny) as encoder:
            # Calls of one moment are one batch.
            found = await asyncio.gather(*(encoder.embed(request_of([text])) for text in given))
            assert encoder.statistics().step_count == 1
            whole = await encoder.embed(request_of(given))

            for wrong, field in (
                (too_long, "inputs[1]"),
                (strange, "inputs[1]"),
                ([[]], "inputs[0]"),
            ):
                with pytest.raises(errors.RequestImpossible) as refused:
                    await encoder.embed(request_of(wrong))
                assert refused.value.field == field

            assert encoder.statistics().prompt_token_count == 2 * sum(map(len, given))
        torch.testing.assert_close(
            torch.tensor([each.vectors[0].tolist() for each in found]), expected, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            torch.tensor([each.tolist() for each in whole.vectors]), expected, atol=1e-5, rtol=0
        )

    async def test_batches_are_bounded_and_follow_the_ranks(self, tiny: Path) -> None:
        begun: list[str] = []
        async with serving(tiny, batch_token_count_max=40) as encoder:
            calls = [  # the first one fills a batch, which is sent at once
                encoder.embed(
                    request_of(
                        texts(7, *lengths), rank=rank, on_begin=lambda name=name: begun.append(name)
                    )
                )
                for name, rank, lengths in (
                    ("ahead", 9.0, (20, 20)),
                    ("third", 2.0, (20, 20, 20)),
                    ("first", 0.0, (20, 20, 20)),
                    ("second", 1.0, (20, 20, 20)),
                )
            ]

            answers = await asyncio.gather(*calls)

            assert encoder.statistics().step_count == 6  # eleven texts, two to a batch
        assert begun == ["ahead", "first", "second", "third"]
        assert [len(answer.vectors) for answer in answers] == [2, 3, 3, 3]
        assert all(answer.queue_ms >= 0 and answer.encode_ms > 0 for answer in answers)

    async def test_an_abandoned_text_is_not_embedded(self, tiny: Path) -> None:
        """Texts that find the queue full get a retry delay; texts waiting on close get an error."""
        bounds: dict[str, Any] = {
            "batch_token_count_max": 31,
            "waiting_token_count_max": 30,
            "batch_window_s": WAIT_S,
        }
        async with serving(tiny, **bounds) as encoder:
            async with asyncio.TaskGroup() as tasks:
                # Waits for more texts.
                dropped = tasks.create_task(encoder.embed(request_of(texts(8, 10))))
                await until(lambda: encoder.statistics().waiting_sequence_count == 1)
                dropped.cancel()
            assert encoder.statistics().waiting_sequence_count == 0

            # As much as a batch takes: sent at once.
            answer = await encoder.embed(request_of(texts(8, 31)))

            assert len(answer.vectors) == 1
            assert encoder.statistics().prompt_token_count == 31
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(outcome(encoder, texts(9, 30)))
                await until(lambda: encoder.statistics().waiting_sequence_count == 1)
                with pytest.raises(errors.EngineOverloaded) as refused:
                    await encoder.embed(request_of(texts(9, 5)))
                assert refused.value.retry_after_s > 0

                await encoder.close()

            assert isinstance(waiting.result(), errors.EngineUnavailable)
            with pytest.raises(errors.EngineUnavailable):
                await encoder.embed(request_of(texts(12, 8)))

    @pytest.mark.faults
    async def test_after_a_crash_it_restarts_and_callers_got_an_error(self, tiny: Path) -> None:
        given = texts(10, 8)
        async with serving(tiny) as encoder:
            before = await encoder.embed(request_of(given))
            killed = encoder.worker_pid
            assert killed is not None
            # Keeps the next batch in progress until the process dies.
            os.kill(killed, signal.SIGSTOP)
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(outcome(encoder, given)) for _ in range(3)]
                await until(lambda: encoder.statistics().running_sequence_count == 3)
                late = tasks.create_task(outcome(encoder, given))
                await until(lambda: encoder.statistics().waiting_sequence_count == 1)
                os.kill(killed, signal.SIGKILL)
            assert all(isinstance(call.result(), errors.EngineFailed) for call in [*calls, late])
            with pytest.raises(errors.EngineUnavailable) as down:
                await encoder.embed(request_of(given))
            assert down.value.retry_after_s > 0

            await encoder.start()

            assert encoder.worker_pid not in (None, killed)
            assert (await encoder.embed(request_of(given))).vectors == before.vectors

    @pytest.mark.faults
    async def test_a_process_that_hangs_is_killed(self, tiny: Path) -> None:
        async with serving(tiny, step_timeout_s=0.5) as encoder:
            hanging = encoder.worker_pid
            assert hanging is not None
            os.kill(hanging, signal.SIGSTOP)

            assert isinstance(await outcome(encoder, texts(11, 8)), errors.EngineFailed)

            await until(
                lambda: (
                    encoder.condition().state is not EngineState.READY
                    or encoder.worker_pid != hanging
                )
            )

    async def test_one_on_demand_starts_with_the_first_text_and_frees_memory(
        self, tiny: Path
    ) -> None:
        budget = MemoryBudget(total_bytes=10)
        settings = EncoderSettings(tiny, "tiny", torch_thread_count=1)
        managed = ManagedEncoder(
            lambda: TorchEncoder(settings), ManagedTerms(needs=Needs(8)), budget
        )
        async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(managed.serve())
            assert managed.condition().state == EngineState.COLD
            assert managed.condition().starts_on_demand is True
            assert budget.held_bytes == 0

            answer = await managed.embed(request_of(texts(13, 9)))

            assert len(answer.vectors) == 1
            assert budget.held_bytes == 8
            await managed.close()
        assert budget.held_bytes == 0

    async def test_a_checkpoint_that_cannot_be_loaded_says_what_to_mend(
        self, tmp_path: Path
    ) -> None:
        directory = make_random_encoder(tmp_path)
        tensors(lambda found: found[f"{LAYER}.bias"].fill(float("inf")))(directory)

        async with serving(directory, started=False) as encoder:
            with pytest.raises(errors.EngineStartFailed, match="not finite"):
                await encoder.start()

            assert encoder.condition().state is EngineState.FAILED


async def outcome(encoder: TorchEncoder, given: Sequence[Sequence[int]]) -> Embeddings | Exception:
    """Return the result or error of a call."""
    try:
        return await encoder.embed(request_of(given))
    except Exception as error:
        return error
