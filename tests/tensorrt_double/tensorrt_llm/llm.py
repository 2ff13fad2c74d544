"""LLM of the double: the torch engine's core on a thread, and a worker process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from inference import engine
from inference.checkpoint.checkpoint import read_config
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.engine import SamplingParams as CoreSampling
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits
from inference.text.tokenizer import Tokenizer

from .faults import Faults
from .parameters import PUBLISHED, KvCacheConfig, SamplingParams
from .results import IterationResult, Logprob, RequestError, RequestOutput, Response

KV_BYTES = 8 << 20
FIRST_FAVOURED = 16  # the adapter with id 1 favours the next token
HF_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_gate": "up_proj",
    "mlp_4h_to_h": "down_proj",
}
REASONS = {
    engine.EngineFinishReason.STOP: "stop",
    engine.EngineFinishReason.STOP_SEQUENCE: "stop",
    engine.EngineFinishReason.LENGTH: "length",
    engine.EngineFinishReason.CANCELLED: "cancelled",
}


class Running:
    """Running request."""

    def __init__(self, result: RequestOutput, sampling: Any, prompt: list[int]) -> None:
        self.result = result
        self.sampling = sampling
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.cached_tokens = 0
        self.is_cut = False  # its text is stopped for the client, while the engine continues

    def response(
        self, finish_reason: str | None = None, stop_reason: int | str | None = None, text: str = ""
    ) -> Response:
        return Response(
            list(self.token_ids),
            list(self.logprobs),
            self.cached_tokens,
            text,
            finish_reason,
            stop_reason,
        )


def _start(code: str, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, name], start_new_session=True)


class LLM:
    """Double of `LLM`. The constructor blocks; `generate_async` needs a running loop."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        known = {
            *PUBLISHED["classes"]["BaseLlmArgs"]["fields"],
            *PUBLISHED["classes"]["TorchLlmArgs"]["fields"],
        }
        for name in kwargs:
            if name in PUBLISHED["trt_only_args_rejected_by_LLM"]:
                raise ValueError(f"{name} is only supported by the TensorRT engine")
            if name not in known:
                raise ValueError(f"LLM got invalid argument: {name}")
        if isinstance(kwargs.get("speculative_config"), dict):
            raise ValueError("speculative_config must be a DecodingBaseConfig")
        if tensor_parallel_size > 1 or kwargs.get("pipeline_parallel_size", 1) > 1:
            raise RuntimeError("Only 1 GPUs are available, but more are required.")
        self.kwargs = kwargs
        self._faults = Faults()
        if (lora := kwargs.get("lora_config")) is not None and len(lora.lora_dir) != 1:
            assert lora.lora_target_modules, "Expecting at least one lora target module"
        if self._faults.has("abort_on_load"):
            print("MPI_ABORT was invoked on rank 0", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        # A checkpoint that only the real library could compute has another one in here.
        directory = Path(model, "double") if Path(model, "double").is_dir() else Path(model)
        self._config = read_config(directory)
        self._tokenizer = Tokenizer(directory)
        self._max_seq_len, self._step_tokens = kwargs["max_seq_len"], kwargs["max_num_tokens"]
        limits = EngineLimits(
            context_window_tokens=self._max_seq_len,
            step_token_count_max=self._step_tokens,
            running_sequence_count_max=kwargs["max_batch_size"],
            waiting_sequence_count_max=100_000,
        )
        self._kv: Any = kwargs.get("kv_cache_config") or KvCacheConfig()
        self._core = EngineCore(
            EngineOptions(str(directory), limits, kv_cache_bytes=KV_BYTES, draft_token_count_max=0)
        )
        self._running: dict[int, Running] = {}
        self._orders: list[Any] = []
        self._changed = threading.Condition()
        self._next_id = 0
        self._is_closed = False
        self._wedged = False
        self._submitted = False
        self._statistics, self._events = IterationResult(), IterationResult()
        self._event_id = 0
        self._stored: dict[tuple[int, ...], int] = {}
        if self._kv.event_buffer_max_size:
            levels = [self._core.pool.block_count_total, 0]
            self._publish({"type": "created", "num_blocks_per_cache_level": levels})
        self._random = random.Random(7)  # joins steps to responses of several tokens
        self._generator = random.Random(42)
        self._loop: asyncio.AbstractEventLoop | None = None
        # The worker process of a rank: in a session of its own, it outlives this process. Its death
        # is not reported to the client. Beside it, a compiler ends by itself.
        self._worker: subprocess.Popen[bytes] | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        if not self._faults.has("lonely"):
            self._worker = _start("import time; time.sleep(600)", "mpi4py.futures.server")
            self._helper = _start("import time; time.sleep(1)", "compile_worker")
        self._thread = threading.Thread(target=self._run, name="double-executor", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer."""
        return self._tokenizer

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit and return at once. Changes the given parameters."""
        if self._is_closed:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, list) or not all(isinstance(token, int) for token in inputs):
            raise TypeError("The inputs must be type list of int, but got something else.")
        if not all(0 <= token < self._config.vocabulary_size for token in inputs):
            raise RequestError("Token ID out of range")
        if not self.kwargs.get("enable_chunked_prefill") and len(inputs) > self._step_tokens:
            raise RequestError(f"a prompt of {len(inputs)} tokens exceeds max_num_tokens")
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise TypeError("The sampling_params must be type SamplingParams or None")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("the loop is not the one that all others had")
        self._loop = loop
        self._change(sampling)
        result = RequestOutput(self._next_id, list(inputs), self._abort)
        self._next_id += 1
        request = self._request(result, sampling, cache_salt, lora_request)
        with self._changed:
            self._submitted = True
            self._statistics.mark_undone()
            self._events.mark_undone()
            self._orders.append((result, sampling, request))
            self._changed.notify()
        return result

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the entries so far; none before the first request."""
        return self._statistics.get_results()

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """Return the only iterator of statistics."""
        self._statistics.set_timeout(timeout or 0.0)
        return self._statistics

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the entries so far."""
        assert self._submitted, "generate was not called yet"
        return self._events.get_results()

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        """Return the only iterator of events."""
        assert self._submitted, "generate was not called yet"
        self._events.set_timeout(timeout or 0.0)
        return self._events

    def shutdown(self) -> None:
        """Shut down. May be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        for process in filter(None, (self._worker, self._helper)):
            process.kill()
            process.wait()

    def _check_health(self) -> bool:
        """Return whether the engine runs; True for a dead engine, too."""
        return not self._is_closed

    def _change(self, sampling: Any) -> None:
        if sampling.end_id is None:
            ends = sorted(self._config.end_token_ids)
            sampling.end_id = ends[0]
            sampling.pad_id = ends[0]
            sampling.stop_token_ids = [*(sampling.stop_token_ids or []), *ends[1:]]
        elif sampling.stop:
            raise RuntimeError("stop words were not processed by tokenizer")

    def _request(
        self, result: RequestOutput, sampling: Any, cache_salt: str | None, lora_request: Any
    ) -> engine.GenerationRequest:
        prompt = result.prompt_token_ids
        limit = self._max_seq_len - len(prompt)
        if limit < 1:
            self._wedged = True  # the engine hangs for all requests (NVIDIA/TensorRT-LLM#4441)
            limit = 1
        ends = frozenset(() if sampling.ignore_eos else (sampling.end_id,)) | frozenset(
            sampling.stop_token_ids or ()
        )
        guide, response_format = sampling.guided_decoding, None
        if guide is not None:
            assert self.kwargs.get("guided_decoding_backend"), "guided decoding is off"
            kinds = (
                (engine.GrammarKind.JSON_SCHEMA, guide.json),
                (engine.GrammarKind.REGEX, guide.regex),
                (engine.GrammarKind.LARK, guide.grammar),
            )
            response_format = next(
                engine.ResponseFormat(kind, source) for kind, source in kinds if source
            )
        bias = (
            ()
            if sampling.embedding_bias is None
            else tuple(enumerate(map(float, sampling.embedding_bias)))
        )
        return engine.GenerationRequest(
            tuple(prompt),
            CoreSampling(
                temperature=0.0 if sampling.is_greedy else float(sampling.temperature),
                top_p=sampling.top_p or 1.0,
                top_k=sampling.top_k or 0,
                seed=self._generator.getrandbits(63),  # one generator serves all requests
                logit_bias=tuple(pair for pair in bias if pair[1]) + self._adapted(lora_request),
                top_logprobs=sampling.logprobs,
            ),
            engine.StopCriteria(
                min(sampling.max_tokens, limit),  # clamped, with a warning in the log
                stop_token_ids=frozenset() if guide else frozenset(end for end in ends if end >= 0),
                ignore_eos=guide is None,
                # Only `end_id` is held off: any stop token ends the output earlier.
                min_output_tokens=(
                    0 if sampling.stop_token_ids else min(sampling.min_tokens or 0, limit)
                ),
            ),
            cache_salt=cache_salt or "",
            response_format=response_format,
        )

    def _adapted(self, lora_request: Any) -> tuple[tuple[int, float], ...]:
        """Return the effect of an adapter: a bias for one token. Its id decides which.

        Without `lora_config`, with CUDA graphs, and of modules that are not configured, the base
        model answers, and nothing is reported. In the release, an id also separates cached blocks;
        here only salts do.
        """
        lora = self.kwargs.get("lora_config")
        if lora_request is None or lora is None or self._faults.has("lora_ignored"):
            return ()
        if self.kwargs.get("cuda_graph_config", True) is not None:
            return ()
        adapter = json.loads(Path(lora_request.lora_path, "adapter_config.json").read_text())
        if adapter["r"] > lora.max_lora_rank:
            raise RequestError(f"rank {adapter['r']} exceeds max_lora_rank {lora.max_lora_rank}")
        known = {HF_NAMES[module] for module in lora.lora_target_modules}
        if not lora.lora_dir and not known & {*adapter["target_modules"]}:
            return ()
        return ((FIRST_FAVOURED + lora_request.lora_int_id, 50.0),)

    def _abort(self, result: RequestOutput) -> None:
        assert not self._is_closed, "the executor is gone"
        if self._faults.has("mute_abort"):
            return
        with self._changed:
            self._orders.append(result)
            self._changed.notify()

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                while not self._orders and self._core.idle and not self._is_closed:
                    self._changed.wait()
                orders, self._orders = self._orders, []
            if self._wedged or (self._worker is not None and self._worker.poll() is not None):
                return  # the thread dies, and all requests hang
            for order in orders:
                self._handle(order)
            events = self._core.step()
            generating_count = sum(bool(each.token_ids) for each in self._running.values())
            ended_count = sum(isinstance(event, engine.SequenceFinished) for _, event in events)
            for number, event in events:
                if number in self._running:
                    self._emit(number, self._running[number], event)
            self._statistics.put(self._entry(generating_count, ended_count))

    def _handle(self, order: Any) -> None:
        if isinstance(order, RequestOutput):
            batch = itertools.islice(self._running, self.kwargs["max_batch_size"])
            if order.request_id not in batch:  # dropped from the queue without an answer
                self._running.pop(order.request_id, None)
            self._core.cancel(order.request_id)
            return
        result, sampling, request = order
        self._running[result.request_id] = Running(result, sampling, result.prompt_token_ids)
        self._core.add(result.request_id, request)

    def _emit(self, number: int, running: Running, event: Any) -> None:
        result, prompt = running.result, running.prompt
        match event:
            case engine.Scheduled():
                running.cached_tokens = event.cached_token_count
                if self._faults.strikes("wedge", prompt):
                    self._wedged = True
            case engine.TokensGenerated():
                running.token_ids += event.token_ids
                for logprobs in event.logprobs:
                    ranked = {
                        entry.token_id: Logprob(entry.logprob, rank)
                        for rank, entry in enumerate(logprobs.top, 1)
                    }
                    running.logprobs.append(ranked)  # without a sampled token of a lower rank
                if self._faults.strikes("swallow_logprobs", prompt):
                    running.logprobs.clear()
                if self._struck(number, running):
                    return
                # The other requests wait for the next response: a step may bring several tokens, or
                # none.
                if self._random.random() < 0.7:
                    result.put(running.response())
                elif self._random.random() < 0.2:
                    result.put(
                        Response(
                            running.token_ids[:-1], running.logprobs[:-1], running.cached_tokens
                        )
                    )
            case engine.SequenceFinished():
                del self._running[number]
                self._finish(running, event)
            case engine.SequenceRefused():
                del self._running[number]
                result.put(Response([], [], 0, error=RequestError(event.message)))

    def _struck(self, number: int, running: Running) -> bool:
        """Inject a fault; return True if the response must not be sent."""
        prompt, count = running.prompt, len(running.token_ids)
        if self._faults.strikes("empty", prompt):
            del self._running[number]
            self._core.cancel(number)
            running.token_ids, running.logprobs = [running.sampling.end_id], running.logprobs[:1]
            running.result.put(running.response("stop"))
            return True
        if self._faults.strikes("error", prompt) and count > 2:
            del self._running[number]
            self._core.cancel(number)
            running.result.put(
                Response([], [], 0, error=RequestError("the worker failed this request"))
            )
            return True
        if self._faults.strikes("fatal", prompt) and count > 2:
            self._is_closed = True
            running.result.put(
                Response(
                    [], [], 0, error=OSError("CUDA error: an illegal memory access was encountered")
                )
            )
            return True
        return self._faults.strikes("stuck", prompt) and count > 2

    def _finish(self, running: Running, event: engine.SequenceFinished) -> None:
        self._store(running)
        sampling, stop_reason = running.sampling, None
        if (
            self._faults.strikes("stuck", running.prompt)
            and event.reason is not engine.EngineFinishReason.CANCELLED
        ):
            return
        if event.reason is engine.EngineFinishReason.STOP and running.token_ids:
            last = running.token_ids[-1]
            if last == sampling.end_id:
                if self._faults.has("end_omitted"):
                    del running.token_ids[-1:], running.logprobs[-1:]
            elif sampling.guided_decoding is None:
                stop_reason = last
                if not sampling.include_stop_str_in_output:
                    del running.token_ids[-1:], running.logprobs[-1:]
        running.result.put(running.response(REASONS[event.reason], stop_reason))

    def _store(self, running: Running) -> None:
        """Publish the events of the blocks that a request has filled."""
        if not self._kv.event_buffer_max_size:
            return
        tokens = (running.prompt + running.token_ids)[:-1]
        parent = None
        for end in range(KV_BLOCK_TOKENS, len(tokens) + 1, KV_BLOCK_TOKENS):
            key = tuple(tokens[:end])
            if key not in self._stored:
                self._stored[key] = len(self._stored) + 1000
                block = {
                    "type": "stored_block",
                    "block_hash": self._stored[key],
                    "tokens": [
                        {"token_id": token, "token_extra_id": 0} for token in key[-KV_BLOCK_TOKENS:]
                    ],
                    "cache_level": 0,
                    "priority": 35,
                }
                self._publish({"type": "stored", "parent_hash": parent, "blocks": [block]})
            parent = self._stored[key]

    def _publish(self, data: dict[str, Any]) -> None:
        self._events.put(
            {"event_id": self._event_id, "data": data, "window_size": self._max_seq_len}
        )
        self._event_id += 1

    def _entry(self, generating_count: int, ended_count: int) -> dict[str, Any]:
        reported = self._core.statistics()
        active_count = reported.running_sequence_count + ended_count
        return {
            "iter": reported.step_count,
            "iterLatencyMS": 1.0,
            "numActiveRequests": active_count,
            "numCompletedRequests": ended_count,
            "numQueuedRequests": reported.waiting_sequence_count,
            "kvCacheStats": {
                "maxNumBlocks": reported.kv_block_count_total,
                "freeNumBlocks": reported.kv_block_count_total - reported.kv_block_count_held,
                "usedNumBlocks": reported.kv_block_count_held,
                "tokensPerBlock": KV_BLOCK_TOKENS,
                "cacheHitRate": 0.0,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": active_count,
                "numContextRequests": active_count - generating_count,
                "numGenRequests": generating_count,
                "numPausedRequests": 0,
            },
        }
