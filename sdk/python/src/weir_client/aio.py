"""Asyncio client of the inference API; `weir_client.sync` runs it in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Unpack

import grpc.aio
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc
from weir.v1 import usage_reports_pb2 as usage_pb

from weir_client import errors, wire
from weir_client.api_key import KeySource
from weir_client.checks import (
    check_known,
    check_labels,
    check_model,
    check_seconds,
    usage_groups,
    written,
)
from weir_client.connection import (
    KEEPALIVE_S,
    MESSAGE_BYTES_MAX,
    RETRY_WAIT_MAX_S,
    UNARY_OPTIONS,
    Addresses,
    Connection,
    ConnectionSettings,
    LazyClient,
    Purpose,
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
from weir_client.stream import Call, SharedStream
from weir_client.terms import Terms, set_keep
from weir_client.tls import TlsOptions
from weir_client.tools import Tool
from weir_client.values import Result, TokenCount

KEEP_MIN_S = 0.001  # a shorter keep time could round to zero


OPTIONS = (
    *UNARY_OPTIONS,
    "retry_wait_max_s",
    "max_message_bytes",
    "keepalive_s",
    "labels",
    "end_user",
)


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
        address: Addresses | None = None,
        api_key: KeySource | None = None,
        *,
        max_retries: int = 2,
        retry_wait_max_s: float = RETRY_WAIT_MAX_S,
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        keepalive_s: float = KEEPALIVE_S,
        timeout: float | None = None,
        labels: Mapping[str, str] | None = None,
        end_user: str | None = None,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Store the settings; the client connects on first use.

        Args:
            address: `host:port`, `unix:/path`, or either after `https://` or `http://`; default
                `WEIR_ADDRESS`, then this machine. Several servers: a list, or commas between.
            api_key: The key; default `WEIR_API_KEY`. An empty text calls without a key. Or a
                function, `async` or not, that returns a token: it is called at the first use,
                before a JSON Web Token expires, and once if the server refuses a token.
            max_retries: Further attempts for UNAVAILABLE, and for a quota that resets within
                `retry_wait_max_s`; only before the first token, with the same request id.
            retry_wait_max_s: Longest wait for a quota, in seconds; beyond it, the error is raised.
            max_message_bytes: Largest request that is sent; the server has its own limit.
            keepalive_s: Seconds between pings on a silent connection.
            timeout: Seconds for each call without a `timeout` of its own, retries included;
                default: no limit for a generation, 30 s for other calls.
            labels: Labels of each request, stored with its usage; a request's own labels are added,
                and replace those of the same name.
            end_user: Your own user for whom requests are made, unless a request names another.
            **tls: `tls` (True or False; by default on, unless the address is this machine),
                `root_certificates` (PEM bytes or a file, instead of the system's authorities), and
                `client_certificate` and `client_key` for mutual TLS.

        Raises:
            Unauthenticated: There is no key.
            InvalidRequest: An option is unknown or has an invalid value.
        """
        super().__init__(
            ConnectionSettings.resolve(
                address,
                api_key,
                max_message_bytes=max_message_bytes,
                keepalive_s=keepalive_s,
                retry=RetryPolicy(max_retries, retry_wait_max_s),
                timeout=timeout,
                purpose=Purpose(labels, end_user),
                options=OPTIONS,
                **tls,
            )
        )
        self._stream: SharedStream

    def generate(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Stream the answer to a question or a list of messages. Nothing is sent before the first
        use.

        Args:
            model: Name of the model; `list_models()` lists them.
            prompt: A question, or a list of messages: `Message` or dicts in OpenAI's shape.
            text: Instead of `prompt`: a text that the model gets without a chat template.
            token_ids: Instead of `prompt`: ids of the model's tokenizer.
            max_output_tokens: At least 1; by default the model stops, or its context window is
                full.
            max_cost: Limit of the cost, such as `Money.of("0.05", "USD")`; the answer ends as
                COST_LIMIT before the token that would exceed it.
            temperature: 0 (greedy) to 2. This and the other sampling options default to the
                model's.
            top_p: Above 0, at most 1: keeps the likeliest tokens whose probabilities add up to
                this.
            top_k: Number of likeliest tokens to keep; 0 keeps all.
            min_p: 0 to 1: drops tokens less likely than this fraction of the likeliest one.
            seed: Makes sampling repeatable.
            repetition_penalty: Above 0, at most 2; above 1 makes tokens of prompt and output less
                likely.
            presence_penalty: -2 to 2, subtracted once for each token that the output has.
            frequency_penalty: -2 to 2, subtracted for each time that the output has the token.
            logit_bias: Added to the logits of these token ids, -100 to 100 each.
            stop: A text, or up to 16, that ends the output and is cut off.
            stop_token_ids: Ids of tokens that end the output.
            min_output_tokens: Number of tokens before the output may end by itself.
            thinking: Whether the model thinks first, if its chat template has a switch.
            reasoning_effort: Instead of `thinking`: "none" to "max".
            max_reasoning_tokens: Limit of the thinking, after which the answer follows.
            continues_last_message: The last message, of the role "assistant", is the beginning of
                the answer; the output follows its text.
            ignore_eos: Go on past the model's end of sequence; for benchmarks.
            json_schema: The answer is JSON that is valid under this schema: a mapping, or its text.
            regex: The answer matches this regular expression.
            lark: The answer follows this EBNF grammar in Lark's syntax.
            tools: Functions that the model may call: `Tool` or dicts in OpenAI's shape. The calls
                are in `Result.tool_calls`, and stream in `Delta.tool_calls`.
            tool_choice: "auto" (default), "none", "required" (at least one call, no text), or a
                tool, which is called once.
            single_tool_call: The output ends after its first call.
            choice_count: 1 to 16 answers, in `Result.choices`. All are billed.
            beam_width: 2 to 16 beams that search for the likeliest answers, without sampling.
            length_penalty: With `beam_width`: -10 to 10, default 1; above 0 favours long answers.
            early_stopping: With `beam_width`: False (default), True or "never", as in transformers.
            top_logprobs: 0 to 20: log-probabilities of each token and of this many likeliest ones.
            usage_interval_tokens: Number of output tokens between two `UsageUpdate` events.
            labels: Labels stored with the usage, added to the client's.
            end_user: Your own user for whom the request is made: usage and limits of each are kept
                apart. Default: the client's.
            request_id: A UUID, the idempotency key of the request; generated by default.
            timeout: Seconds for the whole request, retries included; then it is cancelled and
                raises DeadlineExceeded. Default: the client's.
            max_retries: Retries before the first token. Default: the client's.
            start_timeout: Longest wait in the queue, in seconds; default `timeout`.
            tier: "interactive" (default), or "batch", which runs when no interactive request waits.
            region: Region of the deployment to run in. Default: the server's.
            no_fallback: Forbids that the operator's fallback answers if the model cannot.
                `Result.model` is the one that answered.
            keep_on_disconnect: Seconds that the request goes on without a connection, and the
                client tries to resume it; default 30, or `timeout` if that is less. That output is
                billed even if no client resumes. None or 0: the request ends with its connection.
            prefetch_tokens: Largest number of tokens sent ahead of the reader. Default: no limit.
            traceparent: Trace context of the request, as in W3C's header.
            tracestate: Trace context of the request, as in W3C's header.

        Raises:
            InvalidRequest: The request cannot be encoded, or exceeds `max_message_bytes`. All other
                errors are raised where the answer is read.
        """
        stream = self._open_stream()
        options = self._with_defaults(options)
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
        From then on the request belongs to this client: leaving its block or closing the client
        cancels it. Reading raises NotFound for a request that was not admitted, AlreadyExists
        (`REQUEST_SETTLED`) for one that has ended and is no longer kept, InvalidRequest
        (`OUTPUT_GONE`) for output that is not available.

        Args:
            request_id: Id of the request, as in `GenerationStream.request_id`.
            after_seq: Number of the last `Delta` that you have received; 0 sends all output.
            timeout: Seconds until the request is cancelled and DeadlineExceeded is raised.
            resume_s: Seconds to look for another stream when one breaks; default 30.
            prefetch_tokens: Largest number of tokens sent ahead of the reader, for a request that
                was started with it.
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

    def _with_defaults(self, options: GenerateOptions) -> GenerateOptions:
        """Add the client's time limit and end user, if there are none, and its labels."""
        known: GenerateOptions = {
            **options,
            "labels": self._labelled(options.get("labels")),
            "end_user": self._end_user(options.get("end_user")),
        }
        if self._settings.timeout_s is not None and "timeout" not in options:
            known["timeout"] = self._settings.timeout_s
        return known

    def _labelled(self, labels: Mapping[str, str] | None) -> Mapping[str, str]:
        """Add the client's labels to those of a request."""
        check_labels(labels or {})
        return {**(self._settings.purpose.labels or {}), **(labels or {})}

    def _embed_request(
        self, model: str, inputs: str | Sequence[EmbedInput], options: EmbedOptions
    ) -> pb.EmbedRequest:
        """Build an embedding request with the client's labels and end user."""
        request = build_embed(model, inputs, options, self._labelled(options.get("labels")))
        request.end_user = self._end_user(options.get("end_user"))
        return request

    def _end_user(self, end_user: str | None) -> str:
        """Choose the end user of a request: its own, or the client's."""
        return (self._settings.purpose.end_user if end_user is None else end_user) or ""

    def _terms(self, frame: pb.ClientFrame, options: GenerateOptions) -> Terms:
        """Build the terms of a request, and set the keep time in its start frame."""
        timeout_s = options.get("timeout")
        retry = self._settings.retry.limited(options.get("max_retries"))
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
        """Generate a whole answer and return it. Interrupting the call cancels the request.

        Args:
            model: Name of the model; `list_models()` lists them.
            prompt: A question, or a list of messages: `Message` or dicts in OpenAI's shape.
            text: Instead of `prompt`: a text that the model gets without a chat template.
            token_ids: Instead of `prompt`: ids of the model's tokenizer.
            max_output_tokens: At least 1; by default the model stops, or its context window is
                full.
            max_cost: Limit of the cost, such as `Money.of("0.05", "USD")`; the answer ends as
                COST_LIMIT before the token that would exceed it.
            temperature: 0 (greedy) to 2. This and the other sampling options default to the
                model's.
            top_p: Above 0, at most 1: keeps the likeliest tokens whose probabilities add up to
                this.
            top_k: Number of likeliest tokens to keep; 0 keeps all.
            min_p: 0 to 1: drops tokens less likely than this fraction of the likeliest one.
            seed: Makes sampling repeatable.
            repetition_penalty: Above 0, at most 2; above 1 makes tokens of prompt and output less
                likely.
            presence_penalty: -2 to 2, subtracted once for each token that the output has.
            frequency_penalty: -2 to 2, subtracted for each time that the output has the token.
            logit_bias: Added to the logits of these token ids, -100 to 100 each.
            stop: A text, or up to 16, that ends the output and is cut off.
            stop_token_ids: Ids of tokens that end the output.
            min_output_tokens: Number of tokens before the output may end by itself.
            thinking: Whether the model thinks first, if its chat template has a switch.
            reasoning_effort: Instead of `thinking`: "none" to "max".
            max_reasoning_tokens: Limit of the thinking, after which the answer follows.
            continues_last_message: The last message, of the role "assistant", is the beginning of
                the answer; the output follows its text.
            ignore_eos: Go on past the model's end of sequence; for benchmarks.
            json_schema: The answer is JSON that is valid under this schema: a mapping, or its text.
            regex: The answer matches this regular expression.
            lark: The answer follows this EBNF grammar in Lark's syntax.
            tools: Functions that the model may call: `Tool` or dicts in OpenAI's shape. The calls
                are in `Result.tool_calls`, and stream in `Delta.tool_calls`.
            tool_choice: "auto" (default), "none", "required" (at least one call, no text), or a
                tool, which is called once.
            single_tool_call: The output ends after its first call.
            choice_count: 1 to 16 answers, in `Result.choices`. All are billed.
            beam_width: 2 to 16 beams that search for the likeliest answers, without sampling.
            length_penalty: With `beam_width`: -10 to 10, default 1; above 0 favours long answers.
            early_stopping: With `beam_width`: False (default), True or "never", as in transformers.
            top_logprobs: 0 to 20: log-probabilities of each token and of this many likeliest ones.
            usage_interval_tokens: Number of output tokens between two `UsageUpdate` events.
            labels: Labels stored with the usage, added to the client's.
            end_user: Your own user for whom the request is made: usage and limits of each are kept
                apart. Default: the client's.
            request_id: A UUID, the idempotency key of the request; generated by default.
            timeout: Seconds for the whole request, retries included; then it is cancelled and
                raises DeadlineExceeded. Default: the client's.
            max_retries: Retries before the first token. Default: the client's.
            start_timeout: Longest wait in the queue, in seconds; default `timeout`.
            tier: "interactive" (default), or "batch", which runs when no interactive request waits.
            region: Region of the deployment to run in. Default: the server's.
            no_fallback: Forbids that the operator's fallback answers if the model cannot.
                `Result.model` is the one that answered.
            keep_on_disconnect: Seconds that the request goes on without a connection, and the
                client tries to resume it; default 30, or `timeout` if that is less. That output is
                billed even if no client resumes. None or 0: the request ends with its connection.
            prefetch_tokens: Largest number of tokens sent ahead of the reader. Default: no limit.
            traceparent: Trace context of the request, as in W3C's header.
            tracestate: Trace context of the request, as in W3C's header.

        Raises:
            WeirError: The request was refused or failed; `partial` has what was received.
        """
        async with self.generate(model, prompt, **options) as generation:
            return await generation.wait()

    async def count_tokens(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        text: str | None = None,
        tools: Sequence[Tool | Mapping[str, object]] | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
    ) -> TokenCount:
        """Count the tokens of a prompt and its tools as admission does. Nothing is run or billed.

        Args:
            model: Name of the model.
            prompt: A question, or a list of messages: `Message` or dicts in OpenAI's shape.
            text: Instead of `prompt`: a text that the model gets without a chat template.
            tools: Functions that the model may call: `Tool` or dicts in OpenAI's shape.
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.

        Raises:
            NotFound: The model is unknown.
            InvalidRequest: Tools together with `text`, or for a model that does not support them.
        """
        if (prompt is None) == (text is None):
            raise errors.InvalidRequest(
                "give exactly one of: a prompt, text=", reason="FIELD_INVALID"
            )
        check_model(model)
        is_set = None if prompt is None else conversation(prompt)
        fields = {"model": model, "conversation": is_set, "text": text, "tools": tools_shown(tools)}
        request = written(pb.CountTokensRequest, fields)
        response = await self._opened().call(
            self._stub.CountTokens, request, timeout=timeout, max_retries=max_retries
        )
        return TokenCount(response.input_token_count, response.context_window_tokens)

    async def quote(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> Quote:
        """Estimate tokens and cost of a `generate`, and check its admission. Nothing runs or is
        billed.

        Args:
            model: Name of the model.
            prompt: A question, or a list of messages: `Message` or dicts in OpenAI's shape.
            **options: The options of `generate`, such as `max_output_tokens`, `tools` and
                `timeout`.

        Raises:
            WeirError: As `generate`; but an exceeded quota is in the quote.
        """
        frame = build_start(model, prompt, self._with_defaults(options))
        response = await self._opened().call(
            self._stub.Quote,
            pb.QuoteRequest(start=frame.start),
            timeout=options.get("timeout"),
            max_retries=options.get("max_retries"),
        )
        return wire.read(Quote, response)

    async def quote_embed(
        self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]
    ) -> Quote:
        """Compute tokens and cost of an `embed`, and check its admission. Nothing runs or is
        billed.

        Args:
            model: Name of an embedding model; `list_models()` lists them.
            inputs: One text or a list, each a string or token ids.
            truncate: Cut texts that have more tokens than the model takes; by default they are
                refused.
            labels: Labels stored with the usage, added to the client's.
            end_user: Your own user for whom the request is made: usage and limits of each are kept
                apart. Default: the client's.
            tier: "interactive" (default), or "batch", which runs when no interactive request waits.
            request_id: A UUID, the idempotency key of the request; generated by default.
            timeout: Seconds for the whole request, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.

        Raises:
            WeirError: As `embed`; but an exceeded quota is in the quote.
        """
        request = self._embed_request(model, inputs, options)
        response = await self._opened().call(
            self._stub.Quote,
            pb.QuoteRequest(embed=request),
            timeout=options.get("timeout"),
            max_retries=options.get("max_retries"),
        )
        return wire.read(Quote, response)

    async def embed(
        self, model: str, inputs: str | Sequence[EmbedInput], **options: Unpack[EmbedOptions]
    ) -> EmbedResult:
        """Compute the vectors of one text or several. Retries are billed once.

        Args:
            model: Name of an embedding model; `list_models()` lists them.
            inputs: One text or a list, each a string or token ids.
            truncate: Cut texts that have more tokens than the model takes; by default they are
                refused.
            labels: Labels stored with the usage, added to the client's.
            end_user: Your own user for whom the request is made: usage and limits of each are kept
                apart. Default: the client's.
            tier: "interactive" (default), or "batch", which runs when no interactive request waits.
            request_id: A UUID, the idempotency key of the request; generated by default.
            timeout: Seconds for the whole request, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.

        Raises:
            InvalidRequest: A text has too many tokens, or an option an invalid value.
            QuotaExceeded: A limit is used up.
            AlreadyExists: An earlier attempt was billed, and its answer lost.
        """
        request = self._embed_request(model, inputs, options)
        response = await self._opened().call(
            self._stub.Embed,
            request,
            timeout=options.get("timeout"),
            max_retries=options.get("max_retries"),
        )
        return embed_result(request, response)

    async def list_models(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> list[Model]:
        """Return the models that the key may use, sorted by name.

        Args:
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.
        """
        response = await self._opened().call(
            self._stub.ListModels, pb.ListModelsRequest(), timeout=timeout, max_retries=max_retries
        )
        return [wire.read(Model, each) for each in response.models]

    async def get_quota(
        self,
        model: str = "",
        *,
        end_user: str | None = None,
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
    ) -> list[QuotaStatus]:
        """Return every limit that applies to the key; an empty list means unlimited.

        Args:
            model: Only the limits that apply to this model.
            end_user: Also the limits of this end user, even those of its first request to come.
                Default: the client's.
            labels: Also the limits of these labels, added to the client's.
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.
        """
        request = pb.GetQuotaRequest(
            model=model, end_user=self._end_user(end_user), labels=self._labelled(labels)
        )
        response = await self._opened().call(
            self._stub.GetQuota, request, timeout=timeout, max_retries=max_retries
        )
        return [wire.read(QuotaStatus, each) for each in response.quotas]

    async def get_restrictions(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> KeyRestrictions:
        """Return the key's scopes, models, tokens per request and expiry.

        Args:
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.
        """
        response = await self._opened().call(
            self._stub.GetQuota, pb.GetQuotaRequest(), timeout=timeout, max_retries=max_retries
        )
        return wire.read(KeyRestrictions, response.restrictions)

    async def get_generation(
        self, request_id: str, *, timeout: float | None = None, max_retries: int | None = None
    ) -> Generation:
        """Return the record of a request of the key's project.

        Args:
            request_id: Id of the request.
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.

        Raises:
            NotFound: There is no such request in the project.
        """
        request = pb.GetGenerationRequest(request_id=request_id)
        response = await self._opened().call(
            self._stub.GetGeneration, request, timeout=timeout, max_retries=max_retries
        )
        return wire.read(Generation, response.generation)

    async def usage(
        self,
        *,
        month: str = "",
        first_day: date | str = "",
        last_day: date | str = "",
        by: UsageGrouping | str | Sequence[UsageGrouping | str] = ("day", "model"),
        model: str = "",
        end_user: str = "",
        labels: Mapping[str, str] | None = None,
        project: bool = False,
        timeout: float | None = None,
        max_retries: int | None = None,
    ) -> UsageReport:
        """Return usage and cost of this key, or of its project, by day (UTC) and model by default.

        The cost is exact, before plan, credit and tax; it includes usage not posted yet.

        Args:
            month: `YYYY-MM`: the usage that the bill of the month charges.
            first_day: Instead of `month`: the first of up to 92 days of use, as a date or
                `YYYY-MM-DD`. Default: the first of the current month.
            last_day: The last of these days. Default: today.
            by: "day", "hour", "model", "end_user", "label:KEY" for the values of one label, or
                several of them, in the order of the rows.
            model: Only this model.
            end_user: Only this end user, by name.
            labels: Only requests with all these labels.
            project: The sum of all keys of the project, which a key that is limited to some models
                may not see. It is not given by end user or label.
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.

        Raises:
            InvalidRequest: A month, day or grouping is invalid, or there are more than 92 days.
            PermissionDenied: The key may not see the sum of its project.

        >>> from weir_client import Client
        >>> with Client() as client:
        ...     report = client.usage(by="model")
        >>> report.total.request_count == sum(row.request_count for row in report.rows)
        True
        """
        groups, label_key = usage_groups(by, "by")
        fields = {
            "project": project,
            "month": month,
            "first_day": str(first_day),
            "last_day": str(last_day),
            "group_by": groups,
            "label_key": label_key,
            "model": model,
            "end_user": end_user,
            "labels": labels or {},
        }
        request = written(usage_pb.GetOwnUsageRequest, fields, {"group_by": "by"})
        response = await self._opened().call(
            self._stub.GetOwnUsage, request, timeout=timeout, max_retries=max_retries
        )
        return wire.read(UsageReport, response)

    def _open(self, connection: Connection) -> None:
        """Implement `LazyClient._open`."""
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(connection.channel)

        async def open_call() -> Call:
            await connection.connected()
            call: Call = self._stub.Generate(metadata=grpc.aio.Metadata(*connection.metadata))
            return call

        self._stream = SharedStream(open_call, tried(self._settings), connection.key)

    async def _close(self, connection: Connection) -> None:
        """Implement `LazyClient._close`."""
        try:
            await self._stream.close()
        finally:
            await connection.close()
