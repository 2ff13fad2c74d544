"""Agents of other projects work with Weir, over a crash of the api process in a conversation.

Each writes two files by two calls of its shell tool and then says that it is done. The model is
scripted. The api process is killed in the middle of the second answer; the agent sends its request
again, and every token is billed once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web

from tests.conftest import new_database
from tests.inference.tool_checkpoints import make_conversation_checkpoint
from tests.service import MODEL, Service, Tenant, running, until

VARIABLE = "WEIR_TEST_AGENTS"  # folder of their programs, set by `make test-peers`
PROGRAMS = Path(os.environ.get(VARIABLE, "/"))
pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")

AGENT_MAX_S = 200
WINDOW = 131_072  # their prompts have up to 40,000 tokens of this tokenizer
TALK = [f" {number} bottles," for number in range(30)]
COMMANDS = ("echo one > one.txt", "cat one.txt; echo two > two.txt")

QUIET = {"DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


@dataclass(frozen=True)
class Agent:
    """tool: its shell. argument: member of the arguments; is_list: a list of commands."""

    name: str
    tool: str
    argument: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    is_list: bool = False

    def call(self, command: str, piece_count: int) -> list[str]:
        """Return a call as tokens. piece_count: calls with other counts have other tokens."""
        value: Any = [command] if self.is_list else command
        more = {"description": "Writes a file."} if self.tool.lower() == "bash" else {}
        body = json.dumps({"name": self.tool, "arguments": {self.argument: value, **more}})
        ends = [len(body) * number // piece_count for number in range(piece_count + 1)]
        pieces = [body[start:end] for start, end in itertools.pairwise(ends)]
        mark = "\n" * (piece_count % 2)
        return [f"<tool_call>{mark}", *pieces, f"{mark}</tool_call>"]


URL, KEY = "{url}", "{key}"
AGENTS = (
    Agent(
        "claude",
        "Bash",
        "command",
        ("-p", "Write the files.", "--output-format", "json", "--allowedTools", "Bash"),
        {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            **QUIET,
        },
    ),
    Agent(
        "codex",
        "exec_command",
        "cmd",
        ("exec", "--json", "--skip-git-repo-check", "Write the files."),
        {"WEIR_KEY": KEY},
        {
            ".codex/config.toml": f"""
