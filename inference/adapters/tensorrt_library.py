"""The only module that imports TensorRT-LLM: builds its engine and parameters, and submits to it.

All uses of the library are here, so that the requirements of release 1.2.1 are in one place. It is
imported only when an engine is built: the import takes seconds, loads compiled code, and needs a
GPU.

`EngineWatch` detects a dead or stuck engine, since the library's health check stays green. Twice a
second it checks the silence of each sequence, the engine's own state and the processes it started;
an idle engine generates a test token from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common.processes import alive, command_line, descendants
from inference.adapters.external_faults import StallWatch
from inference.adapters.external_queue import ExternalQueue
from inference.adapters.tensorrt_adapters import Adapter
from inference.adapters.tensorrt_settings import (
    KV_EVENT_COUNT_MAX,
    SPARE_ROW_COUNT,
    VERSION,
    TensorRtOptions,
)
from inference.engine import GenerationRequest, GrammarKind, SamplingParams, StopCriteria
from inference.errors import EngineStartFailed
from inference.limits import EngineLimits

# not a token id: keeps the engine from asking a tokenizer for the end token that a checkpoint lacks
NO_END_TOKEN = -1
GPU_ADAPTER_COUNT_MAX = 8  # the library moves others to the GPU as requests name them
_GUIDES = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}
EFFECT_PROMPT_TOKENS, EFFECT_TOKENS = 32, 4  # of outputs that show whether adapters have an effect

POLL_EVERY_S = 0.5
# Programs that the engine needs while it runs. Others below it end by themselves: compilers,
# resource trackers.
RANKS = ("mpi4py.futures.server", "orted", "prted")


class TensorRtLibrary:
    """The TensorRT-LLM package, imported and checked for the supported release."""

    def __init__(self) -> None:
        """Import the library. Raises EngineStartFailed, with instructions, if it cannot be used."""
        try:
            import tensorrt_llm
            from tensorrt_llm import llmapi
        except ImportError as error:
            raise EngineStartFailed(
                f"TensorRT-LLM cannot be imported by {sys.executable} ({error}): build"
                " infra/images/tensorrt.Dockerfile, or name an interpreter that has the library in"
                " WEIR_TENSORRT_PYTHON"
            ) from error
        if tensorrt_llm.__version__ != VERSION:
            raise EngineStartFailed(
                f"TensorRT-LLM {tensorrt_llm.__version__} is installed: Weir needs {VERSION}"
            )
        self._sampling_type: Any = tensorrt_llm.SamplingParams
        self._llm_type: Any = tensorrt_llm.LLM
        self._api: Any = llmapi
        self.RequestError: type[Exception] = llmapi.RequestError
        self._adapters: dict[str, Any] = {}

    def build(
        self,
        directory: str,
        limits: EngineLimits,
        options: TensorRtOptions,
        adapters: Sequence[Adapter] = (),
    ) -> Any:
        """Load a checkpoint with every limit set, and block until the engine accepts requests.

        Requests may name any of `adapters`. Raises: EngineStartFailed.
        """
        api, config = self._api, dict(options.config)
        kv_cache: dict[str, Any] = {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": options.kv_cache_memory_fraction,
            "tokens_per_block": options.block_tokens,
            "event_buffer_max_size": KV_EVENT_COUNT_MAX,
            "dtype": options.kv_cache_dtype,
        }
        kv_cache |= config.pop("kv_cache_config", {})
        scheduler = dict(config.pop("scheduler_config", {}))
        policy = scheduler.pop("capacity_scheduler_policy", "GUARANTEED_NO_EVICT")
        arguments: dict[str, Any] = {
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "max_batch_size": limits.running_sequence_count_max + SPARE_ROW_COUNT,
            "max_num_tokens": limits.step_token_count_max,
            "max_seq_len": limits.context_window_tokens,
            "enable_chunked_prefill": True,  # otherwise a prompt longer than a step is refused
            "guided_decoding_backend": "llguidance",  # xgrammar does not support Lark
            "enable_iter_perf_stats": True,
            "stream_interval": 1,
            "num_postprocess_workers": 0,  # with any workers, the count of cached tokens is missing
        }
        if options.expert_parallel_size is not None:
            arguments["moe_expert_parallel_size"] = options.expert_parallel_size
        try:
            if adapters:
                # The flag `enable_lora` has no effect on this backend, and CUDA graphs leave the
                # adapter out.
                arguments["lora_config"] = _lora_config(adapters)
                arguments["cuda_graph_config"] = None
                # The same ids in every worker with these adapters; 0 is the base model's.
                self._adapters = {
                    each.name: api.LoRARequest(each.name, number, each.directory)
                    for number, each in enumerate(sorted(adapters, key=lambda one: one.name), 1)
                }
            arguments["kv_cache_config"] = api.KvCacheConfig(**kv_cache)
            arguments["scheduler_config"] = api.SchedulerConfig(
                capacity_scheduler_policy=api.CapacitySchedulerPolicy(policy), **scheduler
            )
            if config:  # as `trtllm-serve` does: converts objects such as `speculative_config`
                arguments = api.llm_args.update_llm_args_with_extra_dict(arguments, config)
            return self._llm_type(directory, **arguments)
        except Exception as error:
            # a bad checkpoint, too few GPUs or too little memory, for an operator to fix
            raise EngineStartFailed(f"TensorRT-LLM cannot load {directory}: {error}") from error

    def sampling(
        self, request: GenerationRequest, end_token_ids: frozenset[int], vocabulary_size: int
    ) -> Any:
        """Build the parameters of one sequence. The engine modifies them, so each is used once.

        `end_token_ids` are all tokens that end the sequence. Stop sequences are not sent: the
        engine would continue after a match.
        """
        sampling, stop, before = request.sampling, request.stop, len(request.output_token_ids)
        first_end, *more_ends = sorted(end_token_ids) or [NO_END_TOKEN]
        values: dict[str, Any] = {
            "max_tokens": stop.max_output_tokens - before,
            "n": 1,
            "end_id": first_end,
            "pad_id": max(first_end, 0),
            "stop_token_ids": more_ends or None,
            # otherwise the stop token that was streamed is removed again
            "include_stop_str_in_output": True,
            "ignore_eos": not end_token_ids,
            "detokenize": False,
            "add_special_tokens": False,
        }
        if sampling.temperature > 0:
            # Without any of these the engine samples greedily.
            values |= {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        if sampling.top_logprobs is not None:
            values["logprobs"] = max(sampling.top_logprobs, 1)
        if sampling.logit_bias:
            import torch

            values["embedding_bias"] = bias = torch.zeros(vocabulary_size)
            for token_id, addend in sampling.logit_bias:
                bias[token_id] = addend
        if request.response_format is not None:
            guide = {_GUIDES[request.response_format.kind]: request.response_format.source}
            values["guided_decoding"] = self._api.GuidedDecodingParams(**guide)
        return self._sampling_type(**values)

    def submit(self, llm: Any, request: GenerationRequest, sampling: Any) -> Any:
        """Submit a sequence; return its result iterator. All calls must use the same event loop."""
        return llm.generate_async(
            [*request.prompt_token_ids, *request.output_token_ids],
            sampling,
            lora_request=self._adapters[request.adapter] if request.adapter else None,
            streaming=True,
            # Requests without a salt share one cache group.
            cache_salt=request.cache_salt or None,
        )

    async def adapted_outputs(
        self, llm: Any, vocabulary_size: int, names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Generate a greedy output with log-probabilities per adapter; the name "" means none."""
        low = vocabulary_size // 4  # special tokens are at the ends of a vocabulary
        found: dict[str, list[Any]] = {}
        for name in names:
            request = GenerationRequest(
                tuple(range(low, low + EFFECT_PROMPT_TOKENS)),
                SamplingParams(top_logprobs=1),
                StopCriteria(EFFECT_TOKENS, ignore_eos=True),
                cache_salt=f"weir-canary {name}",
                adapter=name,
            )
            sampling = self.sampling(request, frozenset(), vocabulary_size)
            async for response in self.submit(llm, request, sampling):
                [output] = response.outputs
            found[name] = [
                (token, round(each.logprob, 3))
                for known in output.logprobs
                for token, each in known.items()
            ] + list(output.token_ids)
        return found

    def canary(self, llm: Any) -> Any:
        """Submit a test sequence of one token, to see whether the engine responds."""
        sampling = self._sampling_type(
            max_tokens=1, end_id=NO_END_TOKEN, pad_id=0, ignore_eos=True, detokenize=False
        )
        return llm.generate_async([0], sampling, streaming=True, cache_salt="weir-canary")


