"""`weir generate`: standard output and error, endings, and failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir_cli import generate as command

from tests.cli.conftest import Run, ScriptedWeir

ANSWER = "Two hotels have a pool: the Grand Pier and the Old Mill."


def start_of(server: ScriptedWeir) -> pb.StartFrame:
    return server.inference.streams[0].messages[0].frames[0].start


def test_the_answer_goes_to_stdout_and_numbers_to_stderr(weir: Run, server: ScriptedWeir) -> None:
    result = weir("generate 'Which hotel has a pool?'")

    assert result.exit_code == 0
    assert result.stdout == ANSWER + "\n"
    request_id = server.inference.streams[0].messages[0].frames[0].request_id
    assert (
        result.stderr
        == "1,025 in (200 cached) · 150 out · 0.00022375 USD · TTFT 212 ms · 102.8 tokens/s ·"
        f" {request_id}\n"
    )


def test_json_is_one_document_on_stdout(weir: Run) -> None:
    result = weir("generate 'Which hotel has a pool?' --json")

    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["text"] == ANSWER
    assert document["finish_reason"] == "STOP"
    assert document["usage"]["cached_input_token_count"] == 200
    assert document["cost"] == {
        "currency_code": "USD",
        "amount": "0.00022375",
        "picos": 223_750_000,
    }
    assert document["timings"]["ttft_ms"] == 212


def test_flags_become_the_request(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    context = tmp_path / "hotels.txt"
    context.write_text("Listings:\n1. Grand Pier\n\n")

    result = weir(
        "generate 'Which has a pool?' --model demo --system 'Be brief.' --max-output-tokens 100 "
        "--temperature 0 --top-p 0.9 --top-k 5 --seed 7 --stop END --stop '\n\n' --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--logit-bias 12=-100 --logit-bias 7=1.5 --stop-token-id 9 --min-output-tokens 3 "
        f"--top-logprobs 2 --context {context}"
    )

    assert result.exit_code == 0
    start = start_of(server)
    assert [(each.role, each.content) for each in start.conversation.messages] == [
        (pb.ROLE_SYSTEM, "Be brief."),
        (pb.ROLE_USER, "Listings:\n1. Grand Pier\n\nQuestion: Which has a pool?"),
    ]
    assert start.sampling == pb.Sampling(
        temperature=0,
        top_p=0.9,
        top_k=5,
        seed=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={12: -100.0, 7: 1.5},
    )
    assert (list(start.stop_token_ids), start.min_output_tokens, start.top_logprobs) == ([9], 3, 2)
    assert (start.max_output_tokens, list(start.stop_sequences)) == (100, ["END", "\n\n"])


def test_a_response_format_comes_from_a_file_or_the_command_line(
    weir: Run, server: ScriptedWeir, tmp_path: Path
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "null"}')
    grammar.write_text('start: "a"')
    for flags in (["--json-schema", str(schema)], ["--regex", "a+"], ["--lark", str(grammar)]):
        assert weir("generate", "Hi", *flags).exit_code == 0

    starts = [stream.messages[0].frames[0].start for stream in server.inference.streams]
    assert [start.response_format for start in starts] == [
        pb.ResponseFormat(json_schema='{"type": "null"}'),
        pb.ResponseFormat(regex="a+"),
        pb.ResponseFormat(lark='start: "a"'),
    ]
    assert weir("generate", "Hi", "--json-schema", str(tmp_path / "absent")).exit_code == 2


def test_the_tier_and_the_time_to_start_are_requested(weir: Run, server: ScriptedWeir) -> None:
    assert weir("generate Hi --tier batch --start-timeout 1.5").exit_code == 0

    start = start_of(server)
    assert start.tier == pb.SERVICE_TIER_BATCH
    assert start.start_timeout.ToMilliseconds() == 1500
    wrong = weir("generate Hi --tier express")
    assert wrong.exit_code == 2
    assert "express" in wrong.stderr


def test_the_largest_cost_is_in_the_currency_of_the_model(weir: Run, server: ScriptedWeir) -> None:
    assert weir("generate Hi --max-cost 0.05").exit_code == 0

    [model] = [each for each in weir_models(server) if each.name == "demo"]
    limit = start_of(server).max_cost
    assert limit.currency_code == model.price.currency_code
    assert limit.units == 0
    assert limit.picos == 50_000_000_000
    wrong = weir("generate Hi --max-cost much")
    assert wrong.exit_code == 2
    assert "much" in wrong.stderr


def weir_models(server: ScriptedWeir) -> list[pb.Model]:
    """Yield the models of the scripted server."""
    reply = server.inference.replies["ListModelsRequest"]
    assert isinstance(reply, pb.ListModelsResponse)
    return list(reply.models)


def test_models_show_what_their_engines_compute_with(weir: Run, server: ScriptedWeir) -> None:
    weir_models(server)[0].kernels.append("torch")

    shown = weir("models").stdout

    assert "engine  kernels" in shown
    assert "torch   torch" in shown


def test_several_answers_are_shown_under_their_numbers(weir: Run, server: ScriptedWeir) -> None:
    result = weir("generate Hi --choices 2 --temperature 1")

    assert start_of(server).choice_count == 2
    assert result.stdout == f"[1] {ANSWER}\n", "the scripted server gives one"


def test_a_search_is_requested_by_its_beams(weir: Run, server: ScriptedWeir) -> None:
    beams = "--beam-width 4 --length-penalty 0.5 --early-stopping yes --choices 2"

    assert weir(f"generate Hi {beams}").exit_code == 0

    search = pb.BeamSearch(width=4, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_WHEN_FULL)
    assert start_of(server).beam_search == search


@pytest.mark.parametrize("bias", ["12", "x=1", "12=much"])
def test_an_invalid_bias_is_refused_by_name(weir: Run, bias: str) -> None:
    result = weir("generate", "Hi", "--logit-bias", bias)

    assert result.exit_code == 2
    assert bias in result.stderr


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"]])
def test_a_dash_reads_standard_input(weir: Run, server: ScriptedWeir, arguments: list[str]) -> None:
    assert weir("generate", *arguments, stdin="from a pipe\n").exit_code == 0

    assert start_of(server).conversation.messages[0].content == "from a pipe"


def test_a_prompt_can_come_from_a_file(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("from a file\n")

    assert weir("generate", "--file", str(tmp_path / "question.txt")).exit_code == 0

    assert start_of(server).conversation.messages[0].content == "from a file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a PROMPT or --file"),
        (["Hi", "--file", "-"], "give either a PROMPT or --file"),
        (["  "], "the question is empty"),
        (["--file", "does-not-exist"], "cannot be read"),
        (["Hi", "--temperature", "hot"], "--temperature"),
    ],
)
def test_wrong_usage_exits_with_code_2(weir: Run, arguments: list[str], message: str) -> None:
    result = weir("generate", *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_ctrl_c_cancels_shows_the_partial_usage_and_exits_130(
    weir: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write_then_interrupt(text: str) -> None:
        written.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write", write_then_interrupt)
    result = weir("generate 'slow answer'")

    assert result.exit_code == 130
    assert written == ["Two hotels "]
    assert "interrupted: the request is cancelled; billed so far:" in result.stderr
    assert "5 in · 1 out · 0.00022375 USD" in result.stderr


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("hot", "error: --temperature: must be 0 to 2"),
        (
            "poor",
            (
                "error: Your project may use 1,000 tokens per minute and has 40 left; this request"
                " needs 125. Try again in 32 s."
            ),
        ),
        (
            "huge",
            (
                "error: Your project may use 1,000 tokens per minute and has 40 left; this request"
                " needs 125. Send a smaller request, or ask an administrator to raise the limit."
            ),
        ),
        ("busy", "; try again in 5 s"),
        ("unknown", "error: there is no model named x"),
    ],
)
def test_a_refusal_is_one_line_with_its_remedy(weir: Run, question: str, line: str) -> None:
    result = weir("generate", question)

    assert result.exit_code == 1
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_answer_cut_off_by_a_quota_is_shown_and_is_no_success(weir: Run) -> None:
    result = weir("generate spent")

    assert result.exit_code == 1
    assert result.stdout == ANSWER + "\n"
    assert (
        "cut off: quota exhausted: tokens per minute of the project (limit 100,000, resets in 42 s)"
        in result.stderr
    )


def test_a_timeout_is_reported_with_its_flag(weir: Run) -> None:
    result = weir("generate 'slow answer' --timeout 0.2")

    assert result.exit_code == 1
    assert result.stdout == "Two hotels \n"
    assert "allow more time with --timeout" in result.stderr


def test_waiting_for_an_engine_does_not_disturb_the_output_of_a_pipe(weir: Run) -> None:
    result = weir("generate loading")

    assert result.stdout == ANSWER + "\n"
    assert result.stderr.count("\n") == 1


def test_the_only_model_is_the_default_and_several_are_named(
    weir: Run, server: ScriptedWeir
) -> None:
    one = pb.Model(name="large", task=pb.MODEL_TASK_GENERATE)
    other = pb.Model(name="small", task=pb.MODEL_TASK_GENERATE)
    vectors = pb.Model(name="vectors", task=pb.MODEL_TASK_EMBED)
    server.inference.replies["ListModelsRequest"] = pb.ListModelsResponse(models=[one, vectors])

    done = weir("generate Hi")
    assert done.exit_code == 0, done.stderr
    assert start_of(server).model == "large"

    server.inference.replies["ListModelsRequest"] = pb.ListModelsResponse(models=[one, other])
    for words in ("generate Hi", "count Hi", "quote Hi"):
        refused = weir(words)
        assert refused.exit_code == 2
        assert "name a model: there are large, small" in " ".join(refused.stderr.split())
    assert "the server has none for this" in weir("embed Hi").stderr
