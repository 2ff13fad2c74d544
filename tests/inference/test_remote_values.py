"""Values exchanged with remote engines: targets, seeds, salts, archives, cache events, settings."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from smg_grpc_proto.generated import common_pb2
from typer.testing import CliRunner

from api.cli.commands import doctor as commands
from api.core.settings import Settings
from api.fleet.fleet import build_serving
from common.settings import SettingInvalid
from inference.adapters.remote_connection import DIALECTS
from inference.adapters.remote_dialects import SEED_MAX, ServerUnfit, salt_id, wire_seed
from inference.adapters.remote_engine import RemoteEngine, Upkeep, root_of
from inference.adapters.remote_examination import Examination
from inference.adapters.remote_files import Bundle, check_tokenizer
from inference.adapters.remote_settings import Service, Target, TlsFiles, parse_target
from inference.capabilities import Capabilities
from inference.checkpoint.checkpoint import read_external_model
from inference.doctor import remote as doctor
from inference.doctor.findings import Verdict
from inference.engine import Engine, EngineStatistics
from inference.errors import CheckpointInvalid
from inference.routing.replica_set import ReplicaSet
from inference.sequences import RequestField
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import remote_engine, remote_settings
from tests.inference.running import make_request
from tests.inference.worker_engines import prompt, run
from tests.remote_servers.serving import ServerProcess


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:1",
        "http://host:1",
        "vllm://host",
        "vllm://:1",
        "trtllm://host:0",
        "vllm://host:65536",
        "vllm://host:1/model",
        "openai+http://host",
        "openai+http://host:1/",
        "openai+ftp://host:1",
    ],
)
def test_a_target_without_service_or_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be trtllm://host:port, vllm://host:port"):
        parse_target(text)


def test_a_target_is_read_and_written_alike() -> None:
    target = parse_target("vllm://[::1]:50051")

    assert target == Target(Service.VLLM, "[::1]:50051")
    assert parse_target(str(target)) == target
    named = parse_target("openai+https://host:443/org/model")
    assert named == Target(Service.OPENAI_HTTPS, "host:443", "org/model")
    assert parse_target(str(named)) == named


def test_half_a_client_certificate_is_none() -> None:
    with pytest.raises(ValueError, match="needs its key"):
        TlsFiles(Path("ca"), certificate=Path("c"))


def test_seeds_that_fit_cross_as_they_are_and_others_stay_apart() -> None:
    assert [wire_seed(seed) for seed in (0, 7, SEED_MAX)] == [0, 7, SEED_MAX]
    large = [wire_seed(seed) for seed in (-1, SEED_MAX + 1, 2**62, -(2**63))]
    assert all(0 <= seed <= SEED_MAX for seed in large)
    assert len(set(large)) == 4


def test_salts_become_numbers_that_the_wire_takes() -> None:
    numbers = {salt_id(f"organization-{index}") for index in range(1000)}

    assert len(numbers) == 1000
    assert all(0 <= number < 1 << 63 for number in numbers)


def archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in files.items():
            written.writestr(name, content)
    return buffer.getvalue()


def received(data: bytes, sha256: str | None = None) -> Bundle:
    bundle = Bundle()
    for start in range(0, len(data), 100):
        last = start + 100 >= len(data)
        digest = sha256 or hashlib.sha256(data).hexdigest()
        bundle.add(
            common_pb2.GetTokenizerChunk(
                data=data[start : start + 100], sha256=digest if last else ""
            )
        )
    return bundle


def test_an_archive_is_read_whole() -> None:
    files = {"config.json": b"{}", "tokenizer.json": bytes(range(256)) * 10}

    assert received(archive(files)).files() == files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (archive({"../tokenizer.json": b"{}"}), "directories"),
        (archive({"a/tokenizer.json": b"{}"}), "directories"),
        (archive({f"{index}.json": b"" for index in range(100)}), "too many"),
        (b"no archive at all", "not a zip archive"),
    ],
)
def test_an_unexpected_archive_is_not_unpacked(data: bytes, message: str) -> None:
    with pytest.raises(ServerUnfit, match=message):
        received(data).files()


def test_an_archive_with_another_hash_is_not_unpacked() -> None:
    with pytest.raises(ServerUnfit, match="hash"):
        received(archive({"tokenizer.json": b"{}"}), "0" * 64).files()


def test_tokenizers_are_compared_by_what_they_mean(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"a": 1}, "truncation": {"max_length": 5}, "padding": null}'
    )

    check_tokenizer({"tokenizer.json": b'{"padding": null,\n "model": {"a": 1}}'}, tmp_path)
    check_tokenizer({"vocab.json": b"{}"}, tmp_path)
    with pytest.raises(ServerUnfit, match="differs from"):
        check_tokenizer({"tokenizer.json": b'{"model": {"a": 2}}'}, tmp_path)


def test_a_model_only_its_server_runs_is_described(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Quantized, of an unsupported architecture, with an image encoder."""
    text = {"vocab_size": 400, "max_position_embeddings": 8192, "eos_token_id": [2, 6]}
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "quantization_config": {"bits": 8},
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    model, ends = read_external_model(
        tmp_path,
        name="large",
        engine="remote vllm",
        context_window_tokens_max=4096,
        capabilities=Capabilities(),
    )

    assert model.architecture == "DeepseekV4ForCausalLM"
    assert model.vocabulary_size == 400
    assert model.context_window_tokens == 4096
    assert ends == {2, 6}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"eos_token_id": 400}, "eos_token_id"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_model_that_does_not_say_what_is_needed_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = {"vocab_size": 400, "max_position_embeddings": 8192, "eos_token_id": 2} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointInvalid, match=named):
        read_external_model(
            tmp_path,
            name="large",
            engine="remote vllm",
            context_window_tokens_max=None,
            capabilities=Capabilities(),
        )


