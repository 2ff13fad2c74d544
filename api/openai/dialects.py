"""Request fields of other servers and providers: their effects, neutral values and remedies.

The table comes from the published protocols of vLLM, SGLang, LMDeploy, Aphrodite, llama.cpp, TGI,
TEI, Ollama, Cohere, Jina, Voyage, Mistral, Together, Fireworks, Groq, Cerebras, OpenRouter,
DeepInfra and DashScope. `tolerance.py` applies it, and `tests/api/dialect_fields.txt` lists the
fields of each protocol.
"""

from __future__ import annotations

from collections.abc import Mapping

from api.openai.effects import Effect, Field, Values, acting, alias, hints, refused

LIMIT = ("max_tokens", "max_output_tokens")
STOP = ("stop", "stop_sequences")
SAMPLER = "the engines do not have this sampler"
NO_TOOLS = "no tool runs on the server"
NO_LORA = "name the adapter as model"
NO_IDS = "use return_token_ids of /v1/chat/completions"
NO_IMAGES = "send text"
NOT_RETURNED = "not served; leave it out"
TEXT_FORMAT: Values = ({"type": "text"},)
# Values of our parameters in the form of another API, where they change nothing
OTHER_FORMS: Mapping[str, Mapping[str, Values]] = {
    "chat": {"prompt_logprobs": (False,)},
    "completions": {"logprobs": (False,), "prompt_logprobs": (False,)},
    "embeddings": {"truncate": (False, "NONE")},
    "messages": {"tool_choice": ("auto", "none"), "service_tier": ("default",)},
}
# Parameters of ours that another API does not have: values that change nothing there
NEUTRAL: Mapping[str, Values] = {
    "background": (False,),
    "best_of": (1,),
    "encoding_format": ("float",),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "ignore_eos": (False,),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "normalize": (True,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": TEXT_FORMAT,
    "seed": (-1,),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "stream": (False,),
    "stream_options": ({"include_usage": False}, {"include_usage": True}),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("none", "auto"),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1,),
    "verbosity": ("medium",),
    "inference_geo": ("global",),
}


