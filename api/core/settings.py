"""Settings of an api process, read from the environment once.

Every limit that protects the service is defined here with its reason. Invalid values are rejected
at start, by name.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

from inference.text.tools import MODEL_CALL_FORMATS, CallFormat
from metering.invoicing.invoice_document import Issuer, shown_by_helvetica
from metering.store.db import DatabaseUrlInvalid, sqlalchemy_url
from metering.tenants.networks import Network, networks_of, parse_network

Value = TypeVar("Value")

OPENAI_PORT_DISTANCE = 1000  # so that servers on neighbouring ports do not collide
METRICS_PORT_DISTANCE = 2000
METRICS_PORTS_TRIED = 64  # tried by processes that share a port, because this one cannot be shared
PORT_MAX = 65_535
DEMO_MODEL_NAME = "demo"
DEMO_ENCODER_NAME = "demo-embedding"
LETTERHEAD_LINES_MAX = 10  # of an address; more would not fit the invoice page
TEXT_CHARS_MAX = 1000  # of a letterhead; more would not fit the invoice page


class SettingInvalid(ValueError):
    """Invalid environment variable. The message names it and the values that are allowed."""


class Unshown(ValueError):
    """Invalid value that must not appear in messages, because it may contain a secret."""


def setting(variable: str, default: Any, parse: Callable[[str], Any]) -> Any:
    """Declare a field that `from_environment` parses from an environment variable.

    `default` is a value, or a function that returns it.
    """
    metadata = {"variable": variable, "parse": parse}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def whole(least: int, most: int) -> Callable[[str], int]:
    """Create a parser of integers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Create a parser of numbers from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}")
        return value

    return parse


def positive(most: float) -> Callable[[str], float]:
    """Create a parser of numbers above 0 and up to `most`."""

    def parse(text: str) -> float:
        try:
            return number(math.nextafter(0, 1), most)(text)
        except ValueError:
            raise ValueError(f"must be a number above 0 and at most {most:g}") from None

    return parse


def pairs(
    what: str, parse: Callable[[str], Value], parse_name: Callable[[str], object] = str
) -> Callable[[str], dict[str, Value]]:
    """Create a parser of comma-separated `name=value` pairs, each name once.

    `what` describes the pairs in error messages.
    """

    def parse_all(text: str) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            try:
                if not name or not value:
                    raise ValueError
                name, parsed = str(parse_name(name)), parse(value)
            except ValueError:
                raise ValueError(f"must be {what}, separated by commas") from None
            if name in found:
                raise ValueError(
                    f"names {name} twice; a file named by WEIR_FLEET gives a model several engines"
                )
            found[name] = parsed
        return found

    return parse_all


def one_of(*choices: str) -> Callable[[str], str]:
    """Create a parser that accepts only these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def address_or_off(text: str) -> str:
    """Validate `host:port` or `off`."""
    host, _, port = text.rpartition(":")
    if text != "off" and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, or off")
    return text


def networks(text: str) -> str:
    """Parse comma-separated IP networks and write them in canonical notation."""
    return ",".join(str(parse_network(each.strip())) for each in text.split(",") if each.strip())


def listen_address(text: str) -> str:
    """Validate a listening address of gRPC: `host:port`, `[IPv6]:port` or `unix:/path`."""
    host, _, port = text.rpartition(":")
    if not text.startswith(("unix:", "unix-abstract:")) and not (
        host and port.isdecimal() and int(port) < 65_536
    ):
        raise ValueError("must be host:port, such as 127.0.0.1:8443, or unix:/path")
    return text


def postgres_url(text: str) -> str:
    """Validate a database URL. Errors do not repeat the URL, since it may contain a password."""
    try:
        sqlalchemy_url(text)
    except DatabaseUrlInvalid as error:
        raise Unshown(str(error)) from None
    return text


def truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true")


# Weights outside this range would starve the tenant itself or all others.
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0


def printable(text: str) -> str:
    """Validate printable text. `|` separates its lines."""
    if not text.isprintable() or len(text) > TEXT_CHARS_MAX:
        raise ValueError(
            f"must be at most {TEXT_CHARS_MAX} printable characters, lines separated by |"
        )
    return text


def bundled_models() -> dict[str, Path]:
    """Return name and directory of the demo model that is bundled with Weir."""
    return {DEMO_MODEL_NAME: Path(str(files("inference") / "demo_model" / "weights"))}


def bundled_encoders() -> dict[str, Path]:
    """Return name and directory of the embedding model that is bundled with Weir."""
    return {DEMO_ENCODER_NAME: Path(str(files("inference") / "demo_model" / "encoder"))}


def default_home() -> Path:
    """Return `~/.weir`, the default directory for local state."""
    return Path.home() / ".weir"


def is_truetype(path: Path) -> bool:
    """Return whether a file starts like a TrueType font, the only format that invoices can use."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"\x00\x01\x00\x00", b"true")
    except OSError:
        return False