class Core:
    reported = EngineStatistics()


@pytest.fixture
def upkeep(tiny: TinyCheckpoint, remote_server: ServerProcess) -> Upkeep:
    settings = remote_settings(tiny, remote_server, Service.VLLM)
    nothing = cast(Any, None)
    examination = Examination(nothing, settings, nothing, nothing)

    def ignore(reason: str) -> None:
        pass

    return Upkeep(examination, cast(Any, Core()), 4, ignore, ignore, nothing)


def batch(number: int, *events: Any, **fields: Any) -> common_pb2.KvEventBatch:
    return common_pb2.KvEventBatch(sequence_number=number, events=events, **fields)


def stored(
    block: int, tokens: list[int], parent: int | None = None, **fields: Any
) -> common_pb2.KvCacheEvent:
    blocks = [common_pb2.KvBlock(block_hash=block, token_ids=tokens, block_size=len(tokens))]
    return common_pb2.KvCacheEvent(
        stored=common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=parent, **fields)
    )


def apply(upkeep: Upkeep, *batches: common_pb2.KvEventBatch) -> None:
    """Apply batches of events, with all their steps."""
    for each in batches:
        for _ in upkeep.take(each):
            pass


def test_cache_events_from_the_beginning_report_all(upkeep: Upkeep) -> None:
    apply(upkeep, batch(1, stored(11, [1, 2, 3, 4]), stored(12, [5, 6, 7, 8], parent=11)))
    assert upkeep.knows_all_blocks
    assert upkeep.blocks.matched_token_count([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8

    apply(
        upkeep,
        batch(2, common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=[12]))),
    )
    assert upkeep.blocks.matched_token_count([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4

    apply(upkeep, batch(3, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())))
    assert len(upkeep.blocks) == 0
    assert upkeep.knows_all_blocks


def test_a_lost_event_makes_all_doubtful_until_the_cache_is_cleared(upkeep: Upkeep) -> None:
    apply(upkeep, batch(1, stored(11, [1, 2, 3, 4])))
    apply(upkeep, batch(3, stored(13, [9, 9, 9, 9])))
    assert not upkeep.knows_all_blocks
    assert upkeep.blocks.matched_token_count([1, 2, 3, 4, 5]) == 0

    apply(upkeep, batch(4, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())))
    assert upkeep.knows_all_blocks


