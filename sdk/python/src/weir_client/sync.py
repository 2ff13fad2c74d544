"""Blocking twin of the asyncio client: the same calls, usable from many threads at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from types import TracebackType
from typing import Self, Unpack

from weir_client.aio import AsyncClient
from weir_client.api_key import KeySource
from weir_client.blocking import BlockingClient
from weir_client.connection import (
    KEEPALIVE_S,
    MESSAGE_BYTES_MAX,
    RETRY_WAIT_MAX_S,
    Addresses,
)
from weir_client.embedding import EmbedInput, EmbedOptions, EmbedResult
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
from weir_client.loop_thread import LoopThread
from weir_client.money import Money
from weir_client.options import AttachOptions, GenerateOptions, Prompt
from weir_client.tls import TlsOptions
from weir_client.tools import Tool
from weir_client.values import Admitted, Delta, Event, Limits, Partial, Result, TokenCount


class GenerationStream:
    """Stream of one answer, made by `Client.generate`. Nothing is sent before the first use.

    Leaving the `with` block cancels a running request and waits (at most 2 s) until the server has
    settled it, so that `result` has usage and cost. Breaking out of `for`, and an interrupt
    (Ctrl-C), cancel it as well; `next(stream)` takes single deltas without that. One thread reads;
    `cancel` may be called from any.

    >>> with client.generate("demo", "Which hotel has a pool?", max_output_tokens=20) as stream:
    ...     text = "".join(delta.text for delta in stream)
    >>> text == stream.result.text
    True
    """

    def __init__(
        self, thread: LoopThread[AsyncClient], generation: AsyncGeneration, owner: Client
    ) -> None:
        """Wrap a generation that runs in `thread`.

        The stream keeps its client, `owner`, open as long as it is used.
        """
        self._owner = owner
        self._thread = thread
        self._generation = generation
        self._unread: deque[Event] = deque()

    @property
    def request_id(self) -> str:
        """Id of the request, and its idempotency key."""
        return self._generation.request_id

    @property
    def model(self) -> str:
        """Model that the request asked for."""
        return self._generation.model

    @property
    def admitted(self) -> Admitted | None:
        """Admission, with input tokens and remaining quotas; None before it arrives."""
        return self._generation.admitted

    @property
    def resume_count(self) -> int:
        """Number of times the request moved to another stream."""
        return self._generation.resume_count

    @property
    def partial(self) -> Partial:
        """Output received so far, whether or not the request has ended."""
        return self._generation.partial

    @property
    def done(self) -> bool:
        """True if the request has ended, with any outcome."""
        return self._generation.done

    @property
    def result(self) -> Result:
        """Whole answer with finish reason, usage and cost. After a cancel, the delivered part.

        Raises: the WeirError that the request ended with; RuntimeError while it still runs.
        """
        return self._generation.result

    def cancel(self) -> None:
        """Ask the server to stop, without waiting. Output up to that point can still be read."""
        self._thread.run_soon(self._generation.cancel)

    def update(
        self, *, max_output_tokens: int | None = None, max_cost: Money | None = None
    ) -> Limits:
        """Change limits of the running request and return the new ones, from any thread.

        A limit below the present output or cost ends the request, as LENGTH or COST_LIMIT.

        Args:
            max_output_tokens: The new limit; None leaves it unchanged.
            max_cost: The new limit; None leaves it unchanged.

        Raises:
            InvalidRequest: A limit is invalid.
            FailedPrecondition: The request is not admitted yet, or has ended.
            Unavailable: No answer came.
        """
        return self._thread.run(
            lambda: self._generation.update(max_output_tokens=max_output_tokens, max_cost=max_cost)
        )

    def close(self) -> None:
        """Cancel the request if it still runs, and wait at most 2 s. Raises no WeirError."""
        self._thread.run(self._generation.aclose)

    def wait(self) -> Result:
        """Wait for the end of the request and return its result. Raises: WeirError."""
        return self._thread.run(self._generation.wait)

    def events(self) -> Iterator[Event]:
        """Yield every event: `Admitted`, `Progress`, `Delta`, `UsageUpdate`, `Resumed`."""
        while (event := self._next_event()) is not None:
            yield event

    def __iter__(self) -> Iterator[Delta]:
        """Iterate over the deltas. Leaving the iterator early (`break`) cancels the request."""
        return _Deltas(self)

    def __next__(self) -> Delta:
        while (event := self._next_event()) is not None:
            if isinstance(event, Delta):
                return event
        raise StopIteration

    def __enter__(self) -> Self:
        self._thread.run(self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_event(self) -> Event | None:
        if self._generation.holds_back:  # one by one, so that credit follows what is read
            return self._thread.run(self._generation.next_event)
        if not self._unread:
            self._unread.extend(self._thread.run(self._generation.take))
        return self._unread.popleft() if self._unread else None

    async def _begin(self) -> None:
        self._generation.start()


class _Deltas:
    """Iterator over the deltas of a generation. Dropping it early cancels the generation."""

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        return next(self._stream)

    def __del__(self) -> None:
        if not self._stream.done:
            self._stream.cancel()


class Client(BlockingClient[AsyncClient]):
    """Blocking client of the inference API, which connects on first use.

    Close it with `close()`, or use it as `with Client() as client`.

    >>> client = Client()
    >>> result = client.complete("demo", "Which hotel has a pool?", max_output_tokens=20)
    >>> result.usage.billed_token_count <= 20
    True
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
        client = AsyncClient(
            address,
            api_key,
            max_retries=max_retries,
            retry_wait_max_s=retry_wait_max_s,
            max_message_bytes=max_message_bytes,
            keepalive_s=keepalive_s,
            timeout=timeout,
            labels=labels,
            end_user=end_user,
            **tls,
        )
        super().__init__(client)

    def generate(
        self, model: str, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationStream:
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
        self._thread.open()
        generation = self._client.generate(model, prompt, **options)
        return GenerationStream(self._thread, generation, self)

    def attach(self, request_id: str, **options: Unpack[AttachOptions]) -> GenerationStream:
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
        self._thread.open()
        return GenerationStream(self._thread, self._client.attach(request_id, **options), self)

    def complete(
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
        return self._thread.run(lambda: self._client.complete(model, prompt, **options))

    def count_tokens(
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
        return self._thread.run(
            lambda: self._client.count_tokens(
                model, prompt, text=text, tools=tools, timeout=timeout, max_retries=max_retries
            )
        )

    def quote(
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
        return self._thread.run(lambda: self._client.quote(model, prompt, **options))

    def quote_embed(
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
        return self._thread.run(lambda: self._client.quote_embed(model, inputs, **options))

    def embed(
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
        return self._thread.run(lambda: self._client.embed(model, inputs, **options))

    def list_models(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> list[Model]:
        """Return the models that the key may use, sorted by name.

        Args:
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.
        """
        return self._thread.run(
            lambda: self._client.list_models(timeout=timeout, max_retries=max_retries)
        )

    def get_quota(
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
        return self._thread.run(
            lambda: self._client.get_quota(
                model, end_user=end_user, labels=labels, timeout=timeout, max_retries=max_retries
            )
        )

    def get_restrictions(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> KeyRestrictions:
        """Return the key's scopes, models, tokens per request and expiry.

        Args:
            timeout: Seconds for the call, retries included. Default: the client's.
            max_retries: Further attempts. Default: the client's.
        """
        return self._thread.run(
            lambda: self._client.get_restrictions(timeout=timeout, max_retries=max_retries)
        )

    def get_generation(
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
        return self._thread.run(
            lambda: self._client.get_generation(
                request_id, timeout=timeout, max_retries=max_retries
            )
        )

    def usage(
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
        return self._thread.run(
            lambda: self._client.usage(
                month=month,
                first_day=first_day,
                last_day=last_day,
                by=by,
                model=model,
                end_user=end_user,
                labels=labels,
                project=project,
                timeout=timeout,
                max_retries=max_retries,
            )
        )