def lines_of(text: str) -> tuple[str, ...]:
    """Split a text at `|` into lines."""
    return tuple(filter(None, (line.strip() for line in text.split("|"))))


def model_call_format(text: str) -> CallFormat:
    return CallFormat(one_of(*MODEL_CALL_FORMATS)(text))


targets_by_name = pairs("name=value pairs", str)
paths_by_name = pairs("name=directory pairs", Path)
files_by_name = pairs("model=file pairs", Path)
call_formats = pairs(
    f"name=format pairs, each format one of {', '.join(MODEL_CALL_FORMATS)}", model_call_format
)
weights_by_id = pairs(
    f"organization-id=weight pairs, each weight from {WEIGHT_MIN} to {WEIGHT_MAX}",
    number(WEIGHT_MIN, WEIGHT_MAX),
    uuid.UUID,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an api process. Durations are in seconds, sizes in bytes."""

    # Address of the gRPC listener. Without TLS, only a loopback address or a Unix socket.
    listen_address: str = setting("WEIR_LISTEN", "127.0.0.1:8443", listen_address)
    # HTTP address of OpenAI's API and the console; `off` closes it. Unset: loopback, 1000 above the
    # port of WEIR_LISTEN.
    openai_listen: str = setting("WEIR_OPENAI_LISTEN", "", address_or_off)
    # Serve the web console and its JSON calls at /console of the HTTP port.
    console: bool = setting("WEIR_CONSOLE", True, truth)
    # Address of metrics and health checks, without TLS or key; `off` closes it. Unset: loopback,
    # 2000 above the port of WEIR_LISTEN. Processes that share a port take the first free one from
    # there on.
    metrics_listen: str = setting("WEIR_METRICS_LISTEN", "", address_or_off)
    # Let several processes of one machine listen on one port; the kernel distributes connections.
    # Off by default, since a second server on a port is usually a mistake.
    share_port: bool = setting("WEIR_SHARE_PORT", False, truth)
    # `host:port` of the peer port, where other api processes attach to requests over mutual TLS.
    # Unset: a free port on the host of WEIR_LISTEN. Set it where a firewall is between machines.
    peer_listen_address: str = setting("WEIR_PEER_LISTEN", "", str)
    # `host` or `host:port` at which other api processes reach the peer port. Unset: the address
    # that it listens on, or the host name if it listens on all addresses.
    advertise_address: str = setting("WEIR_ADVERTISE_ADDRESS", "", str)
    # PEM file with the server's certificate, followed by its intermediates. New connections use a
    # renewed file.
    tls_certificate: str = setting("WEIR_TLS_CERTIFICATE", "", str)
    # PEM file with the private key, unencrypted: a server cannot enter a passphrase.
    tls_key: str = setting("WEIR_TLS_KEY", "", str)
    # PEM file with the CAs of client certificates. Clients then need a certificate (mTLS) besides
    # an API key.
    tls_client_ca: str = setting("WEIR_TLS_CLIENT_CA", "", str)
    # Allow any listening address without TLS. API keys and prompts can then be read on the network:
    # use it only behind a TLS proxy.
    allow_plaintext: bool = setting("WEIR_ALLOW_PLAINTEXT", False, truth)

    # Failed authentications per address (IPv6: /64), at once and per minute; 0: no limit. Keeps a
    # flood of wrong keys from the database. Keys that were valid before are exempt. Use 0 behind a
    # proxy that hides addresses.
    auth_failures_per_minute: int = setting(
        "WEIR_AUTH_FAILURES_PER_MINUTE", 60, whole(0, 1_000_000)
    )

    # Networks of the proxies whose `X-Forwarded-For` is trusted, separated by commas. Unset: none.
    trusted_proxies: str = setting("WEIR_TRUSTED_PROXIES", "", networks)

    # Interval at which the key of an open stream is checked again. Changes are notified at once;
    # this is for a process that missed one.
    stream_key_check_s: float = setting("WEIR_STREAM_KEY_CHECK_S", 60.0, positive(86_400))

    # Interval between writes of the last uses of keys, in one statement for all keys.
    key_use_interval_s: float = setting("WEIR_KEY_USE_INTERVAL_S", 60.0, positive(3600))

    # Maximum size of one message or HTTP body: a prompt of some hundred thousand tokens. Parsing
    # more would delay other streams.
    message_bytes_max: int = setting("WEIR_MESSAGE_BYTES_MAX", 4 * 2**20, whole(1024, 2**30))
    # Frames per message. The default is two for each request of a stream. A message is handled in
    # slices, between those of other streams.
    frames_per_message_max: int = setting("WEIR_FRAMES_PER_MESSAGE_MAX", 2000, whole(1, 1_000_000))
    # Share of the event loop's time for frames and calls of one key; all keys of an organization
    # share twice that. Above it, their frames are read more slowly. A client that sends thousands
    # of frames per second needs a tenth of it.
    frames_share_max: float = setting("WEIR_FRAMES_SHARE_MAX", 0.25, positive(1))
    # Characters of prompts of one key that are rendered and tokenized at once: two of the largest
    # messages. Each message of a conversation counts 30 more. Tokenizing takes some 30 times the
    # size of a text.
    preparation_chars_per_key_max: int = setting(
        "WEIR_PREPARATION_CHARS_PER_KEY_MAX", 8 * 2**20, whole(1024, 2**40)
    )
    # Characters of prompts of all keys of a process. The keys of an organization take at most as
    # many as they leave free.
    preparation_chars_max: int = setting(
        "WEIR_PREPARATION_CHARS_MAX", 32 * 2**20, whole(1024, 2**40)
    )
    # Threads that render and tokenize. More threads than cores delay the event loop.
    preparation_thread_count: int = setting("WEIR_PREPARATION_THREADS", 2, whole(1, 64))
    # Maximum metadata of one call, as HPACK counts it. A key, a deadline and a trace context take a
    # tenth of the default.
    metadata_bytes_max: int = setting("WEIR_METADATA_BYTES_MAX", 16 * 2**10, whole(1024, 2**20))
    # Open streams per connection, about 40 kB each. A stream carries many requests, so clients need
    # few.
    streams_per_connection_max: int = setting(
        "WEIR_STREAMS_PER_CONNECTION_MAX", 1000, whole(1, 100_000)
    )
    # gRPC connections per process, about 20 kB each, 50 kB with TLS. Further ones are closed
    # unread. Limit connections per address in the firewall, which knows how many clients share one.
    connections_max: int = setting("WEIR_CONNECTIONS_MAX", 10_000, whole(1, 1_000_000))
    # Time after which a connection without calls is closed. Clients reconnect by themselves.
    connection_idle_max_s: float = setting("WEIR_CONNECTION_IDLE_MAX_S", 1800.0, positive(86_400))
    # Age at which a connection takes no new calls, so that clients find new servers and client
    # certificates are checked again. Running calls continue.
    connection_age_max_s: float = setting(
        "WEIR_CONNECTION_AGE_MAX_S", 86_400.0, positive(31_536_000)
    )
    # HTTP connections per process, about 20 kB each. Further ones are closed.
    http_connections_max: int = setting("WEIR_HTTP_CONNECTIONS_MAX", 4000, whole(1, 1_000_000))
    # Time after which an idle HTTP connection is closed, and in which a new one has to send a whole
    # head. Longer than the idle time of most load balancers, 60 s: a balancer that sends a request
    # while the server closes the connection answers 502.
    http_idle_max_s: float = setting("WEIR_HTTP_IDLE_MAX_S", 75.0, positive(3600))
    # Time after which an HTTP response that is not streamed begins with blanks, so that balancers
    # keep its connection. Its status is then 200: a later failure ends it without its last chunk.
    # 0: never; set the timeout of balancers above the longest answer instead.
    http_padding_after_s: float = setting("WEIR_HTTP_PADDING_AFTER_S", 30.0, number(0, 3600))
    # Time for the handshakes of TLS and HTTP/2, because a silent connection occupies a file
    # descriptor.
    handshake_max_s: float = setting("WEIR_HANDSHAKE_MAX_S", 10.0, positive(3600))

    # With WEIR_ENGINE=remote: `model=address` pairs, separated by commas. An address is
    # `trtllm://host:port`, `vllm://host:port`, `sglang://host:port` (all gRPC), or
    # `openai+http://host:port` (or `openai+https`), optionally with `/` and the name of a model.
    # WEIR_MODELS names the directories with config, tokenizer and chat template; those of other
    # models are fetched from the server, over gRPC only.
    remote_targets: Mapping[str, str] = setting("WEIR_REMOTE_TARGETS", dict, targets_by_name)
    # As WEIR_REMOTE_TARGETS, for embedding models. WEIR_ENCODERS names a directory where the server
    # does not provide the files.
    remote_encoders: Mapping[str, str] = setting("WEIR_REMOTE_ENCODERS", dict, targets_by_name)
    # `model=file` pairs: each file has the key of the model's server in WEIR_REMOTE_TARGETS or
    # WEIR_REMOTE_ENCODERS, in one line. Only its owner and group may have access. It is read again
    # when it changes.
    remote_key_files: Mapping[str, Path] = setting("WEIR_REMOTE_KEY_FILES", dict, files_by_name)
    # Header of the keys: `authorization` (sent as `Bearer KEY`, or with the scheme in the file), or
    # another one, such as `api-key`, which has the content of the file.
    remote_key_header: str = setting("WEIR_REMOTE_KEY_HEADER", "authorization", str)
    # Use servers that share cached prefixes between tenants. Otherwise vLLM over gRPC must run
    # without its prefix cache.
    remote_share_prefixes: bool = setting("WEIR_REMOTE_SHARE_PREFIXES", False, truth)
    # Sequences of one process in one remote server; further ones wait here, ordered by rank. A
    # server may allow fewer.
    remote_batch_max: int = setting("WEIR_REMOTE_BATCH_MAX", 256, whole(1, 65_536))
    # Context window that clients can use; 0: that of the checkpoint. A server with a smaller window
    # is not used.
    remote_context_tokens: int = setting("WEIR_REMOTE_CONTEXT_TOKENS", 0, whole(0, 100_000_000))
    # Time without a first token after which a remote sequence counts as stuck. Must cover a long
    # prompt that waits behind many others.
    remote_first_token_s: float = setting("WEIR_REMOTE_FIRST_TOKEN_S", 120.0, positive(3600))
    # Time between tokens after which a remote sequence counts as stuck. An answer that the server
    # sends whole has this time for each token that it may have, after that for the first one.
    remote_inter_token_s: float = setting("WEIR_REMOTE_INTER_TOKEN_S", 30.0, positive(3600))
    # Interval between checks whether a server shares prefixes between tenants; each computes two
    # prompts of 513 tokens.
    remote_probe_s: float = setting("WEIR_REMOTE_PROBE_S", 600.0, positive(86_400))
    # PEM file with the CAs of remote servers. Enables TLS for their gRPC connections. Without it,
    # `openai+https` uses the CAs of the system.
    remote_tls_ca: str = setting("WEIR_REMOTE_TLS_CA", "", str)
    # PEM file with the client certificate for remote servers (mTLS).
    remote_tls_certificate: str = setting("WEIR_REMOTE_TLS_CERTIFICATE", "", str)
    # PEM file with the private key of WEIR_REMOTE_TLS_CERTIFICATE.
    remote_tls_key: str = setting("WEIR_REMOTE_TLS_KEY", "", str)
    # Name in the remote servers' certificates, if it is not the target's host.
    remote_tls_name: str = setting("WEIR_REMOTE_TLS_NAME", "", str)

    # The PostgreSQL database that all processes share. With several hosts, separated by commas, the
    # first one that accepts writes is used, and after a failover the next.
    database_url: str = setting("WEIR_DATABASE_URL", "", postgres_url)
    # Local state of this machine: usage journal, receipt key, connection file, packed weights.
    home: Path = field(
        default_factory=default_home, metadata={"variable": "WEIR_HOME", "parse": Path}
    )
    # `name=directory` pairs of checkpoints in Hugging Face layout, one engine each.
    models: Mapping[str, Path] = setting("WEIR_MODELS", bundled_models, paths_by_name)
    # Formats in which models write tool calls, as `name=hermes`, `llama` or `mistral`. Unset: as
    # their templates show.
    tool_call_formats: Mapping[str, CallFormat] = setting(
        "WEIR_TOOL_CALL_FORMATS", dict, call_formats
    )
    # `name=directory` pairs of embedding models in the layout of sentence-transformers. Unset: the
    # bundled `demo-embedding` if all models are unset, loaded by its first request; else none.
    encoders: Mapping[str, Path] = setting("WEIR_ENCODERS", dict, paths_by_name)
    # Tokens per batch of an encoder. On a CPU, larger batches gain nothing and delay the next one;
    # a GPU can take many more.
    encoder_batch_tokens: int = setting("WEIR_ENCODER_BATCH_TOKENS", 1024, whole(1, 2**20))
    # File of rules for the safety checks. Unset: nothing is checked.
    safety_rules: str = setting("WEIR_SAFETY_RULES", "", str)
    # Private key that signs receipts. Unset: `receipt-key.pem` of WEIR_HOME if it exists; `off`:
    # receipts are chained but not signed.
    receipt_key_file: str = setting("WEIR_RECEIPT_KEY_FILE", "", str)
    # Backend of all models: torch on this machine, TensorRT-LLM on its GPUs, or remote servers.
    engine_backend: Literal["torch", "tensorrt", "remote"] = setting(
        "WEIR_ENGINE", "torch", one_of("torch", "tensorrt", "remote")
    )
    # Data type of weights. `auto` is bfloat16 for models on `cuda`, else float32. `int8`, not for
    # `cuda`, takes a quarter of the memory of float32, and its answers differ a little.
    engine_dtype: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "WEIR_ENGINE_DTYPE", "auto", one_of("auto", "float32", "bfloat16", "int8")
    )
    # Device of the torch backend. `simulated` computes nothing and takes the time of a GPU, for
    # load tests; every answer says so.
    engine_device: Literal["cpu", "cuda", "simulated"] = setting(
        "WEIR_ENGINE_DEVICE", "cpu", one_of("cpu", "cuda", "simulated")
    )
    # Time scale of simulated engines: 1 is the speed of the GPU, 0 takes no time.
    simulated_time_scale: float = setting("WEIR_SIMULATED_TIME_SCALE", 1.0, number(0, 1000))
    # Threads of an engine; 0: one per CPU that the process may use, by affinity and CPU quota.
    engine_thread_count: int = setting("WEIR_ENGINE_THREADS", 0, whole(0, 1024))
    # Tokens that an engine guesses from earlier text of a sequence and verifies in one step; 0:
    # none. The output does not change.
    engine_draft_token_count_max: int = setting("WEIR_ENGINE_DRAFT_TOKENS_MAX", 10, whole(0, 15))
    # KV cache of each engine; reserved at start, and used as needed. 0: 1 GiB on a CPU, and the
    # free memory of a GPU.
    kv_cache_bytes: int = setting("WEIR_KV_CACHE_BYTES", 0, whole(0, 2**44))

    # Engines of each model that are kept loaded. 0 starts the first one with a request.
    min_replicas: int = setting("WEIR_MIN_REPLICAS", 1, whole(0, 64))
    # Maximum number of engines per model. Another one starts when all have been full for some
    # seconds and memory is free.
    max_replicas: int = setting("WEIR_MAX_REPLICAS", 1, whole(1, 64))
    # Time without a request after which an engine beyond the minimum stops. 0: never.
    model_idle_timeout_s: float = setting("WEIR_MODEL_IDLE_TIMEOUT_S", 0.0, number(0, 86_400))
    # Keep packed weights of large models in WEIR_HOME: all workers of a model share one copy, and
    # start faster.
    packed_weights: Literal["on", "off"] = setting("WEIR_PACKED_WEIGHTS", "on", one_of("on", "off"))
    # Size of all packed weights. The least recently used are removed, except those of running
    # models.
    packed_weights_bytes: int = setting("WEIR_PACKED_WEIGHTS_BYTES", 64 << 30, whole(0, 2**50))
    # Engine workers that have imported torch and wait for a model, so that it starts faster. Some
    # 130 MB each.
    spare_workers: int = setting("WEIR_SPARE_WORKERS", 0, whole(0, 16))
    # Memory for all engines of a process; 0: no limit. An engine that does not fit waits until idle
    # ones are stopped.
    engine_memory_bytes: int = setting("WEIR_ENGINE_MEMORY_BYTES", 0, whole(0, 2**50))

    # TensorRT-LLM: interpreter of its worker, with the library and Weir; empty: the server's own.
    tensorrt_python: str = setting("WEIR_TENSORRT_PYTHON", "", str)
    # TensorRT-LLM: GPUs that share each matrix.
    tensorrt_tensor_parallel: int = setting("WEIR_TENSORRT_TENSOR_PARALLEL", 1, whole(1, 1024))
    # TensorRT-LLM: GPUs that share the layers.
    tensorrt_pipeline_parallel: int = setting("WEIR_TENSORRT_PIPELINE_PARALLEL", 1, whole(1, 1024))
    # TensorRT-LLM: GPUs that share the experts. 0: the engine decides.
    tensorrt_expert_parallel: int = setting("WEIR_TENSORRT_EXPERT_PARALLEL", 0, whole(0, 1024))
    # TensorRT-LLM: sequences that run at once.
    tensorrt_batch_max: int = setting("WEIR_TENSORRT_BATCH_MAX", 256, whole(1, 4096))
    # TensorRT-LLM: data type of the KV cache.
    tensorrt_kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "WEIR_TENSORRT_KV_CACHE_DTYPE", "auto", one_of("auto", "fp8")
    )
    # TensorRT-LLM: share of the memory left after the weights for the KV cache; the rest is for
    # activations.
    tensorrt_kv_cache_fraction: float = setting(
        "WEIR_TENSORRT_KV_CACHE_FRACTION", 0.9, number(0, 0.99)
    )
    # TensorRT-LLM: when to abort cancelled sequences. Aborts during prefill have hung engines:
    # `running` waits for the first token, `never` lets sequences finish.
    tensorrt_abort: Literal["running", "always", "never"] = setting(
        "WEIR_TENSORRT_ABORT", "running", one_of("running", "always", "never")
    )
    # TensorRT-LLM: LoRA adapters as `model:adapter=directory` pairs. `model:adapter` is a model for
    # clients, with its own prices.
    lora_adapters: Mapping[str, Path] = setting("WEIR_LORA_ADAPTERS", dict, paths_by_name)
    # TensorRT-LLM: report of `weir doctor tensorrt --lora DIR --json` that adapters take effect,
    # without which none is served.
    lora_report: str = setting("WEIR_LORA_REPORT", "", str)
    # Fleet file of models, replicas, aliases and regions, instead of WEIR_MODELS
    # (`docs/reference/fleet.md`).
    fleet_file: str = setting("WEIR_FLEET", "", str)
    # Region of this process, one of the fleet file's. Requests that name no region prefer it.
    region: str = setting("WEIR_REGION", "", str)

    # Output tokens leased at once. The first slice covers most answers without a second write.
    lease_slice_tokens: int = setting("WEIR_LEASE_SLICE_TOKENS", 128, whole(1, 65_536))
    # Smallest lease with which a request starts. An answer with fewer tokens would be useless.
    lease_min_tokens: int = setting("WEIR_LEASE_MIN_TOKENS", 16, whole(1, 65_536))
    # Leased tokens left when the next slice is requested; covers the time of a commit at thousands
    # of tokens per second.
    lease_margin_tokens: int = setting("WEIR_LEASE_MARGIN_TOKENS", 32, whole(0, 65_536))
    # Time after which a hold that its process does not renew expires.
    hold_expiry_s: float = setting("WEIR_HOLD_EXPIRY_S", 60.0, positive(3600))

    # Policy while PostgreSQL is unavailable: `closed` refuses new requests; `grace` admits requests
    # under pre-authorized holds, until these expire. Neither can exceed a limit.
    database_unavailable_policy: Literal["closed", "grace"] = setting(
        "WEIR_DATABASE_UNAVAILABLE_POLICY", "closed", one_of("closed", "grace")
    )
    # Longest wait for PostgreSQL before a request is refused. Longer than a commit, and shorter
    # than clients wait for a first token.
    database_timeout_s: float = setting("WEIR_DATABASE_TIMEOUT_S", 5.0, positive(60))
    # Time without PostgreSQL after which health reports not ready. A restart of the database is
    # shorter, so that load balancers do not react to it.
    database_unready_after_s: float = setting("WEIR_DATABASE_UNREADY_AFTER_S", 5.0, positive(3600))
    # Connections of a process for lookups of tenants, besides six for holds, commands, recovery and
    # key checks. A lookup takes milliseconds.
    database_connections_max: int = setting("WEIR_DATABASE_CONNECTIONS", 5, whole(1, 1000))
    # Connections for reports, which may take seconds. One key can use all but one of them.
    report_connections_max: int = setting("WEIR_REPORT_CONNECTIONS", 3, whole(1, 1000))
    # Connections for administration and metrics only, so that revoking a key does not wait for
    # tenants.
    admin_connections_max: int = setting("WEIR_ADMIN_CONNECTIONS", 3, whole(2, 1000))
    # Pre-authorized holds for each key and model in use, for `grace`.
    grace_holds_per_key: int = setting("WEIR_GRACE_HOLDS_PER_KEY", 4, whole(1, 1000))
    # Input tokens that each of WEIR_GRACE_HOLDS_PER_KEY covers; its output is one lease slice.
    grace_input_tokens: int = setting("WEIR_GRACE_INPUT_TOKENS", 2048, whole(1, 10_000_000))

    # Running requests of one stream.
    requests_per_stream_max: int = setting(
        "WEIR_REQUESTS_PER_STREAM_MAX", 1000, whole(1, 1_000_000)
    )
    # Running and waiting requests of a process: its permits.
    requests_per_process_max: int = setting(
        "WEIR_REQUESTS_PER_PROCESS_MAX", 2000, whole(1, 1_000_000)
    )
    # Waiting requests per model. A longer queue would take minutes.
    queue_requests_max: int = setting("WEIR_QUEUE_REQUESTS_MAX", 2000, whole(1, 1_000_000))
    # Waiting requests per model of one organization, which also cannot hold more places than remain
    # free for others.
    queue_requests_per_tenant_max: int = setting(
        "WEIR_QUEUE_REQUESTS_PER_TENANT_MAX", 1000, whole(1, 1_000_000)
    )
    # `fair`: the organization that was served least is next. `arrival`: first come, first served.
    queue_order: Literal["fair", "arrival"] = setting(
        "WEIR_QUEUE_ORDER", "fair", one_of("fair", "arrival")
    )
    # Weights of organizations in the fair queue; 1 by default. Twice the weight is twice the
    # service under load.
    queue_weights: Mapping[str, float] = setting("WEIR_QUEUE_WEIGHTS", dict, weights_by_id)
    # Longest wait of the batch tier behind interactive requests.
    queue_batch_wait_max_s: float = setting("WEIR_QUEUE_BATCH_WAIT_MAX_S", 30.0, positive(86_400))
    # Tokens per request that a client may leave unread before it counts as stalled. Network delays
    # cause far fewer.
    outbox_tokens_per_request_max: int = setting(
        "WEIR_OUTBOX_TOKENS_PER_REQUEST_MAX", 4096, whole(1, 1_000_000)
    )
    # How long a client may read nothing, or grant no credit, before its request ends with
    # `SLOW_CONSUMER`.
    client_stall_max_s: float = setting("WEIR_CLIENT_STALL_MAX_S", 60.0, positive(3600))
    # Minimum rate at which a client must take waiting output, in tokens per second; it may lag by
    # WEIR_CLIENT_STALL_MAX_S. Reading and speech need three tokens per second.
    client_tokens_per_s_min: float = setting(
        "WEIR_CLIENT_TOKENS_PER_SECOND_MIN", 1.0, positive(1000)
    )
    # Longest `keep_on_disconnect`. Generation without a client still occupies an engine.
    keep_on_disconnect_max_s: float = setting(
        "WEIR_KEEP_ON_DISCONNECT_MAX_S", 600.0, positive(86_400)
    )
    # Bytes of output kept per request for a client that may reconnect: about 16,000 tokens.
    replay_bytes_per_request_max: int = setting(
        "WEIR_REPLAY_BYTES_PER_REQUEST_MAX", 2**20, whole(1024, 2**30)
    )
    # Bytes of output kept per process for clients that may reconnect.
    replay_bytes_max: int = setting("WEIR_REPLAY_BYTES_MAX", 2**28, whole(2**16, 2**40))
    # Interval between `progress` frames.
    progress_interval_s: float = setting("WEIR_PROGRESS_INTERVAL_S", 0.5, positive(60))
    # Longest wait of a request for an engine that is loading.
    cold_start_wait_s: float = setting("WEIR_COLD_START_WAIT_S", 120.0, positive(3600))
    # Time after SIGTERM in which running requests may finish; then they are stopped and settled.
    drain_s: float = setting("WEIR_DRAIN_S", 30.0, positive(3600))
    # Time after SIGTERM in which a process still accepts connections and reports that it drains,
    # until load balancers have noticed.
    drain_notice_s: float = setting("WEIR_DRAIN_NOTICE_S", 1.0, positive(3600))
    # Interval between searches for journals of processes that ended.
    recovery_interval_s: float = setting("WEIR_RECOVERY_INTERVAL_S", 5.0, positive(3600))

    # Allow alert webhooks with http and private addresses.
    private_webhooks: bool = setting("WEIR_ALERT_WEBHOOKS_PRIVATE", False, truth)
    # Name of the issuer on invoices, which need name, address and payment.
    issuer_name: str = setting("WEIR_ISSUER_NAME", "", printable)
    # Address of the issuer; lines separated by `|`.
    issuer_address: str = setting("WEIR_ISSUER_ADDRESS", "", printable)
    # Tax id of the issuer.
    issuer_tax_id: str = setting("WEIR_ISSUER_TAX_ID", "", printable)
    # Contact of the issuer.
    issuer_contact: str = setting("WEIR_ISSUER_CONTACT", "", printable)
    # Payment instructions; lines separated by `|`.
    issuer_payment: str = setting("WEIR_ISSUER_PAYMENT", "", printable)
    # TrueType font for invoices, required for letters beyond Western European ones.
    invoice_font: str = setting("WEIR_INVOICE_FONT", "", str)
    # Bold form of WEIR_INVOICE_FONT; by default the same file.
    invoice_font_bold: str = setting("WEIR_INVOICE_FONT_BOLD", "", str)

    def openai_address(self) -> tuple[str, int] | None:
        """Return host and port of the HTTP API; None if it is off.

        Port 0 means that the operating system chooses one.
        """
        return self._address(self.openai_listen, OPENAI_PORT_DISTANCE)

    def metrics_address(self) -> tuple[str, int] | None:
        """Return host and port of the metrics listener; None if it is off."""
        return self._address(self.metrics_listen, METRICS_PORT_DISTANCE)

    @property
    def metrics_port_count(self) -> int:
        return METRICS_PORTS_TRIED if self.share_port else 1

    def _address(self, given: str, distance: int) -> tuple[str, int] | None:
        """Parse the address that is set; by default, loopback with gRPC's port plus `distance`."""
        if given == "off":
            return None
        if given:
            host, _, port = given.rpartition(":")
            return host.strip("[]"), int(port)
        port = self.listen_address.rpartition(":")[2]
        if not port.isdecimal():  # a Unix socket has no port
            return None
        above = int(port) + distance
        return "127.0.0.1", (
            0 if port == "0" else above if above <= PORT_MAX else int(port) - distance
        )

    def proxy_networks(self) -> tuple[Network, ...]:
        """Return the networks of trusted proxies."""
        return networks_of(tuple(filter(None, self.trusted_proxies.split(","))))

    def tls_files(self) -> tuple[Path, Path, Path | None] | None:
        """Return the paths of certificate, key and client CA; None without TLS.

        Raises SettingInvalid if only some of the required files are set.
        """
        if not self.tls_certificate and not self.tls_key:
            if self.tls_client_ca:
                raise SettingInvalid(
                    "WEIR_TLS_CLIENT_CA: client certificates require TLS: set"
                    " WEIR_TLS_CERTIFICATE too"
                )
            return None
        for variable, value in (
            ("WEIR_TLS_CERTIFICATE", self.tls_certificate),
            ("WEIR_TLS_KEY", self.tls_key),
        ):
            if not value:
                raise SettingInvalid(
                    f"{variable} is not set: a certificate requires its key, and a key its"
                    " certificate"
                )
        return (
            Path(self.tls_certificate),
            Path(self.tls_key),
            Path(self.tls_client_ca) if self.tls_client_ca else None,
        )

    @property
    def journal_directory(self) -> Path:
        """Directory of this machine's usage journals."""
        return self.home / "journal"

    def issuer(self) -> Issuer:
        """Build the issuer that invoices show: letterhead and fonts.

        Raises SettingInvalid for too many lines, text that needs a font, or an unreadable font.
        """
        for spec in (spec for spec in fields(self) if spec.name.startswith("issuer_")):
            variable, text = spec.metadata["variable"], getattr(self, spec.name)
            if len(lines_of(text)) > LETTERHEAD_LINES_MAX:
                raise SettingInvalid(
                    f"{variable} must have at most {LETTERHEAD_LINES_MAX} lines, separated by |"
                )
            if not self.invoice_font and not all(shown_by_helvetica(each) for each in text):
                raise SettingInvalid(
                    f"{variable}={text!r}: set WEIR_INVOICE_FONT to a TrueType font that has these"
                    " letters"
                )
        for variable, file in (
            ("WEIR_INVOICE_FONT", self.invoice_font),
            ("WEIR_INVOICE_FONT_BOLD", self.invoice_font_bold),
        ):
            if file and not is_truetype(Path(file)):
                raise SettingInvalid(
                    f"{variable}={file!r}: must be a TrueType font, a file that ends in .ttf"
                )
        return Issuer(
            name=self.issuer_name,
            address=lines_of(self.issuer_address),
            tax_id=self.issuer_tax_id,
            contact=self.issuer_contact,
            payment=lines_of(self.issuer_payment),
            font=Path(self.invoice_font) if self.invoice_font else None,
            bold_font=Path(self.invoice_font_bold) if self.invoice_font_bold else None,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read all settings from the environment. Raises SettingInvalid naming the variable."""
        values: dict[str, Any] = {}
        for spec in fields(cls):
            variable, parse = spec.metadata["variable"], spec.metadata["parse"]
            text = environment.get(variable, "")
            if text:
                try:
                    values[spec.name] = parse(text)
                except Unshown as error:
                    raise SettingInvalid(f"{variable} {error}") from None
                except ValueError as error:
                    raise SettingInvalid(f"{variable}={text!r}: {error}") from error
        if not values.keys() & {"fleet_file", "models", "encoders", "remote_targets"}:
            values["encoders"] = bundled_encoders()
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """Convert the settings to environment variables that `from_environment` reads back."""
        environment = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Mapping):
                value = ",".join(f"{name}={directory}" for name, directory in value.items())
            environment[spec.metadata["variable"]] = str(value)
        return environment
