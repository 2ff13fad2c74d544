"""The asyncio client of the inference API. The implementation; `weir_client.sync` puts threads around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc.aio
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc

from weir_client import errors, wire
from weir_client.checks import check_known, check_seconds, written
from weir_client.connection import (
    KEEPALIVE_S,
    MESSAGE_BYTES_MAX,
    RETRY_WAIT_MAX_S,
    Connection,
    ConnectionSettings,
    RetryPolicy,
)
from weir_client.embedding import EmbedInput, EmbedOptions, EmbedResult, build_embed, embed_result
from weir_client.generation import AsyncGeneration
from weir_client.models import Model
from weir_client.options import AttachOptions, GenerateOptions, Prompt
from weir_client.prompt import build_start, checked_prefetch, conversation, tools_shown
from weir_client.quote import Quote
from weir_client.resumption import RESUME_S
from weir_client.stream import SharedStream
from weir_client.terms import Terms, set_keep
from weir_client.tls import TlsOptions
from weir_client.tools import Tool
from weir_client.values import Generation, KeyRestrictions, QuotaStatus, Result, TokenCount

KEEP_MIN_S = 0.001  # what a caller's clock ends at once is kept for as good as no time


class AsyncClient:
    """A connection to the inference API, to be used as `async with AsyncClient() as client`.

    All generations share one stream; run as many at once as you like from the tasks of one event loop.

    >>> import asyncio
    >>> async def ask(*questions: str) -> list[Result]:
    ...     async with AsyncClient() as client:
    ...         return await asyncio.gather(*(client.complete("demo", each, max_output_tokens=20) for each in questions))
    >>> [result.usage.billed_token_count <= 20 for result in asyncio.run(ask("Which hotel has a pool?", "And a garden?"))]
    [True, True]
    """

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        max_retries: int = 2,
        retry_wait_max_s: float = RETRY_WAIT_MAX_S,
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        keepalive_s: float = KEEPALIVE_S,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Settles where to connect; the connection itself is made when it is first used.

        address: `host:port`, `unix:/path`, or either after `https://` or `http://`; else `WEIR_ADDRESS`, else this machine.
        tls: see `TlsOptions`: TLS is on unless the address is this machine; whom to trust; a client certificate.
        api_key: else `WEIR_API_KEY`; empty: call without one.
        max_retries: further attempts for UNAVAILABLE, and for a quota that frees itself within `retry_wait_max_s` seconds;
            only before the first token, with the same request id, honouring the server's hint.
        max_message_bytes: the largest request that is sent; the server has its own limit.
        keepalive_s: seconds between pings on a silent connection.

        Raises: Unauthenticated if there is no key; InvalidRequest for certificates that cannot be used.
        """
        self._settings = ConnectionSettings.resolve(
            address,
            api_key,
            max_message_bytes=max_message_bytes,
            keepalive_s=keepalive_s,
            retry=RetryPolicy(max_retries, retry_wait_max_s),
            **tls,
        )
        self._connection: Connection | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._stream: SharedStream | None = None

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._settings.address

    def generate(self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """A streamed answer. `prompt` is a question or a list of messages; `GenerateOptions` tells the rest.

        Raises: InvalidRequest for a request that cannot be written down or is larger than `max_message_bytes`. Everything
        else that can go wrong is raised where the answer is read.
        """
        stream = self._open_stream()
        frame = build_start(model, prompt, options)
        size, limit = pb.GenerateRequest(frames=[frame]).ByteSize(), self._settings.max_message_bytes
        if size > limit:  # sent all the same, it would end the shared stream, and every other request with it
            field = errors.FieldViolation("prompt", f"the request has {size} bytes, and the limit is {limit}")
            raise errors.InvalidRequest(
                f"the request is too large: {size} bytes, and the limit is {limit}",
                reason="MESSAGE_TOO_LARGE",
                request_id=frame.request_id,
                details=errors.ErrorDetails(field_violations=(field,)),
            )
        return AsyncGeneration(stream, frame, self._terms(frame, options))

    def attach(self, request_id: str, **options: Unpack[AttachOptions]) -> AsyncGeneration:
        """Receives a request of the project that was started before, by whatever client.

        The stream that received it until now is told `Aborted` with the reason `ATTACHED_ELSEWHERE`. The request is this
        client's from then on: leaving its block cancels it. Where it is read, NotFound is raised for a request that was not
        admitted, AlreadyExists (`REQUEST_SETTLED`) for one that is over and not kept any more, InvalidRequest (`OUTPUT_GONE`)
        for output that is not there.
        """
        check_known(options, AttachOptions.__annotations__)
        for name in ("timeout", "resume_s"):
            check_seconds(name, options.get(name))
        after = written(pb.AttachFrame, {"after_seq": options.get("after_seq", 0)})
        frame = written(pb.ClientFrame, {"request_id": request_id, "attach": after})
        keep_s, prefetch_tokens = options.get("resume_s", RESUME_S), checked_prefetch(options.get("prefetch_tokens"))
        terms = Terms(options.get("timeout"), self._settings.retry, keep_s, prefetch_tokens=prefetch_tokens)
        return AsyncGeneration(self._open_stream(), frame, terms)

    def _open_stream(self) -> SharedStream:
        if self._stream is None:
            raise RuntimeError("the client is not open: use it inside its `with` or `async with` block")
        return self._stream

    def _terms(self, frame: pb.ClientFrame, options: GenerateOptions) -> Terms:
        """How to run it. Writes the keep time into the frame."""
        retry, timeout_s, max_retries = self._settings.retry, options.get("timeout"), options.get("max_retries")
        if max_retries is not None:
            retry = RetryPolicy(max_retries, retry.wait_max_s)
        asked = "keep_on_disconnect" in options
        check_seconds("keep_on_disconnect", options.get("keep_on_disconnect"))
        if asked:
            keep_s = options["keep_on_disconnect"] or None
        else:  # never for longer than the caller waits, or than the server has said that it keeps requests
            longest_s = min(RESUME_S, RESUME_S if timeout_s is None else timeout_s, self._open_stream().keep_max_s)
            keep_s = max(longest_s, KEEP_MIN_S) if self._open_stream().keep_max_s else None
        set_keep(frame.start, keep_s)
        return Terms(timeout_s, retry, keep_s, keep_is_asked=asked, prefetch_tokens=options.get("prefetch_tokens"))

    async def complete(self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """The whole answer at once. Takes what `generate` takes. Cancelling the call cancels the request.

        Raises: WeirError.
        """
        async with self.generate(model, prompt, **options) as generation:
            return await generation.wait()

    async def count_tokens(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        text: str | None = None,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
    ) -> TokenCount:
        """The size of a prompt as admission counts it, with the tools that the model is shown, without running or billing anything.

        Raises: NotFound for an unknown model; InvalidRequest for tools beside `text=`, or that the model cannot be shown; any
        WeirError.
        """
        if (prompt is None) == (text is None):
            raise errors.InvalidRequest("give exactly one of: a prompt, text=", reason="FIELD_INVALID")
        asked = None if prompt is None else conversation(prompt)
        fields = {"model": model, "conversation": asked, "text": text, "tools": tools_shown(tools)}
        request = written(pb.CountTokensRequest, fields)
        response = await self._opened().call(self._stub.CountTokens, request, timeout=timeout)
        return TokenCount(response.input_token_count, response.context_window_tokens)

    async def quote(self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Quote:
        """What the same call of `generate` would count and cost, and whether it would be let in, without running it.

        Raises: what `generate` would, but for QuotaExceeded: that is the answer.
        """
        request = pb.QuoteRequest(start=build_start(model, prompt, options).start)
        response = await self._opened().call(self._stub.Quote, request, timeout=options.get("timeout"))
        return wire.read(Quote, response)

    async def quote_embed(self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]) -> Quote:
        """What the same call of `embed` would count and cost, and whether it would be let in, without embedding anything.

        Raises: what `embed` would, but for QuotaExceeded: that is the answer.
        """
        request = pb.QuoteRequest(embed=build_embed(model, inputs, options))
        response = await self._opened().call(self._stub.Quote, request, timeout=options.get("timeout"))
        return wire.read(Quote, response)

    async def embed(self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]) -> EmbedResult:
        """Vectors of texts. `inputs` is one text or several, each a text or its token ids; `EmbedOptions` tells the rest.

        Tried again like every call, with the same request id, which is billed once. Raises: InvalidRequest, QuotaExceeded,
        AlreadyExists if an earlier attempt was billed and its answer lost; any WeirError.
        """
        request = build_embed(model, inputs, options)
        response = await self._opened().call(self._stub.Embed, request, timeout=options.get("timeout"))
        return embed_result(request, response)

    async def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that the key may use, by name. Raises: WeirError."""
        response = await self._opened().call(self._stub.ListModels, pb.ListModelsRequest(), timeout=timeout)
        return [wire.read(Model, each) for each in response.models]

    async def get_quota(self, model: str = "", *, timeout: float | None = None) -> list[QuotaStatus]:
        """Every limit that applies to the key, or to the key and one model. Empty: unlimited. Raises: WeirError."""
        response = await self._opened().call(self._stub.GetQuota, pb.GetQuotaRequest(model=model), timeout=timeout)
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def get_restrictions(self, *, timeout: float | None = None) -> KeyRestrictions:
        """What the key is good for: scopes, models, tokens of one request, until when. Raises: WeirError."""
        response = await self._opened().call(self._stub.GetQuota, pb.GetQuotaRequest(), timeout=timeout)
        return wire.read(KeyRestrictions, response.restrictions)

    async def get_generation(self, request_id: str, *, timeout: float | None = None) -> Generation:
        """What is recorded of one request of the key's project. Raises: NotFound; any WeirError."""
        request = pb.GetGenerationRequest(request_id=request_id)
        response = await self._opened().call(self._stub.GetGeneration, request, timeout=timeout)
        return wire.read(Generation, response.generation)

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise RuntimeError("this client is open already")
        self._connection = Connection(self._settings)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._connection.channel)
        self._tasks = await asyncio.TaskGroup().__aenter__()
        metadata = self._connection.metadata
        self._stream = SharedStream(lambda: self._stub.Generate(metadata=grpc.aio.Metadata(*metadata)), self._tasks)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        connection, tasks, stream = self._connection, self._tasks, self._stream
        assert connection is not None
        assert tasks is not None
        assert stream is not None
        self._connection = None
        try:
            await stream.close()
        finally:
            # Without the error of the block: the group would wrap it into an exception group. Its own tasks never raise.
            await tasks.__aexit__(None, None, None)
            await connection.close()

    def _opened(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the client is not open: use it inside its `with` or `async with` block")
        return self._connection
