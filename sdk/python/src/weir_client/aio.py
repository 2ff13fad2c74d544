"""Asyncio client of the inference API; `weir_client.sync` runs it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Unpack

import grpc.aio
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc
from weir.v1 import usage_reports_pb2 as usage_pb

from weir_client import errors, wire
from weir_client.checks import check_known, check_seconds, written
from weir_client.connection import (
    KEEPALIVE_S,
    MESSAGE_BYTES_MAX,
    RETRY_WAIT_MAX_S,
    UNARY_OPTIONS,
    Connection,
    ConnectionSettings,
    LazyClient,
    RetryPolicy,
    tried,
)
from weir_client.embedding import EmbedInput, EmbedOptions, EmbedResult, build_embed, embed_result
from weir_client.generated_values import (
    Generation,
    KeyRestrictions,
    Model,
    QuotaStatus,
    Quote,
    UsageGrouping,
    UsageReport,
)
from weir_client.generation import AsyncGeneration
from weir_client.options import AttachOptions, GenerateOptions, Prompt
from weir_client.prompt import build_start, checked_prefetch, conversation, tools_shown
from weir_client.resumption import RESUME_S
from weir_client.stream import SharedStream
from weir_client.terms import Terms, set_keep
from weir_client.tls import TlsOptions
from weir_client.tools import Tool
from weir_client.values import Result, TokenCount

KEEP_MIN_S = 0.001  # a shorter keep time could round to zero


OPTIONS = (*UNARY_OPTIONS, "max_retries", "retry_wait_max_s", "max_message_bytes", "keepalive_s")


class AsyncClient(LazyClient):
    """Client of the inference API, which connects on first use.

    Close it with `aclose()`, or use it as `async with AsyncClient() as client`. All generations
    share one stream; run as many at once as you like from the tasks of one event loop.

    >>> import asyncio
    >>> async def ask(*questions: str) -> list[Result]:
    ...     async with AsyncClient() as client:
    ...         return await asyncio.gather(
    ...             *(client.complete("demo", each, max_output_tokens=20) for each in questions)
    ...         )
    >>> results = asyncio.run(ask("Which hotel has a pool?", "And a garden?"))
    >>> [result.usage.billed_token_count <= 20 for result in results]
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
        timeout: float | None = None,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Resolve the settings; the connection is made on first use.

        address: `host:port`, `unix:/path`, or either after `https://` or `http://`; default
            `WEIR_ADDRESS`, then this machine.
        tls: options of TLS and its certificates, see `TlsOptions`. By default TLS is used unless
            the address is this machine.
        api_key: default `WEIR_API_KEY`; an empty string calls without a key.
        max_retries: further attempts for UNAVAILABLE, and for a quota that resets within
            `retry_wait_max_s` seconds; only before the first token, with the same request id and
            the server's retry-after.
        max_message_bytes: the largest request that is sent; the server has its own limit.
        keepalive_s: seconds between pings on a silent connection.
        timeout: seconds for each call without a `timeout` of its own, retries included; default: no
            limit for a generation, 30 s for other calls.

        Raises: Unauthenticated if there is no key; InvalidRequest for invalid certificates.
        """
        super().__init__(
            ConnectionSettings.resolve(
                address,
                api_key,
                max_message_bytes=max_message_bytes,
                keepalive_s=keepalive_s,
                retry=RetryPolicy(max_retries, retry_wait_max_s),
                timeout=timeout,
                options=OPTIONS,
                **tls,
            )
        )
        self._stream: SharedStream

    def generate(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Stream an answer to a question or a list of messages; see `GenerateOptions`.

        Raises: InvalidRequest for a request that cannot be encoded or exceeds `max_message_bytes`.
        All other errors are raised where the answer is read.
        """
        stream = self._open_stream()
        options = self._timed(options)
        frame = build_start(model, prompt, options)
        size, limit = (
            pb.GenerateRequest(frames=[frame]).ByteSize(),
            self._settings.max_message_bytes,
        )
        if size > limit:  # sending it would end the shared stream and with it every other request
            field = errors.FieldViolation(
                "prompt", f"the request has {size} bytes, and the limit is {limit}"
            )
            raise errors.InvalidRequest(
                f"the request is too large: {size} bytes, and the limit is {limit}",
                reason="MESSAGE_TOO_LARGE",
                request_id=frame.request_id,
                details=errors.ErrorDetails(field_violations=(field,)),
            )
        return AsyncGeneration(stream, frame, self._terms(frame, options))

    def attach(self, request_id: str, **options: Unpack[AttachOptions]) -> AsyncGeneration:
        """Receive the output of a request of the same project that any client started earlier.

        The stream that received it until now gets `Aborted` with the reason `ATTACHED_ELSEWHERE`.
        From then on the request belongs to this client: leaving the `async with` block cancels it.
        Reading raises NotFound for a request that was not admitted, AlreadyExists
        (`REQUEST_SETTLED`) for one that has ended and is no longer kept, InvalidRequest
        (`OUTPUT_GONE`) for output that is not available.
        """
        check_known(options, AttachOptions.__annotations__)
        for name in ("timeout", "resume_s"):
            check_seconds(name, options.get(name))
        after = written(pb.AttachFrame, {"after_seq": options.get("after_seq", 0)})
        frame = written(pb.ClientFrame, {"request_id": request_id, "attach": after})
        terms = Terms(
            options.get("timeout", self._settings.timeout_s),
            self._settings.retry,
            options.get("resume_s", RESUME_S),
            prefetch_tokens=checked_prefetch(options.get("prefetch_tokens")),
        )
        return AsyncGeneration(self._open_stream(), frame, terms)

    def _open_stream(self) -> SharedStream:
        self._opened()
        return self._stream

    def _timed(self, options: GenerateOptions) -> GenerateOptions:
        """Add the client's time limit to options without one."""
        limit_s = self._settings.timeout_s
        if limit_s is None or "timeout" in options:
            return options
        return {**options, "timeout": limit_s}

    def _terms(self, frame: pb.ClientFrame, options: GenerateOptions) -> Terms:
        """Build the terms of a request, and set the keep time in its start frame."""
        retry, timeout_s, max_retries = (
            self._settings.retry,
            options.get("timeout"),
            options.get("max_retries"),
        )
        if max_retries is not None:
            retry = RetryPolicy(max_retries, retry.wait_max_s)
        is_set = "keep_on_disconnect" in options
        check_seconds("keep_on_disconnect", options.get("keep_on_disconnect"))
        if is_set:
            keep_s = options["keep_on_disconnect"] or None
        else:  # at most the caller's timeout and the server's known limit
            longest_s = min(
                RESUME_S,
                RESUME_S if timeout_s is None else timeout_s,
                self._open_stream().keep_max_s,
            )
            keep_s = max(longest_s, KEEP_MIN_S) if self._open_stream().keep_max_s else None
        set_keep(frame.start, keep_s)
        return Terms(
            timeout_s,
            retry,
            keep_s,
            keep_is_requested=is_set,
            prefetch_tokens=options.get("prefetch_tokens"),
        )

    async def complete(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Generate a whole answer and return it. Takes the arguments of `generate`.

        Cancelling the call cancels the request. Raises: WeirError.
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
        """Count the tokens of a prompt and its tools as admission does. Nothing is run or billed.

        Raises: NotFound for an unknown model; InvalidRequest for tools together with `text=`, or
        with a model that does not support tools; any WeirError.
        """
        if (prompt is None) == (text is None):
            raise errors.InvalidRequest(
                "give exactly one of: a prompt, text=", reason="FIELD_INVALID"
            )
        is_set = None if prompt is None else conversation(prompt)
        fields = {"model": model, "conversation": is_set, "text": text, "tools": tools_shown(tools)}
        request = written(pb.CountTokensRequest, fields)
        response = await self._opened().call(self._stub.CountTokens, request, timeout=timeout)
        return TokenCount(response.input_token_count, response.context_window_tokens)

    async def quote(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> Quote:
        """Estimate tokens and cost of a `generate` with these arguments, and check its admission.

        Nothing is generated or billed. Raises: as `generate`, but an exceeded quota is in the
        quote.
        """
        request = pb.QuoteRequest(start=build_start(model, prompt, options).start)
        response = await self._opened().call(
            self._stub.Quote, request, timeout=options.get("timeout")
        )
        return wire.read(Quote, response)

    async def quote_embed(
        self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]
    ) -> Quote:
        """Compute tokens and cost of an `embed` with these arguments, and check its admission.

        Nothing is computed or billed. Raises: as `embed`, but an exceeded quota is in the quote.
        """
        request = pb.QuoteRequest(embed=build_embed(model, inputs, options))
        response = await self._opened().call(
            self._stub.Quote, request, timeout=options.get("timeout")
        )
        return wire.read(Quote, response)

    async def embed(
        self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]
    ) -> EmbedResult:
        """Compute the vectors of one text or several, as strings or token ids; see `EmbedOptions`.

        Retries have the same request id, so that the request is billed once. Raises:
        InvalidRequest; QuotaExceeded; AlreadyExists if an earlier attempt was billed and its answer
        lost; any WeirError.
        """
        request = build_embed(model, inputs, options)
        response = await self._opened().call(
            self._stub.Embed, request, timeout=options.get("timeout")
        )
        return embed_result(request, response)

    async def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that the key may use, sorted by name. Raises: WeirError."""
        response = await self._opened().call(
            self._stub.ListModels, pb.ListModelsRequest(), timeout=timeout
        )
        return [wire.read(Model, each) for each in response.models]

    async def get_quota(
        self, model: str = "", *, timeout: float | None = None
    ) -> list[QuotaStatus]:
        """Return every limit that applies to the key; an empty list means unlimited.

        `model` selects the limits that apply to this model. Raises: WeirError.
        """
        response = await self._opened().call(
            self._stub.GetQuota, pb.GetQuotaRequest(model=model), timeout=timeout
        )
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def get_restrictions(self, *, timeout: float | None = None) -> KeyRestrictions:
        """Return the key's scopes, models, tokens per request and expiry. Raises: WeirError."""
        response = await self._opened().call(
            self._stub.GetQuota, pb.GetQuotaRequest(), timeout=timeout
        )
        return wire.read(KeyRestrictions, response.restrictions)

    async def get_generation(self, request_id: str, *, timeout: float | None = None) -> Generation:
        """Return the record of a request of the key's project. Raises: NotFound; WeirError."""
        request = pb.GetGenerationRequest(request_id=request_id)
        response = await self._opened().call(self._stub.GetGeneration, request, timeout=timeout)
        return wire.read(Generation, response.generation)

    async def usage(
        self,
        *,
        month: str = "",
        first_day: date | str = "",
        last_day: date | str = "",
        by: UsageGrouping | str | Sequence[UsageGrouping | str] = ("day", "model"),
        model: str = "",
        project: bool = False,
        timeout: float | None = None,
    ) -> UsageReport:
        """Return usage and cost of this key, or of its project, by day (UTC) and model.

        month: `YYYY-MM`, the usage that the month's bill charges; or
        first_day, last_day: days of use, up to 92, as dates or `YYYY-MM-DD`. By default the current
            month until today.
        by: "day", "model" or both, in the order of the rows.
        model: only this model.
        project: the sum of all keys of the project, which a key that is limited to some models may
            not see.

        `cost` is exact, before plan, credit and tax; it includes usage not posted yet. Raises:
        InvalidRequest, PermissionDenied; any WeirError.

        >>> from weir_client import Client
        >>> with Client() as client:
        ...     report = client.usage(by="model")
        >>> report.total.request_count == sum(row.request_count for row in report.rows)
        True
        """
        groups = [by] if isinstance(by, str) else by
        numbers = [f"USAGE_GROUPING_{str(each).upper()}" for each in groups]
        fields = {
            "project": project,
            "month": month,
            "first_day": str(first_day),
            "last_day": str(last_day),
            "group_by": numbers,
            "model": model,
        }
        request = written(usage_pb.GetOwnUsageRequest, fields, {"group_by": "by"})
        response = await self._opened().call(self._stub.GetOwnUsage, request, timeout=timeout)
        return wire.read(UsageReport, response)

    def _open(self, connection: Connection) -> None:
        """Implement `LazyClient._open`."""
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(connection.channel)
        metadata = connection.metadata
        self._stream = SharedStream(
            lambda: self._stub.Generate(metadata=grpc.aio.Metadata(*metadata)),
            tried(self._settings),
        )

    async def _close(self, connection: Connection) -> None:
        """Implement `LazyClient._close`."""
        try:
            await self._stream.close()
        finally:
            await connection.close()