FIELDS: Mapping[str, Field] = dict(
    (
        # Other names of parameters of this API
        *alias(LIMIT, ("max_completion_tokens", "max_new_tokens", "n_predict", "num_predict")),
        *alias("min_tokens", ("min_new_tokens", "min_completion_tokens")),
        *alias("n", ("n_cmpl", "num_return_sequences")),
        *alias("seed", ("random_seed", "sampling_seed", "sampler_seed")),
        *alias(STOP, ("stop_sequences", "stop_sequence", "stop")),
        *alias("top_k", ("k",)),
        *alias("top_p", ("p",)),
        *alias(
            "thinking_token_budget",
            {
                "thinking_budget": (),
                "thinking_budget_tokens": (-1,),
                "reasoning_budget_tokens": (-1,),
            },
        ),
        *alias("input", ("inputs", "texts", "content")),
        *alias("dimensions", ("output_dimension",)),
        *alias("encoding_format", ("embedding_type",)),
        *alias("normalize", {"normalized": (), "use_activation": ()}),
        # Formats of the answer
        *acting(
            Effect.FORMAT,
            {
                "structured_outputs": ("json, regex, choice, grammar or json_object", ()),
                "guided_json": ("a JSON schema", ()),
                "guided_regex": ("a regular expression", ()),
                "guided_choice": ("a list of texts", ()),
                "guided_grammar": ("a grammar in GBNF or Lark", ()),
                "json_schema": ("a JSON schema", ()),
                "regex": ("a regular expression", ()),
                "ebnf": ("a grammar in GBNF or Lark", ()),
                "grammar": ("a grammar in GBNF or Lark, or an object as in TGI", ()),
                "format": ("json, or a JSON schema", ()),
            },
        ),
        # Thinking
        *acting(
            Effect.THINKING,
            {
                "enable_thinking": ("switches the thinking on or off", ()),
                "think": ("a switch, or an effort", ()),
                "disable_reasoning": ("true switches the thinking off", (False,)),
                "thinking": ("type enabled or disabled, and budget_tokens", ()),
                "reasoning": ("effort, enabled and max_tokens", ()),
                "chat_template_kwargs": ("enable_thinking or thinking", ()),
            },
        ),
        *acting(Effect.GREEDY, {"do_sample": ("false: temperature 0", ())}),
        *acting(
            Effect.KEPT,
            {"context_management": ("no edits, or clear_thinking_20251015 with keep: all", ())},
        ),
        *refused("thinking is always apart from the text", {"separate_reasoning": (True,)}),
        *refused("thinking is always sent as it comes", {"stream_reasoning": (True,)}),
        *refused("thinking is always part of the answer", {"include_reasoning": (True,)}),
        *refused(
            "thinking is always apart from the text",
            {"reasoning_format": ("auto", "deepseek", "parsed", "text_parsed")},
        ),
        *refused(
            "the template decides which thinking the model sees",
            {"clear_thinking": (), "preserve_thinking": (), "reasoning_history": ()},
        ),
        *refused(
            "the model's own marks close the thinking",
            (
                "reasoning_budget_end_tag",
                "reasoning_budget_end_tags",
                "reasoning_budget_message",
                "reasoning_budget_start_tag",
            ),
        ),
        *refused("use thinking_token_budget", {"reasoning_control": (False,)}),
        *refused("use reasoning_effort", {"require_reasoning": (False,), "prompt_mode": ()}),
        # Samplers
        *refused(
            SAMPLER,
            {
                "adaptive_target": (-1,),
                "dry_multiplier": (0,),
                "dynatemp_max": (0,),
                "dynatemp_min": (0,),
                "dynatemp_range": (0,),
                "eps_cutoff": (0,),
                "epsilon_cutoff": (0,),
                "eta_cutoff": (0,),
                "min_keep": (0,),
                "mirostat": (0,),
                "mirostat_mode": (0,),
                "mirostat_lr": (),
                "mirostat_target": (),
                "no_repeat_ngram_size": (0,),
                "nsigma": (0,),
                "penalty_alpha": (0,),
                "repetition_detection": (),
                "repetition_ngram_size": (0,),
                "samplers": (),
                "skew": (0,),
                "smoothing_factor": (0,),
                "temperature_last": (False,),
                "tfs": (1,),
                "tfs_z": (1,),
                "top_a": (0,),
                "top_n_sigma": (-1, 0),
                "typical": (1,),
                "typical_p": (1,),
                "watermark": (False,),
                "watermarking": (False,),
                "xtc_probability": (0,),
            },
        ),
        # They set something that is off, since what would use them is refused: a sampler of the
        # list above, beam search, special tokens in the text, a cut prompt, log-probabilities
        *hints(
            "early_stopping",
            "length_penalty",
            "logprob_start_len",
            "n_discard",
            "n_keep",
            "num_keep",
            "spaces_between_special_tokens",
            "truncation_direction",
            "truncation_side",
            "adaptive_decay",
            "dry_allowed_length",
            "dry_base",
            "dry_early_exit_match_len",
            "dry_max_ngram",
            "dry_max_occurrences",
            "dry_penalty_last_n",
            "dry_range",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "mirostat_eta",
            "mirostat_tau",
            "repetition_ngram_threshold",
            "smoothing_curve",
            "xtc_threshold",
        ),
        *refused(
            "use repetition_penalty, which covers the prompt and the whole output",
            {"repeat_penalty": (1,), "rep_pen": (1,), "repeat_last_n": (64, -1)},
        ),
        *refused(
            "beam search is served over gRPC",
            {"use_beam_search": (False,)},
        ),
        *refused(
            "use logit_bias",
            (
                "bad_words",
                "bad_words_ids",
                "banned_strings",
                "banned_tokens",
                "custom_token_bans",
                "force_words",
                "force_words_ids",
                "suppress_tokens",
                "use_default_badwordsids",
            ),
        ),
        *refused(
            "use logit_bias",
            ("custom_logit_processor", "custom_params", "logits_processors", "aphrodite_xargs"),
        ),
        *refused("name parameters of this API instead", ("vllm_xargs", "model_parameters")),
        *refused("use logit_bias or response_format", ("allowed_token_ids",)),
        # Ends
        *refused("use max_tokens", {"max_length": (), "t_max_predict_ms": (-1,)}),
        *refused("use min_tokens", {"min_length": (0,), "n_indent": (0,)}),
        *refused("use stop", ("stop_token", "stop_regex")),
        *refused(
            "the output ends before a stop sequence",
            {"include_stop_str_in_output": (False,), "no_stop_trim": (False,)},
        ),
        # Text
        *refused(
            "special tokens are never part of the text",
            {"skip_special_tokens": (True,)},
        ),
        *refused("the text is sent as it is", {"clean_up_tokenization_spaces": (False,)}),
        *refused("use echo of /v1/completions", {"echo": (False,), "return_full_text": (False,)}),
        *refused("not served; leave it out", {"echo_last": (0,), "raw_output": (False,)}),
        *refused("an answer is a message", {"result_format": ("message",)}),
        *refused("a stream sends increments", {"incremental_output": (True,)}),
        *refused("send a plain prompt to /v1/completions", {"do_preprocess": (True,)}),
        *refused("send a plain prompt to /v1/completions", {"raw": (False,)}),
        # Prompt
        *refused("the answer always follows the conversation", {"add_generation_prompt": (True,)}),
        *refused("the template adds them", {"add_special_tokens": (False,)}),
        *refused("end with a message of the assistant", {"continue_final_message": (False,)}),
        *refused(
            "end with a message of the assistant, and continue_final_message",
            ("prefill", "generation_prompt"),
        ),
        *refused("the model's own template is used", ("chat_template", "template", "tool_prompt")),
        *refused("put them into a message", ("documents",)),
        *refused("send token ids as prompt of /v1/completions", ("input_ids", "text_ids")),
        *refused("send text", ("prompt_embeds", "input_embeds")),
        *refused("send a message with the role system", ("system", "system_prompt")),
        *refused("put it into instructions", ("personality",)),
        *refused("send the whole conversation", ("context", "session_params", "conversation_id")),
        *refused("send the whole conversation", ("previous_input_messages",)),
        *refused(
            "send the whole conversation, since nothing is stored",
            ("conversation", "previous_response_id"),
        ),
        *refused("put it into the prompt, with the model's marks of a gap", ("suffix",)),
        *refused(
            "shorten the prompt: it is never cut",
            {
                "context_length_exceeded_behavior": ("error",),
                "max_context_length": (),
                "num_ctx": (),
                "prompt_truncate_len": (),
                "shift": (False,),
                "transforms": (),
                "truncate": (False, "NONE"),
                "truncate_prompt_tokens": (),
                "truncation": (False, "disabled"),
            },
        ),
        *refused("the prefix cache is always used", {"cache_prompt": (True,)}),
        *refused(
            NO_IMAGES,
            (
                "audio_data",
                "data",
                "image_config",
                "image_data",
                "images",
                "media_io_kwargs",
                "mm_processor_kwargs",
                "video_data",
            ),
        ),
        *refused(NO_IMAGES, {"vl_high_resolution_images": (False,)}),
        *hints(
            "image_max_dynamic_patch",
            "max_dynamic_patch",
            "min_dynamic_patch",
            "video_max_dynamic_patch",
        ),
        *refused("send its members as parameters", ("extra_body", "options", "parameters")),
        *refused("send its members as parameters", ("generation_config", "sampling_params")),
        # Models
        *refused(
            NO_LORA,
            ("adapter_id", "lora", "lora_id", "lora_name", "lora_path", "lora_request"),
        ),
        *refused("name one model", ("fallbacks", "models", "route")),
        *refused(
            "the operator configures the safety checks",
            {
                "guardrails": (),
                "moderation": (),
                "safe_prompt": (False,),
                "safeguards": (),
                "safety_mode": ("OFF", "NONE"),
                "safety_model": (),
            },
        ),
        *refused("an operator's contract decides", ("compliance",)),
        *refused("read the answer from the connection of its request", ("background",)),
        *refused("the operator decides where a model runs", ("inference_geo",)),
        # Tools and search
        *refused(
            NO_TOOLS,
            {
                "citation_options": (),
                "compound_custom": (),
                "container": (),
                "deferred_tools": (),
                "enable_code_interpreter": (False,),
                "enable_search": (False,),
                "exclude_domains": (),
                "include_domains": (),
                "mcp_servers": (),
                "plugins": (),
                "search_options": (),
                "search_settings": (),
                "stop_server_tools_when": (),
                "translation_options": (),
            },
        ),
        *refused("use tools", ("functions",)),
        *refused("use tool_choice", ("function_call",)),
        *refused("search yourself, and put what you find into a message", ("web_search_options",)),
        *refused("use strict of a tool", {"strict_tools": (False,)}),
        *refused("arguments that do not match are shown", {"disable_tool_validation": (False,)}),
        *refused("calls are always apart from the text", {"parse_tool_calls": (True,)}),
        *refused("the server finds the calls by the model", ("chat_format", "chat_parser")),
        *refused(
            "the grammar applies from the first token of the answer",
            {"grammar_lazy": (False,), "grammar_triggers": (), "preserved_tokens": ()},
        ),
        *refused("the rule root begins the answer", {"grammar_root": ("root",)}),
        *refused(
            "use response_format with a json_schema",
            ("structural_tag", "output_config"),
        ),
        *refused("JSON has at most one space between tokens", ("guided_whitespace_pattern",)),
        *refused("JSON has at most one space between tokens", ("whitespace_pattern",)),
        *hints("guided_decoding_backend"),
        # Facts beside the answer
        *refused(NO_IDS, {"return_token_ids": (False,), "return_tokens": (False,)}),
        *refused(NO_IDS, {"return_raw_tokens": (False,), "return_token_offsets": (False,)}),
        *refused(NO_IDS, {"return_tokens_as_token_ids": (False,)}),
        *refused(
            "use logprobs",
            {
                "logprob_token_ids": (),
                "n_probs": (0,),
                "post_sampling_probs": (False,),
                "return_logprob": (False,),
                "return_text_in_logprobs": (False,),
                "token_ids_logprob": (),
                "top_logprobs_num": (0,),
                "top_n_tokens": (0,),
            },
        ),
        *refused(
            "use prompt_logprobs of /v1/chat/completions or /v1/completions",
            {
                "decoder_input_details": (False,),
                "prompt_logprobs": (False,),
                "top_prompt_logprobs": (0,),
            },
        ),
        *refused(
            NOT_RETURNED,
            {
                "_debug_render_only": (False,),
                "details": (False,),
                "enable_response_messages": (False,),
                "response_fields": (),
                "return_bytes": (False,),
                "return_entropy": (False,),
                "return_hidden_states": (False,),
                "return_mm_kwargs": (False,),
                "return_multivector": (False,),
                "return_prompt_text": (False,),
                "return_routed_experts": (False,),
                "return_weight_versions": (False,),
            },
        ),
        *refused("usage has the number", {"return_cached_tokens_details": (False,)}),
        *refused("the output is not predicted", ("speculation",)),
        # Embeddings
        *refused(
            "vectors are of the text as it is sent: put the instruction into the text",
            {
                "input_type": (),
                "instruct": (),
                "instruction": (),
                "late_chunking": (False,),
                "prompt_name": (),
                "task": (),
                "text_type": (),
            },
        ),
        *refused("vectors have 32-bit floats", {"embed_dtype": ("float32",)}),
        *refused("vectors have 32-bit floats", {"output_dtype": ("float", "float32")}),
        *refused("vectors have 32-bit floats", {"embedding_types": (["float"],)}),
        *refused("vectors are dense", {"output_type": ("dense",)}),
        *refused("base64 has little-endian floats", {"endianness": ("native", "little")}),
        *refused("use normalize", {"embd_normalize": (2,)}),
        *refused("an input is not padded", {"padding": (False,)}),
        # Labels, caches, scheduling, telemetry and places: they do not change the answer
        *hints(
            "diagnostics",
            "max_tool_calls",
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
            "user_profile_id",
            "workspace_id",
            "backend_sampling",
            "betas",
            "bootstrap_host",
            "bootstrap_pair_key",
            "bootstrap_port",
            "bootstrap_room",
            "cache_control",
            "cache_salt",
            "custom_labels",
            "data_parallel_rank",
            "debug",
            "decode_tp_size",
            "disagg_prefill_dp_rank",
            "draft_num_predict",
            "ec_transfer_params",
            "external_trace_header",
            "extra_headers",
            "extra_key",
            "extra_query",
            "genkey",
            "http_worker_ipc",
            "keep_alive",
            "kv_transfer_params",
            "log_metrics",
            "main_gpu",
            "mm_payload",
            "n_cache_reuse",
            "no_logs",
            "num_batch",
            "num_gpu",
            "num_thread",
            "perf_metrics_in_response",
            "priority",
            "prompt_cache_isolation_key",
            "provider",
            "quiet",
            "request_id",
            "return_progress",
            "rid",
            "routed_dp_rank",
            "routed_experts_prompt_start",
            "routed_experts_start_len",
            "routing_key",
            "safe_tokenization",
            "session_id",
            "speed",
            "sse_ping_interval",
            "stream_interval",
            "t_max_prompt_ms",
            "timings_per_token",
            "tool_stream",
            "trace",
            "use_mmap",
            "verbose",
        ),
    )
)

