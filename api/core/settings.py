"""Settings of one api process, read from the environment once.

Every bound that protects the service stands here with its reason. Invalid values are refused at start, by name.
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
from urllib.parse import urlsplit

from inference.text.tools import MODEL_CALL_FORMATS, CallFormat
from metering.invoicing.invoice_document import Issuer, shown_by_helvetica
from metering.tenants.networks import Network, networks_of, parse_network

Value = TypeVar("Value")


class SettingInvalid(ValueError):
    """An environment variable holds something that cannot be used; the message names it and says what would do."""


class Unshown(ValueError):
    """A value that cannot be used, and that no message may repeat."""


def setting(variable: str, default: Any, parse: Callable[[str], Any]) -> Any:
    """A field that `from_environment` fills from the variable. default: a value, or what makes one."""
    metadata = {"variable": variable, "parse": parse}
    return field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Parser of a whole number between two bounds."""

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
    """Parser of a number between two bounds."""

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
    """Parser of a number above 0 and up to a bound."""

    def parse(text: str) -> float:
        try:
            return number(math.nextafter(0, 1), most)(text)
        except ValueError:
            raise ValueError(f"must be a number above 0 and at most {most:g}") from None

    return parse


def pairs(what: str, parse: Callable[[str], Value], parse_name: Callable[[str], object] = str) -> Callable[[str], dict[str, Value]]:
    """Parser of `name=value` pairs, separated by commas. what: how messages call them."""

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
                raise ValueError(f"names {name} twice; a file named by WEIR_FLEET gives a model several engines")
            found[name] = parsed
        return found

    return parse_all


def one_of(*choices: str) -> Callable[[str], str]:
    """Parser of one word among several."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def address_or_off(text: str) -> str:
    """Parser of `host:port`, or of the word that there is to be none."""
    host, _, port = text.rpartition(":")
    if text != "off" and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, or off")
    return text


def networks(text: str) -> str:
    """Parser of networks, separated by commas."""
    return ",".join(str(parse_network(each.strip())) for each in text.split(",") if each.strip())


def listen_address(text: str) -> str:
    """Parser of where gRPC listens: `host:port`, `[IPv6]:port` or `unix:/path`."""
    host, _, port = text.rpartition(":")
    if not text.startswith(("unix:", "unix-abstract:")) and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, such as 127.0.0.1:8443, or unix:/path")
    return text


def postgres_url(text: str) -> str:
    """Parser of a database. What is refused is not repeated: it may hold a password."""
    try:
        parts = urlsplit(text)
        known = parts.scheme.partition("+")[0] in ("postgresql", "postgres") and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise Unshown("must be a PostgreSQL database, written as postgresql://user:password@host:5432/name")
    return text


def truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true")


OPENAI_PORT_DISTANCE = 1000  # so that servers on neighbouring ports do not meet
METRICS_PORT_DISTANCE = 2000
METRICS_PORTS_TRIED = 64  # by processes that share their port with others, and cannot share this one
PORT_MAX = 65_535
DEMO_MODEL_NAME = "demo"
TEXT_CHARS_MAX = 1000  # of a letterhead: more would push the invoice off its own page
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0  # beyond these a tenant would as good as stand still, or alone


def printable(text: str) -> str:
    """Parser of text that stands on paper: a line, or several with `|` between."""
    if not text.isprintable() or len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"must be at most {TEXT_CHARS_MAX} printable characters, lines separated by |")
    return text


def bundled_models() -> dict[str, Path]:
    """The demo model that comes with Weir."""
    return {DEMO_MODEL_NAME: Path(str(files("inference") / "demo_model" / "weights"))}


def default_home() -> Path:
    """Where state of this machine lives unless said otherwise."""
    return Path.home() / ".weir"


def is_truetype(path: Path) -> bool:
    """Whether the file begins as a TrueType font does; others, such as those with PostScript outlines, cannot be drawn with."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"\x00\x01\x00\x00", b"true")
    except OSError:
        return False


def lines_of(text: str) -> tuple[str, ...]:
    """The lines of a text that has them separated by `|`."""
    return tuple(filter(None, (line.strip() for line in text.split("|"))))


def model_call_format(text: str) -> CallFormat:
    return CallFormat(one_of(*MODEL_CALL_FORMATS)(text))