model = "{MODEL}"
model_provider = "weir"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.weir]
name = "Weir"
base_url = "{URL}/v1"
env_key = "WEIR_KEY"
wire_api = "responses"
"""
        },
    ),
    Agent(
        "opencode",
        "bash",
        "command",
        ("run", "--format", "json", "Write the files."),
        {"WEIR_KEY": KEY, "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {
            "work/opencode.json": json.dumps(
                {
                    "model": f"weir/{MODEL}",
                    "small_model": f"weir/{MODEL}",
                    "share": "disabled",
                    "permission": {"bash": "allow"},
                    "provider": {
                        "weir": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": f"{URL}/v1", "apiKey": KEY},
                            "models": {MODEL: {"limit": {"context": WINDOW, "output": 8000}}},
                        }
                    },
                }
            )
        },
    ),
    Agent(
        "cline",
        "run_commands",
        "commands",
        ("--json", "-P", "openai", "-m", MODEL, "Write the files."),
        {"CLINE_TELEMETRY_DISABLED": "1"},
        is_list=True,
    ),
)


class Recorder:
    """Passes requests on to a service, and kills it in the middle of the second answer."""

    def __init__(self, service: Service, tokens: Sequence[str]) -> None:
        """tokens: of the answer in which the service is killed."""
        self.bodies: list[str] = []  # of answers that were complete
        self.cut: str | None = None  # part of the answer in which the service was killed
        self._service = service
        self._tokens = tokens

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            [address, *_] = runner.addresses
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        hop = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in hop
        }
        data = await request.read()
        assert request.transport is not None
        try:
            origin = self._service.openai_url.removesuffix("/v1")
            async with (
                ClientSession() as session,
                session.request(
                    request.method, origin + request.path_qs, data=data, headers=headers
                ) as answer,
            ):
                kept = {"content-type": answer.headers.get("content-type", "text/plain")}
                kept |= {n: v for n, v in answer.headers.items() if n.lower() == "retry-after"}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                body = b""
                async for part in answer.content.iter_any():
                    body += part
                    await response.write(part)
                    if self.cut is None and self._tokens[2].encode() in body:
                        self.cut = ""
                        await asyncio.to_thread(self._service.kill)
                        asyncio.get_running_loop().run_in_executor(None, self._service.start)
                        async for part in answer.content.iter_any():
                            body += part
                        raise ClientError
        except (ClientError, AssertionError, OSError):
            if self.cut == "":
                self.cut = body.decode(errors="replace")
            request.transport.abort()  # as the connection to a process that was killed
            raise asyncio.CancelledError from None
        self.bodies.append(body.decode())
        await response.write_eof()
        return response


def bill_on_the_wire(body: str) -> tuple[str, int, int] | None:
    """Return request id, input and output tokens of an answer; None if it has no bill."""
    if not (ids := re.findall(r'"request_ids":\["([0-9a-f-]+)"\]', body)):
        return None
    usage, _ = json.JSONDecoder().raw_decode(body, body.rindex('"usage":{') + len('"usage":'))
    if "prompt_tokens" in usage:
        return ids[-1], usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage.get("cache_read_input_tokens", 0)
    return ids[-1], usage["input_tokens"] + cached, usage["output_tokens"]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_finishes_its_work_over_a_crash_and_is_billed_to_the_token(
    agent: Agent, tmp_path: Path, postgres_server: str, template_database: str
) -> None:
    answers = [
        ["Let me see.", *agent.call(COMMANDS[0], 4)],
        ["Now the second:", *TALK, *agent.call(COMMANDS[1], 9)],
        ["All", " is", " done."],
    ]
    model = make_conversation_checkpoint(tmp_path / "model", answers, context_window_tokens=WINDOW)
    work = tmp_path / "home" / "work"
    work.mkdir(parents=True)
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(tmp_path / "weir", url, model, kv_cache_bytes=512 << 20)) as service,
    ):
        tenant = await service.tenant()
        recorder = Recorder(service, answers[1])
        async with recorder.listening() as address:
            output = await asyncio.to_thread(run, agent, tenant, address, work)

        assert (work / "one.txt").read_text() == "one\n", output
        assert (work / "two.txt").read_text() == "two\n", output
        assert "All is done." in output
        assert recorder.cut, "the process was killed in an answer"
        await until(lambda: service.database.held_hold_count() == 0, "the holds to be settled")
        check_bills(service, tenant, recorder, answers[1])


def run(agent: Agent, tenant: Tenant, address: str, work: Path) -> str:
    """Run an agent to its end and return its output."""
    known = {URL: address, KEY: tenant.secret}

    def filled(text: str) -> str:
        for name, value in known.items():
            text = text.replace(name, value)
        return text

    for name, text in agent.files.items():
        path = work.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(text))
    environment = {"PATH": os.environ["PATH"], "HOME": str(work.parent), "IS_SANDBOX": "1"}
    environment |= {name: filled(value) for name, value in agent.environment.items()}
    program = str(PROGRAMS / agent.name)

    def output_of(*arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=AGENT_MAX_S,
            text=True,
            check=False,
        )
        return done.stdout

    if agent.name != "cline":
        return output_of(*agent.arguments)
    output_of("auth", "-p", "openai", "-k", tenant.secret, "-m", MODEL, "-b", f"{address}/v1")
    output = output_of(*agent.arguments)
    if '"finishReason":"error"' in output:
        # It sends no request again, and continues a task in a terminal only: begin it again.
        output += output_of(*agent.arguments)
    return output


def check_bills(
    service: Service, tenant: Tenant, recorder: Recorder, cut_answer: Sequence[str]
) -> None:
    """Check the usage events against what went over the wire."""
    events = {str(event["request_id"]): event for event in service.database.events(tenant)}
    for bill in filter(None, map(bill_on_the_wire, recorder.bodies)):
        request_id, input_count, output_count = bill
        event = events.pop(request_id)
        assert (event["input_token_count"], event["billed_token_count"]) == (
            input_count,
            output_count,
        )
    [cut] = events.values()
    received = sum(json.dumps(token)[1:-1] in (recorder.cut or "") for token in cut_answer[:31])
    assert 0 < received <= cut["billed_token_count"] < len(cut_answer)