def test_events_of_a_server_that_was_there_before_do_not_report_all(upkeep: Upkeep) -> None:
    apply(upkeep, batch(500, stored(11, [1, 2, 3, 4])))

    assert not upkeep.knows_all_blocks


def test_blocks_elsewhere_and_of_adapters_are_not_counted(upkeep: Upkeep) -> None:
    apply(
        upkeep,
        batch(
            1,
            stored(11, [1, 2, 3, 4], tier=common_pb2.KV_CACHE_TIER_HOST),
            stored(12, [1, 2, 3, 4], lora_name="tuned"),
            stored(13, [1, 2, 3, 4], kv_cache_spec_kind="sliding_window"),
        ),
    )

    assert len(upkeep.blocks) == 0


def test_blocks_of_a_salt_are_found_under_that_salt_only(upkeep: Upkeep) -> None:
    """Even when two salts have equal tokens, and as vLLM shows a salt: with the first block."""
    head, tail = [1, 2, 3, 4], [5, 6, 7, 8]
    keyed = stored(21, head)
    keyed.stored.blocks[0].extra_keys.add(text="two")
    shown = stored(31, [7, 7, 7, 7])
    shown.stored.blocks[0].extra_keys.add(multimodal={"identifier": "image", "offset": 0})
    apply(
        upkeep,
        batch(
            1,
            *(stored(11, head, cache_salt="one"), stored(12, tail, parent=11, cache_salt="one")),
            *(keyed, shown, stored(41, [9, 9, 9, 9])),
        ),
    )

    def found(token_ids: list[int], salt: str) -> int:
        return upkeep.blocks.matched_token_count([*token_ids, 0], root_of(salt))

    whole = head + tail
    assert [found(whole, salt) for salt in ("one", "two", "three", "")] == [8, 4, 0, 0]
    assert found([7, 7, 7, 7], "") == found([7, 7, 7, 7], "one") == 0
    assert found([9, 9, 9, 9], "one") == 4, "events without a salt may be of any"


def test_load_records_between_events_are_no_events(upkeep: Upkeep) -> None:
    apply(upkeep, batch(1, stored(11, [1, 2, 3, 4])))
    record = common_pb2.EngineLoad(load_only=True, token_usage=0.25, max_total_num_tokens=400)
    apply(upkeep, batch(1, load=record))
    apply(upkeep, batch(2, stored(12, [5, 6, 7, 8], parent=11)))

    assert upkeep.knows_all_blocks
    reported = upkeep.queue.reported
    assert reported.kv_block_count_total == 100
    assert reported.kv_block_count_held == 25
    assert reported.kv_block_count_free == 75


def only_engine(settings: Settings) -> Engine:
    [served] = build_serving(settings).engines.values()
    assert isinstance(served, ReplicaSet)
    [replica] = served.replicas
    return replica.engine


