"""Simulated engine that several api processes share: vLLM's completions with priorities.

    python -m bench.pool [--step-ms 100] [--running 16]

Prints `serving PORT`, and serves the model `tiny` until it is killed. The engine is the product's
scheduler with the costs of a GPU, slowed down so that a machine with few cores can run several api
processes before it. Requests are ordered by `priority`, lowest first, as vLLM does with
`--scheduling-policy priority`; unlike vLLM, it displaces running requests for lack of a place.

A step computes as many tokens as it can in the time in which it reads the weights. With the 512 of
an engine's default, one that has just begun with a flood's prompts would take five times as long as
one without, which no order of later requests can change: the benchmark would measure the size of
steps.

Each api process examines the server when it starts, with some seventy requests of no priority. They
have an engine of their own that is not slowed down: on the hardware they take half a second, but a
minute of this server's time, in which they would come before all others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from api.core.settings import bundled_models
from bench.engine_streams import stream
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.core.options import CostModel
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)

MODEL = "tiny"
STEP_TOKENS = 100  # 7.2 ms of the hardware's time to compute; reading the weights takes 7.3 ms
KNOWN = frozenset(
    {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "seed"),
        *("return_token_ids", "ignore_eos", "priority", "cache_salt"),
    }
)


def request_of(body: dict[str, Any]) -> GenerationRequest:
    """Read a request. Raises: HTTPBadRequest for a field that this server does not have."""
    if unknown := sorted(body.keys() - KNOWN):
        raise web.HTTPBadRequest(text=f"Unsupported parameter(s): {', '.join(unknown)}")
    return GenerationRequest(
        tuple(body["prompt"]),
        SamplingParams(temperature=0.0),
        StopCriteria(body["max_tokens"], (), frozenset(), ignore_eos=True),
        body.get("cache_salt") or "",
        rank=float(body.get("priority", 0)),
    )


async def complete(
    engine: TorchEngine, examined: TorchEngine, http: web.Request
) -> web.StreamResponse:
    """Answer a request as a stream of tokens, with the usage in its last message."""
    body = await http.json()
    request = request_of(body)
    if request.rank <= 1:  # what gateways examine a server with
        engine = examined
    if not body.get("stream"):
        raise web.HTTPBadRequest(text="stream must be true")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    cached = sent = 0
    async with stream(engine, request) as events:
        async for event in events:
            match event:
                case Scheduled():
                    cached = event.cached_token_count
                case TokensGenerated():
                    ids = list(event.token_ids)
                    sent += len(ids)
                    is_last = sent >= request.stop.max_output_tokens
                    choice = {
                        "index": 0,
                        "text": event.text,
                        "token_ids": ids,
                        "finish_reason": "length" if is_last else None,
                    }
                    await response.write(
                        b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()
                    )
                case SequenceFinished():
                    usage = {
                        "prompt_tokens": len(request.prompt_token_ids),
                        "completion_tokens": sent,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    }
                    last = json.dumps({"choices": [], "usage": usage}).encode()
                    await response.write(b"data: %s\n\ndata: [DONE]\n\n" % last)
    return response


def simulated(step_ms: float, running_max: int) -> TorchEngine:
    """Build an engine with the costs of a GPU, whose decoding steps take `step_ms`."""
    [directory] = bundled_models().values()
    return TorchEngine(
        TorchEngineSettings(
            directory=Path(directory),
            name=MODEL,
            step_token_count_max=STEP_TOKENS,
            step_time_target_s=None,  # it is in seconds that are not slowed down
            running_sequence_count_max=running_max,
            torch_thread_count=1,
            simulation=CostModel(time_scale=step_ms / CostModel().weights_ms),
        )
    )


async def serve(step_ms: float, running_max: int) -> None:
    """Serve on a free port until killed."""
    engine, examined = (
        simulated(step_ms, running_max),
        simulated(CostModel().weights_ms, running_max),
    )
    window = engine.model.context_window_tokens
    cards = [{"id": MODEL, "max_model_len": window, "parent": None}]

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": cards})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    async with asyncio.TaskGroup() as tasks:
        for each in (engine, examined):
            tasks.create_task(each.serve())
            await each.start()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", healthy)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", lambda http: complete(engine, examined, http))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print("serving", runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--running", type=int, default=16)
    options = parser.parse_args()
    asyncio.run(serve(options.step_ms, options.running))