def _lora_config(adapters: Sequence[Adapter]) -> Any:
    """Build the library's configuration of adapters."""
    try:
        from tensorrt_llm.lora_helper import LoraConfig
    except ImportError:  # its place in the documentation of 1.2
        from tensorrt_llm.lora_manager import LoraConfig
    return LoraConfig(
        # not `lora_dir`, from which it reads the modules of a single adapter
        lora_target_modules=sorted(frozenset().union(*(each.modules for each in adapters))),
        max_lora_rank=max(each.rank for each in adapters),
        max_loras=min(len(adapters), GPU_ADAPTER_COUNT_MAX),
        max_cpu_loras=len(adapters),
    )


_log = logging.getLogger("weir.inference.adapters")


def ranks() -> list[int]:
    """Find the processes below this one that the engine needs; log all that are below it."""
    below = {pid: command_line(pid) for pid in descendants(os.getpid())}
    found = [pid for pid, line in below.items() if any(rank in line for rank in RANKS)]
    _log.info("processes below the engine: %s; needed: %s", below, found)
    return found


class EngineWatch:
    """Monitor of one engine. It calls `broken` once, with the reason, if the engine fails."""

    def __init__(
        self,
        library: TensorRtLibrary,
        llm: Any,
        queue: ExternalQueue,
        options: TensorRtOptions,
        broken: Callable[[str], None],
    ) -> None:
        self._library = library
        self._llm = llm
        self._queue = queue
        self._options = options
        self._broken = broken
        self._workers = ranks()
        self._stalls = StallWatch(
            queue, options.first_token_timeout_s, options.inter_token_timeout_s
        )
        self._busy_at_s = time.monotonic()

    async def run(self) -> None:
        """Check the engine at intervals until cancelled."""
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            reason = self._dead() or self._stalls.poll()
            if reason is not None:
                self._broken(reason)
                return
            now_s = time.monotonic()
            if not self._queue.idle:
                self._busy_at_s = now_s
            elif now_s - self._busy_at_s > self._options.canary_interval_s:
                if (reason := await self.canary_fault()) is not None:
                    self._broken(reason)
                    return
                self._busy_at_s = time.monotonic()

    async def canary_fault(self) -> str | None:
        """Generate one token as a test; return the fault, or None if it succeeded."""
        try:
            async with asyncio.timeout(self._options.canary_timeout_s):
                token_count = 0
                async for response in self._library.canary(self._llm):
                    token_count = len(response.outputs[0].token_ids)
        except TimeoutError:
            return f"no token within {self._options.canary_timeout_s:g} s from an idle engine"
        except Exception as error:  # any failure means that the engine cannot generate
            return f"a test token could not be generated: {error!r}"
        return None if token_count == 1 else f"a test for one token gave {token_count}"

    def _dead(self) -> str | None:
        try:
            healthy = self._llm._check_health()
        except Exception as error:  # the executor may be gone
            return f"the engine's health check failed: {error!r}"
        if not healthy:
            return "the engine reports that it is shutting down"
        gone = [pid for pid in self._workers if not alive(pid)]
        return f"the engine's process {gone[0]} is gone" if gone else None