targets_by_name = pairs("name=value pairs", str)
paths_by_name = pairs("name=directory pairs", Path)
call_formats = pairs(f"name=format pairs, each format one of {', '.join(MODEL_CALL_FORMATS)}", model_call_format)
weights_by_id = pairs(
    f"organization-id=weight pairs, each weight from {WEIGHT_MIN} to {WEIGHT_MAX}", number(WEIGHT_MIN, WEIGHT_MAX), uuid.UUID
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that an api process can be told. Durations in seconds, sizes in bytes."""

    # What holds before anybody is let in.
    listen_address: str = setting("WEIR_LISTEN", "127.0.0.1:8443", listen_address)
    # For OpenAI's clients, over HTTP: host:port, or "off". Empty: this machine alone, 1000 ports above that of WEIR_LISTEN.
    openai_listen: str = setting("WEIR_OPENAI_LISTEN", "", address_or_off)
    # The page for people at /console of the same port. 0 switches it off, the JSON form of its calls with it.
    console: bool = setting("WEIR_CONSOLE", True, truth)
    # For Prometheus, in the clear and without a key: host:port, or "off". Empty: this machine alone, 2000 ports above that of
    # WEIR_LISTEN. A process that shares that port takes the first one from there on that is free.
    metrics_listen: str = setting("WEIR_METRICS_LISTEN", "", address_or_off)
    # Lets several processes of one machine listen on one port; the kernel gives each connection to one of them. Without it a second
    # server on the same port is the mistake that it mostly is.
    share_port: bool = setting("WEIR_SHARE_PORT", False, truth)
    # host:port of the peer port, where the other api processes of the database attach to requests, over mutual TLS. Empty: a free
    # port on the host of WEIR_LISTEN. Name one where a firewall stands between the machines.
    peer_listen_address: str = setting("WEIR_PEER_LISTEN", "", str)
    # "host" or "host:port" where the others find that. Empty: where it listens, by the machine's name if on all addresses.
    advertise_address: str = setting("WEIR_ADVERTISE_ADDRESS", "", str)
    # PEM files; both or none. A renewed certificate counts from the next connection on, without a restart.
    tls_certificate: str = setting("WEIR_TLS_CERTIFICATE", "", str)  # the server's own first, then those between it and its root
    tls_key: str = setting("WEIR_TLS_KEY", "", str)  # not encrypted: nobody is there to type a passphrase
    # PEM file of authorities. If it is given, a client needs a certificate of theirs to be listened to at all, beside its key.
    tls_client_ca: str = setting("WEIR_TLS_CLIENT_CA", "", str)
    # Keys and prompts would travel in the clear: only behind a proxy that speaks TLS, or in a network that nobody else is in.
    allow_plaintext: bool = setting("WEIR_ALLOW_PLAINTEXT", False, truth)

    # Failed authentications that one address (IPv6: one /64) may have at once and per minute. Nobody guesses 256 bits: this keeps
    # a flood of wrong keys from the database. Keys that were good a while ago pass in any case. 0: no bound, for servers behind a
    # proxy, which see one address only.
    auth_failures_per_minute: int = setting("WEIR_AUTH_FAILURES_PER_MINUTE", 60, whole(0, 1_000_000))

    # Networks of the proxies before this server, separated by commas: those alone are believed what `X-Forwarded-For` says of where
    # a call comes from. Empty: nobody is, and a call comes from whoever has connected.
    trusted_proxies: str = setting("WEIR_TRUSTED_PROXIES", "", networks)

    # A stream is open for days, and its key may be changed meanwhile: it is looked at again with the first message after so long.
    # That is for a process that is cut off: the others hear of a change, and of a revocation, at once.
    stream_key_check_s: float = setting("WEIR_STREAM_KEY_CHECK_S", 60.0, positive(86_400))

    # When keys were used last is written once in so long, for all of them together, and so late it may be told.
    key_use_interval_s: float = setting("WEIR_KEY_USE_INTERVAL_S", 60.0, positive(3600))

    # 4 MiB hold a prompt of some hundred thousand tokens in any encoding; beyond it parsing alone would stall the others.
    message_bytes_max: int = setting("WEIR_MESSAGE_BYTES_MAX", 4 * 2**20, whole(1024, 2**30))
    # All frames of a message are begun with in one go, and no other stream is served meanwhile. Two for each request that a stream
    # may run: whoever starts more than that learns which one was too many.
    frames_per_message_max: int = setting("WEIR_FRAMES_PER_MESSAGE_MAX", 2000, whole(1, 1_000_000))
    # Share of the event loop's time for the frames and calls of one API key, on all of its streams, after a quarter of a second's
    # worth: beyond it they are read more slowly. All keys of an organization have twice that. Thousands of frames in a second need
    # a tenth of it, and a flood of one key leaves three quarters to others.
    frames_share_max: float = setting("WEIR_FRAMES_SHARE_MAX", 0.25, positive(1))
    # Characters of prompts that are prepared at once, rendered and tokenized, for one API key and for all: two messages of the
    # largest size, and eight. The keys of an organization together take no more than they leave free. A message of a
    # conversation counts as 30 more. While tokenized, a text takes some 30 times its size.
    preparation_chars_per_key_max: int = setting("WEIR_PREPARATION_CHARS_PER_KEY_MAX", 8 * 2**20, whole(1024, 2**40))
    preparation_chars_max: int = setting("WEIR_PREPARATION_CHARS_MAX", 32 * 2**20, whole(1024, 2**40))
    # Threads for that. More than cores only make the event loop wait.
    preparation_thread_count: int = setting("WEIR_PREPARATION_THREADS", 2, whole(1, 64))
    # Of one call, as HPACK counts it. A key, a deadline and a tracing context take a tenth of it.
    metadata_bytes_max: int = setting("WEIR_METADATA_BYTES_MAX", 16 * 2**10, whole(1024, 2**20))
    # Some 40 kB and a check of the key each. One stream carries many requests, so that a client needs few.
    streams_per_connection_max: int = setting("WEIR_STREAMS_PER_CONNECTION_MAX", 1000, whole(1, 100_000))
    # Of gRPC's clients, of some 20 kB each, 50 with TLS. One too many is closed before it is listened to, whoever has the others:
    # how many one address may have is for the firewall, which alone knows whether a thousand customers stand behind it.
    connections_max: int = setting("WEIR_CONNECTIONS_MAX", 10_000, whole(1, 1_000_000))
    # A connection without a call is closed after so long; a client that comes again connects anew and notices nothing.
    connection_idle_max_s: float = setting("WEIR_CONNECTION_IDLE_MAX_S", 1800.0, positive(86_400))
    # After so long a connection takes no new calls, and the client connects anew: so load finds new servers, and a client
    # certificate is looked at again. Calls that run go on to their end.
    connection_age_max_s: float = setting("WEIR_CONNECTION_AGE_MAX_S", 86_400.0, positive(31_536_000))
    # HTTP connections of OpenAI's clients, of some 20 kB each; one too many is closed.
    http_connections_max: int = setting("WEIR_HTTP_CONNECTIONS_MAX", 4000, whole(1, 1_000_000))
    # One of them that does not come to a whole head of a request in so long is closed: most load balancers wait a little longer.
    http_idle_max_s: float = setting("WEIR_HTTP_IDLE_MAX_S", 50.0, positive(3600))
    # TLS and HTTP/2 must have shaken hands by then: whoever connects and says nothing costs a file descriptor.
    handshake_max_s: float = setting("WEIR_HANDSHAKE_MAX_S", 10.0, positive(3600))

    # With WEIR_ENGINE=remote.
    # model=trtllm://host:port or model=vllm://host:port, separated by commas. WEIR_MODELS names the directory with a model's
    # config.json, tokenizer.json and chat template; where it does not, the server is asked for them.
    remote_targets: Mapping[str, str] = setting("WEIR_REMOTE_TARGETS", dict, targets_by_name)
    # The same for models that embed. WEIR_ENCODERS names a directory where the server cannot be asked for the files.
    remote_encoders: Mapping[str, str] = setting("WEIR_REMOTE_ENCODERS", dict, targets_by_name)
    # Otherwise a server that serves prefixes of one tenant to another is not used: vLLM has to run without its prefix cache then.
    remote_share_prefixes: bool = setting("WEIR_REMOTE_SHARE_PREFIXES", False, truth)
    # Sequences of one process in one server; more wait here, where their rank counts. A server may allow less.
    remote_batch_max: int = setting("WEIR_REMOTE_BATCH_MAX", 256, whole(1, 65_536))
    # Promised to clients; 0: the checkpoint's. A server whose own is smaller is not used.
    remote_context_tokens: int = setting("WEIR_REMOTE_CONTEXT_TOKENS", 0, whole(0, 100_000_000))
    # Silence of a sequence that shows that it, or its server, is stuck: the first covers a long prompt behind many others.
    remote_first_token_s: float = setting("WEIR_REMOTE_FIRST_TOKEN_S", 120.0, positive(3600))
    remote_inter_token_s: float = setting("WEIR_REMOTE_INTER_TOKEN_S", 30.0, positive(3600))
    # Between looks whether a server has begun to share prefixes of tenants, each of which has it compute two prompts of 513 tokens.
    remote_probe_s: float = setting("WEIR_REMOTE_PROBE_S", 600.0, positive(86_400))
    # PEM files. With an authority the way is TLS; with certificate and key besides, servers see who asks (mTLS).
    remote_tls_ca: str = setting("WEIR_REMOTE_TLS_CA", "", str)
    remote_tls_certificate: str = setting("WEIR_REMOTE_TLS_CERTIFICATE", "", str)
    remote_tls_key: str = setting("WEIR_REMOTE_TLS_KEY", "", str)
    # What the servers' certificates are made out to, where that is not the host of the target.
    remote_tls_name: str = setting("WEIR_REMOTE_TLS_NAME", "", str)

    database_url: str = setting("WEIR_DATABASE_URL", "", postgres_url)
    home: Path = field(default_factory=default_home, metadata={"variable": "WEIR_HOME", "parse": Path})
    models: Mapping[str, Path] = setting("WEIR_MODELS", bundled_models, paths_by_name)
    # How models write tool calls, as name=hermes, =llama or =mistral, separated by commas; others write as their templates show.
    tool_call_formats: Mapping[str, CallFormat] = setting("WEIR_TOOL_CALL_FORMATS", dict, call_formats)
    # Models that embed, in the layout of sentence-transformers.
    encoders: Mapping[str, Path] = setting("WEIR_ENCODERS", dict, paths_by_name)
    # Tokens of an encoder's batch. More gain nothing on a CPU, and whoever comes next waits for them; a GPU takes many more.
    encoder_batch_tokens: int = setting("WEIR_ENCODER_BATCH_TOKENS", 1024, whole(1, 2**20))
    safety_rules: str = setting(
        "WEIR_SAFETY_RULES", "", str
    )  # a file for `inference.safety.safety_file`; empty: nothing is checked
    # The private key that signs receipts. Empty: that of the home directory, if there is one; "off": none, they are chained only.
    receipt_key_file: str = setting("WEIR_RECEIPT_KEY_FILE", "", str)
    # "tensorrt" serves all models on GPUs by TensorRT-LLM; "torch" on whatever this machine has; "remote" on other machines.
    engine_backend: Literal["torch", "tensorrt", "remote"] = setting("WEIR_ENGINE", "torch", one_of("torch", "tensorrt", "remote"))
    # "int8" stores matrices in 8 bits: a quarter of the memory of float32, and answers that differ a little.
    engine_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "WEIR_ENGINE_DTYPE", "float32", one_of("float32", "bfloat16", "int8")
    )
    # "simulated" computes nothing and takes the time of `inference.core.options`: for load tests, every answer says so.
    engine_device: Literal["cpu", "cuda", "simulated"] = setting("WEIR_ENGINE_DEVICE", "cpu", one_of("cpu", "cuda", "simulated"))
    simulated_time_scale: float = setting("WEIR_SIMULATED_TIME_SCALE", 1.0, number(0, 1000))  # 0: no time passes
    engine_thread_count: int = setting("WEIR_ENGINE_THREADS", 0, whole(0, 1024))  # 0: as many as there are cores
    kv_cache_bytes: int = setting("WEIR_KV_CACHE_BYTES", 2**30, whole(2**20, 2**44))  # reserved, used as far as needed

    # Of each model's engine: 0 replicas leaves it cold until a request comes. More are kept loaded whatever happens.
    min_replicas: int = setting("WEIR_MIN_REPLICAS", 1, whole(0, 64))
    # More than the least are started when all that run are full for some seconds, as far as there is free memory.
    max_replicas: int = setting("WEIR_MAX_REPLICAS", 1, whole(1, 64))
    # Without a request for so long, an engine that need not be kept is stopped and gives its memory back. 0: never.
    model_idle_timeout_s: float = setting("WEIR_MODEL_IDLE_TIMEOUT_S", 0.0, number(0, 86_400))
    # "on" keeps the packed weights of large models in the home directory: all hosts of a model map one copy, and later starts read
    # that alone. "off" leaves the disk alone, and gives each host its own.
    packed_weights: Literal["on", "off"] = setting("WEIR_PACKED_WEIGHTS", "on", one_of("on", "off"))
    # Of all these files: the least recently used go where there are more, but for those of models that run.
    packed_weights_bytes: int = setting("WEIR_PACKED_WEIGHTS_BYTES", 64 << 30, whole(0, 2**50))
    # Engine hosts of the torch backend that have imported torch and wait for a model: a start that takes one saves that time. Some
    # 130 MB each.
    spare_hosts: int = setting("WEIR_SPARE_HOSTS", 0, whole(0, 16))
    # For all engines of this process: one that does not fit waits, and those that are idle give way. 0: no limit.
    engine_memory_bytes: int = setting("WEIR_ENGINE_MEMORY_BYTES", 0, whole(0, 2**50))

    # Of TensorRT-LLM: GPUs that share each matrix, that share the layers, and that share the experts (0: the engine decides).
    tensorrt_tensor_parallel: int = setting("WEIR_TENSORRT_TENSOR_PARALLEL", 1, whole(1, 1024))
    tensorrt_pipeline_parallel: int = setting("WEIR_TENSORRT_PIPELINE_PARALLEL", 1, whole(1, 1024))
    tensorrt_expert_parallel: int = setting("WEIR_TENSORRT_EXPERT_PARALLEL", 0, whole(0, 1024))
    tensorrt_batch_max: int = setting("WEIR_TENSORRT_BATCH_MAX", 256, whole(1, 4096))
    tensorrt_kv_cache_dtype: Literal["auto", "fp8"] = setting("WEIR_TENSORRT_KV_CACHE_DTYPE", "auto", one_of("auto", "fp8"))
    # Of the memory that is free after the weights; the rest is for activations and what else runs on the GPU.
    tensorrt_kv_cache_fraction: float = setting("WEIR_TENSORRT_KV_CACHE_FRACTION", 0.9, number(0, 0.99))
    # Aborts during prefill have hung engines: "running" puts them off until the first token. "never" lets cancelled ones run out.
    tensorrt_abort: Literal["running", "always", "never"] = setting(
        "WEIR_TENSORRT_ABORT", "running", one_of("running", "always", "never")
    )
    # Refused unless empty: TensorRT-LLM 1.2.1 accepts adapters and answers with the base model.
    lora_adapters: str = setting("WEIR_LORA_ADAPTERS", "", str)
    # A file of models, replicas, aliases and regions, in the place of WEIR_MODELS; `docs/reference/fleet.md` has its keys.
    fleet_file: str = setting("WEIR_FLEET", "", str)
    # Where this process runs: one of the regions of that file. Requests that name no region prefer it.
    region: str = setting("WEIR_REGION", "", str)

    # The first slice covers most answers without a second write; extensions come in the same size.
    lease_slice_tokens: int = setting("WEIR_LEASE_SLICE_TOKENS", 128, whole(1, 65_536))
    # Below this an answer would end before it says anything: better refused than started.
    lease_least_tokens: int = setting("WEIR_LEASE_LEAST_TOKENS", 16, whole(1, 65_536))
    # Asked for when so few leased tokens are left: covers the commit at decode speeds up to thousands of tokens/s.
    lease_margin_tokens: int = setting("WEIR_LEASE_MARGIN_TOKENS", 32, whole(0, 65_536))
    hold_expiry_s: float = setting("WEIR_HOLD_EXPIRY_S", 60.0, positive(3600))

    # While PostgreSQL is away: "closed" refuses new requests; "grace" lets in those for which holds were set aside before, until
    # these expire. No limit is exceeded in either.
    store_away_policy: Literal["closed", "grace"] = setting("WEIR_STORE_AWAY_POLICY", "closed", one_of("closed", "grace"))
    # Longer than a commit ever takes, shorter than clients wait for a first token.
    store_answer_wait_s: float = setting("WEIR_STORE_ANSWER_WAIT_S", 5.0, positive(60))
    # A restart of the database is over by then, and a load balancer need not move everybody because of it.
    store_away_health_s: float = setting("WEIR_STORE_AWAY_HEALTH_S", 5.0, positive(3600))
    # Connections of a process to PostgreSQL, beside six for holds, orders, recovery and the check of keys. Tenants' lookups take
    # milliseconds each: so many at once serve thousands per second.
    database_connections_max: int = setting("WEIR_DATABASE_CONNECTIONS", 5, whole(1, 1000))
    # For reports, which may take seconds. One key has all but one of them at most, so that the reports of others go on.
    report_connections_max: int = setting("WEIR_REPORT_CONNECTIONS", 3, whole(1, 1000))
    # For administration and metrics alone: revoking a key waits for no tenant.
    admin_connections_max: int = setting("WEIR_ADMIN_CONNECTIONS", 3, whole(2, 1000))
    # Set aside for each key and model in use, in holds and in input tokens of each; the output is a lease slice.
    grace_holds_per_key: int = setting("WEIR_GRACE_HOLDS_PER_KEY", 4, whole(1, 1000))
    grace_input_tokens: int = setting("WEIR_GRACE_INPUT_TOKENS", 2048, whole(1, 10_000_000))

    requests_per_stream_max: int = setting("WEIR_REQUESTS_PER_STREAM_MAX", 1000, whole(1, 1_000_000))
    requests_per_process_max: int = setting("WEIR_REQUESTS_PER_PROCESS_MAX", 2000, whole(1, 1_000_000))
    # Per model. A queue as long as this takes minutes to work off: whoever came later would rather know.
    queue_requests_max: int = setting("WEIR_QUEUE_REQUESTS_MAX", 2000, whole(1, 1_000_000))
    # Of one organization; beside it, none has more places than it leaves free, so that newcomers always find one.
    queue_requests_per_tenant_max: int = setting("WEIR_QUEUE_REQUESTS_PER_TENANT_MAX", 1000, whole(1, 1_000_000))
    # "fair": the organization that was served least is next. "arrival": first come, first served, whoever it is.
    queue_order: Literal["fair", "arrival"] = setting("WEIR_QUEUE_ORDER", "fair", one_of("fair", "arrival"))
    # Organization ids with weights, separated by commas; the others have 1. Twice the weight is twice the service under load.
    queue_weights: Mapping[str, float] = setting("WEIR_QUEUE_WEIGHTS", dict, weights_by_id)
    # While interactive requests wait, one of the batch tier gets its turn each so often: rarely enough not to be noticed.
    queue_batch_wait_max_s: float = setting("WEIR_QUEUE_BATCH_WAIT_MAX_S", 30.0, positive(86_400))
    # What a client may leave unread per request before it is taken for stalled: far beyond what a network delays.
    outbox_tokens_per_request_max: int = setting("WEIR_OUTBOX_TOKENS_PER_REQUEST_MAX", 4096, whole(1, 1_000_000))
    # A client that reads nothing for so long has gone, whatever its connection says.
    client_stall_max_s: float = setting("WEIR_CLIENT_STALL_MAX_S", 60.0, positive(3600))
    # Generation that nobody receives costs an engine all the same; a client that is gone for longer seldom comes back.
    keep_max_s: float = setting("WEIR_KEEP_MAX_S", 600.0, positive(86_400))
    # Of output that is kept for clients that may come back: for each request some 16,000 tokens, and in all of them together.
    kept_bytes_per_request_max: int = setting("WEIR_KEPT_BYTES_PER_REQUEST_MAX", 2**20, whole(1024, 2**30))
    kept_bytes_max: int = setting("WEIR_KEPT_BYTES_MAX", 2**28, whole(2**16, 2**40))
    progress_interval_s: float = setting("WEIR_PROGRESS_INTERVAL_S", 0.5, positive(60))
    cold_start_wait_s: float = setting("WEIR_COLD_START_WAIT_S", 120.0, positive(3600))
    drain_s: float = setting("WEIR_DRAIN_S", 30.0, positive(3600))
    # After SIGTERM a process that runs requests listens for so long, and says that it drains: until load balancers have noticed.
    # Then it takes no more connections, and those that it has are to be made elsewhere for new calls.
    drain_notice_s: float = setting("WEIR_DRAIN_NOTICE_S", 1.0, positive(3600))
    recovery_interval_s: float = setting("WEIR_RECOVERY_INTERVAL_S", 5.0, positive(3600))

    # Webhooks of alerts may be on private networks, and spoken to in the clear. The workers read it, too.
    private_webhooks: bool = setting("WEIR_ALERT_WEBHOOKS_PRIVATE", False, truth)
    # Who issues the invoices. Without a name they are statements. Lines of address and payment are separated by `|`.
    issuer_name: str = setting("WEIR_ISSUER_NAME", "", printable)
    issuer_address: str = setting("WEIR_ISSUER_ADDRESS", "", printable)
    issuer_tax_id: str = setting("WEIR_ISSUER_TAX_ID", "", printable)
    issuer_contact: str = setting("WEIR_ISSUER_CONTACT", "", printable)
    issuer_payment: str = setting("WEIR_ISSUER_PAYMENT", "", printable)
    # TrueType files for letters beyond Western Europe's; the bold one is the other if not given.
    invoice_font: str = setting("WEIR_INVOICE_FONT", "", str)
    invoice_font_bold: str = setting("WEIR_INVOICE_FONT_BOLD", "", str)

    def openai_address(self) -> tuple[str, int] | None:
        """Host and port for OpenAI's clients; None for no such door. Port 0 lets the system choose, as for gRPC."""
        return self._address(self.openai_listen, OPENAI_PORT_DISTANCE)

    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port for Prometheus, in the same way."""
        return self._address(self.metrics_listen, METRICS_PORT_DISTANCE)

    @property
    def metrics_port_count(self) -> int:
        return METRICS_PORTS_TRIED if self.share_port else 1

    def _address(self, given: str, distance: int) -> tuple[str, int] | None:
        """What a setting says; if it says nothing, on the loopback so far above the port for gRPC, or below where there is none."""
        if given == "off":
            return None
        if given:
            host, _, port = given.rpartition(":")
            return host.strip("[]"), int(port)
        port = self.listen_address.rpartition(":")[2]
        if not port.isdecimal():  # a Unix socket: there is no port to go by
            return None
        above = int(port) + distance
        return "127.0.0.1", 0 if port == "0" else above if above <= PORT_MAX else int(port) - distance

    def proxy_networks(self) -> tuple[Network, ...]:
        """Where the proxies are whose word on addresses is taken."""
        return networks_of(tuple(filter(None, self.trusted_proxies.split(","))))

    def tls_files(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, key and client authorities; None without TLS. Raises: SettingInvalid for a half of it."""
        if not self.tls_certificate and not self.tls_key:
            if self.tls_client_ca:
                raise SettingInvalid("WEIR_TLS_CLIENT_CA: clients show certificates over TLS alone: give WEIR_TLS_CERTIFICATE too")
            return None
        for variable, value in (("WEIR_TLS_CERTIFICATE", self.tls_certificate), ("WEIR_TLS_KEY", self.tls_key)):
            if not value:
                raise SettingInvalid(f"{variable} is not set: a certificate and its key go together")
        return Path(self.tls_certificate), Path(self.tls_key), Path(self.tls_client_ca) if self.tls_client_ca else None

    @property
    def journal_directory(self) -> Path:
        """Where usage journals of this machine's processes live."""
        return self.home / "journal"

    def issuer(self) -> Issuer:
        """The letterhead. Raises: SettingInvalid if it has letters that no font is given for, or the font cannot be read."""
        for spec in (spec for spec in fields(self) if spec.name.startswith("issuer_")):
            variable, text = spec.metadata["variable"], getattr(self, spec.name)
            if not self.invoice_font and not all(shown_by_helvetica(each) for each in text):
                raise SettingInvalid(f"{variable}={text!r}: name a TrueType font that has these letters with WEIR_INVOICE_FONT")
        for variable, file in (("WEIR_INVOICE_FONT", self.invoice_font), ("WEIR_INVOICE_FONT_BOLD", self.invoice_font_bold)):
            if file and not is_truetype(Path(file)):
                raise SettingInvalid(f"{variable}={file!r}: give a TrueType font, a file that ends in .ttf")
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
        """Read and check. Raises: SettingInvalid naming the variable."""
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
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The environment from which `from_environment` makes these settings."""
        environment = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Mapping):
                value = ",".join(f"{name}={directory}" for name, directory in value.items())
            environment[spec.metadata["variable"]] = str(value)
        return environment