async def test_a_model_without_a_directory_gets_its_files_from_its_server(
    tiny: TinyCheckpoint, remote_server: ServerProcess, tmp_path: Path
) -> None:
    """Also the files of the last time, while the server is unavailable."""
    remote_server.go_wrong("unsalted", "no_events")
    settings = Settings.of(
        home=tmp_path,
        engine="remote",
        remote_targets={"a/b": str(remote_server.target(Service.TRTLLM))},
        remote_share_prefixes=True,
        remote_context_tokens=512,
    )
    engine = only_engine(settings)
    assert isinstance(engine, RemoteEngine)
    async with remote_engine(engine._settings) as served:
        outcome = await run(served, make_request(prompt(1), 5))
    remote_server.go_wrong("no_tokenizer")
    again = only_engine(settings)

    assert len(outcome.token_ids) == 5
    assert (engine.model.name, engine.model.context_window_tokens) == ("a/b", 512)
    assert engine.model.directory == again.model.directory
    assert engine.model.directory == str(tmp_path / "remote" / "model-a%2Fb")
    assert os.listdir(tmp_path / "remote") == ["model-a%2Fb"], "and nothing is left beside it"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "WEIR_REMOTE_TARGETS"),
        ({"remote_targets": {"a": "host:1"}, "models": {"a": Path("/x")}}, "trtllm://host:port"),
        (
            {"remote_targets": {"a": "vllm://h:1"}, "models": {"a": Path("/x"), "b": Path("/y")}},
            "WEIR_MODELS names b",
        ),
        (
            {
                "remote_targets": {"a": "vllm://h:1"},
                "remote_tls_key": "k",
                "models": {"a": Path("/x")},
            },
            "WEIR_REMOTE_TLS_CA",
        ),
        (
            {"remote_targets": {"a": "vllm://127.0.0.1:1"}},
            "name the model's directory in WEIR_MODELS",
        ),
    ],
)
def test_useless_settings_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=named):
        build_serving(Settings.of(home=tmp_path, engine="remote", **changes))


def test_the_settings_cross_to_child_processes() -> None:
    settings = Settings.of(
        remote_targets={"a": "vllm://h:1", "b": "trtllm://h:2"}, remote_share_prefixes=True
    )

    assert Settings.from_environment(settings.to_environment()) == settings
    with pytest.raises(SettingInvalid, match="WEIR_FLEET gives a model several engines"):
        Settings.from_environment({"WEIR_REMOTE_TARGETS": "a=vllm://h:1,a=vllm://h:2"})


@pytest.mark.parametrize("service", [Service.TRTLLM, Service.VLLM, Service.SGLANG])
async def test_the_doctor_finds_a_server_well_and_its_faults(
    tiny: TinyCheckpoint,
    remote_server: ServerProcess,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "SILENCE_S", 1.0)
    settings = remote_settings(tiny, remote_server, service)
    well = await doctor.examine(settings)
    remote_server.go_wrong("other_tokenizer", "unsalted", "mute_abort", "no_events")
    ill = {found.question: found for found in await doctor.examine(settings)}

    assert [found for found in well if found.verdict is Verdict.BAD] == []
    assert len(well) == len(doctor.QUESTIONS)
    # The stand-ins honour more than Weir takes for granted.
    declared = DIALECTS[service].capabilities
    verdicts = {found.question: found.verdict for found in well}
    for question, is_declared in (
        (doctor.sampled_log_probabilities, declared.sampled_logprobs),
        (doctor.biased_logits, RequestField.LOGIT_BIAS not in declared.unsupported),
    ):
        expected = Verdict.EXPECTED if is_declared else Verdict.OTHER
        assert verdicts[inspect.getdoc(question) or ""] is expected
    expected = Verdict.OTHER if service is Service.SGLANG else Verdict.EXPECTED
    assert verdicts[inspect.getdoc(doctor.stop_id_beside_ignore_eos) or ""] is expected
    bad = {question for question, found in ill.items() if found.verdict is Verdict.BAD}
    assert bad == {"Is its tokenizer the local one?", "Does it cache prompts, separated by salt?"}
    assert ill["Does an abort during the output end it as cancelled?"].verdict is Verdict.OTHER
    assert ill["Does it publish cache events?"].verdict is Verdict.OTHER


def test_the_doctor_has_a_command_line(tiny: TinyCheckpoint, remote_server: ServerProcess) -> None:
    arguments = [
        "remote",
        str(remote_server.target(Service.VLLM)),
        "--model",
        str(tiny.directory),
        "--json",
    ]

    sent = CliRunner().invoke(commands, arguments)
    assert sent.exit_code == 0
    assert json.loads(sent.stdout)["facts"]["service"] == "vllm"
    assert remote_server.target(Service.VLLM).address not in sent.stdout
    assert str(tiny.directory.parent) not in sent.stdout
    remote_server.go_wrong("wrong_prompt")
    assert CliRunner().invoke(commands, arguments).exit_code == 1