# Where a field means something else in one API
FIELDS_BY_API: Mapping[str, Mapping[str, Field]] = {
    "completions": dict(
        (
            *refused("the model's tokenizer decides", {"add_special_tokens": (True,)}),
            *refused("a prompt is continued as it is", {"disable_reasoning": (False,)}),
            *refused(
                "a prompt is continued as it is",
                ("chat_template_kwargs", "enable_thinking", "reasoning", "think", "thinking"),
            ),
            *alias("prompt", ("inputs", "text")),
        )
    ),
    "responses": dict(
        (
            *refused("send the text itself as input and instructions", ("prompt",)),
            *refused("use text.format", {"response_format": TEXT_FORMAT}),
            *refused("use instructions", ("system",)),
        )
    ),
    "messages": dict(
        (
            *refused("use output_config.format", {"response_format": TEXT_FORMAT}),
            # Of the beta in which Anthropic introduced formats
            *acting(Effect.FORMAT, {"output_format": ("as output_config.format", ())}),
            *refused("use thinking", ("reasoning",)),
            *refused("use tool_choice.disable_parallel_tool_use", {"parallel_tool_calls": (True,)}),
        )
    ),
    "embeddings": dict(
        (
            *refused("the model's tokenizer decides", {"add_special_tokens": (True,)}),
            *refused("an input is not a conversation", {"add_generation_prompt": (False,)}),
            *refused(
                "an input is not answered",
                {
                    "enable_thinking": (False,),
                    "think": (False,),
                    "thinking": ({"type": "disabled"},),
                },
            ),
            *alias("truncate", {"truncation": (False,)}),
            *refused("a text is cut at its end", {"truncation_side": ("right",)}),
            *refused("use truncate_prompt_tokens", {"max_tokens": (-1,)}),
            *refused("vectors are not sampled", {"do_sample": (False, True)}),
        )
    ),
}

# Which of the APIs can do it
ABLE: Mapping[Effect, frozenset[str]] = {
    Effect.FORMAT: frozenset({"chat", "completions", "responses", "messages"}),
    Effect.THINKING: frozenset({"chat", "responses", "messages"}),
    Effect.GREEDY: frozenset({"chat", "completions", "responses", "messages"}),
}


def field_of(name: str, api: str) -> Field | None:
    """Look up a field in the table of one API. Returns None if it is not listed."""
    return FIELDS_BY_API.get(api, {}).get(name) or FIELDS.get(name)


def is_neutral(value: object, neutral: Values) -> bool:
    """Return whether a value is one of those that change nothing. `true` does not equal 1."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )
