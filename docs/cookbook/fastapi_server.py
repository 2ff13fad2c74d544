"""Serve answers from FastAPI: one client for the process, streamed text, errors as HTTP statuses.

Run it with `uvicorn fastapi_server:app`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from weir_client import (
    AsyncClient,
    AsyncGeneration,
    InvalidRequest,
    QuotaExceeded,
    Unavailable,
    WeirError,
)


class Question(BaseModel):
    """Body of a request."""

    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the client with the server; requests share its connection."""
    async with AsyncClient() as app.state.weir:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/ask")
async def ask(question: Question) -> StreamingResponse:
    """Stream an answer. A browser that leaves cancels the request, and you stop paying for it."""
    answer = app.state.weir.generate("demo", question.text, max_output_tokens=200)
    first = await anext(answer)  # a refusal is raised here, while the status can still be set

    async def text(answer: AsyncGeneration) -> AsyncIterator[str]:
        async with answer:
            yield first.text
            async for delta in answer:
                yield delta.text

    return StreamingResponse(text(answer), media_type="text/plain; charset=utf-8")


@app.exception_handler(WeirError)
async def refused(request: Request, error: WeirError) -> JSONResponse:
    """Answer with the status that tells your caller what to do."""
    statuses = {InvalidRequest: 400, QuotaExceeded: 429, Unavailable: 503}
    wait_s = error.retry_after_s
    return JSONResponse(
        {"error": error.message, "reason": error.reason},
        status_code=statuses.get(type(error), 502),
        headers={} if wait_s is None else {"retry-after": str(round(wait_s + 0.5))},
    )
