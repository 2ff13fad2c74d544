"""Settings of an api process, read from the environment once.

Each owner declares its settings in one dataclass, which it is handed whole: the parts of the API
here, engines and metering in their modules. Every limit that protects the service has its reason
above it. Invalid values are rejected at start, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from api.core.addresses import is_local
from common.settings import (
    PREFIX,
    SettingInvalid,
    changed,
    number,
    one_of,
    pairs,
    positive,
    read,
    setting,
    truth,
    whole,
    written,
)
from inference.adapters.remote_settings import RemoteDefaults
from inference.adapters.tensorrt_settings import TensorRtDefaults
from inference.core.options import EngineDefaults
from inference.routing.scaling import ReplicaSettings
from inference.text.tools import MODEL_CALL_FORMATS, CallFormat
from metering.invoicing.invoice_document import IssuerSettings
from metering.store.db import DatabaseSettings
from metering.tenants.networks import Network, networks_of, parse_network

OPENAI_PORT_DISTANCE = 1000  # so that servers on neighbouring ports do not collide
METRICS_PORT_DISTANCE = 2000
METRICS_PORTS_TRIED = 64  # tried by processes that share a port, because this one cannot be shared
PORT_MAX = 65_535
DEMO_MODEL_NAME = "demo"
DEMO_ENCODER_NAME = "demo-embedding"
# Weights outside this range would starve the tenant itself or all others.
# Variables that name models. If one is set, the bundled encoder is left out.
# What replaces a setting that was removed, by its variable without the prefix.
REMOVED = {
    "QUEUE_WEIGHTS": "the weight of an organization is stored with it now: set it once with"
    " `weir org weight ORGANIZATION WEIGHT` or `queue_weight` in the file of `weir apply`, and"
    " unset this variable"
}
MODEL_VARIABLES = ("WEIR_FLEET", "WEIR_MODELS", "WEIR_ENCODERS", "WEIR_REMOTE_TARGETS")


def address_or_off(text: str) -> str:
    """Validate `host:port` or `off`. Raises: ValueError."""
    host, _, port = text.rpartition(":")
    if text != "off" and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, or off")
    return text


def networks(text: str) -> str:
    """Parse comma-separated IP networks and write them in canonical notation."""
    return ",".join(str(parse_network(each.strip())) for each in text.split(",") if each.strip())


def listen_address(text: str) -> str:
    """Validate a listening address of gRPC: `host:port`, `[IPv6]:port` or `unix:/path`.

    Raises: ValueError.
    """
    host, _, port = text.rpartition(":")
    if not text.startswith(("unix:", "unix-abstract:")) and not (
        host and port.isdecimal() and int(port) < 65_536
    ):
        raise ValueError("must be host:port, such as 127.0.0.1:8443, or unix:/path")
    return text


def docs_url(text: str) -> str:
    """Validate the address of a web site. Raises: ValueError."""
    if text and not re.fullmatch(r"https?://[!-z|~]{1,180}", text):
        raise ValueError("must be a URL of http or https with at most 180 characters")
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


def model_call_format(text: str) -> CallFormat:
    return CallFormat(one_of(*MODEL_CALL_FORMATS)(text))


call_formats = pairs(
    f"name=format pairs, each format one of {', '.join(MODEL_CALL_FORMATS)}", model_call_format
)
paths_by_name = pairs("name=directory pairs", Path)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Addresses on which a process listens, and those that it announces."""

    # Where clients call by gRPC. Without TLS this can be a loopback address or a Unix socket only.
    address: str = setting("WEIR_LISTEN", "127.0.0.1:8443", listen_address)
    # Where OpenAI's API and the console are served over HTTP; `off` closes it. Unset: on the
    # loopback, 1000 above the port of WEIR_LISTEN.
    openai: str = setting("WEIR_OPENAI_LISTEN", "", address_or_off)
    # Serve the web console and its JSON calls at /console of the HTTP port.
    console: bool = setting("WEIR_CONSOLE", True, truth)
    # Where metrics and health checks are served, without TLS or key; `off` closes it. Unset: on the
    # loopback, 2000 above the port of WEIR_LISTEN. If processes share a port, each takes the first
    # free one from there on.
    metrics: str = setting("WEIR_METRICS_LISTEN", "", address_or_off)
    # `host:port` of KEDA's external scaler, without a key; `off` closes it. With
    # WEIR_TLS_CERTIFICATE it uses TLS.
    keda: str = setting("WEIR_KEDA_LISTEN", "off", address_or_off)
    # PEM file with the CA of KEDA's client certificate, which is then required there.
    keda_client_ca: str = setting("WEIR_KEDA_CLIENT_CA", "", str)
    # Let several processes of one machine listen on one port; the kernel shares connections out.
    # Off by default, because a second server on a port is usually a mistake.
    share_port: bool = setting("WEIR_SHARE_PORT", False, truth)
    # `host:port` where other api processes attach to requests, over mutual TLS. Unset: a free port
    # on the host of WEIR_LISTEN. Set it if there is a firewall between your machines.
    peer: str = setting("WEIR_PEER_LISTEN", "", str)
    # `host` or `host:port` at which other api processes reach the peer port. Unset: the address
    # that it listens on, or the name of the host if it listens on all addresses.
    advertised: str = setting("WEIR_ADVERTISE_ADDRESS", "", str)
    # Address of your documentation site, as built by `make docs`: errors link to its pages. Unset:
    # they link to the page's file in the checkout, if the server runs in one and listens on
    # loopback; elsewhere they name the file's path in the repository.
    docs: str = setting("WEIR_DOCS_URL", "", docs_url)

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the listeners of clients."""
        return is_local(self.address) and (self.openai in ("", "off") or is_local(self.openai))

    def openai_address(self) -> tuple[str, int] | None:
        """Return host and port of the HTTP API; None if it is off.

        Port 0 means that the operating system chooses one.
        """
        return self._address(self.openai, OPENAI_PORT_DISTANCE)

    def metrics_address(self) -> tuple[str, int] | None:
        """Return host and port of the metrics listener; None if it is off."""
        return self._address(self.metrics, METRICS_PORT_DISTANCE)

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
        port = self.address.rpartition(":")[2]
        if not port.isdecimal():  # a Unix socket has no port
            return None
        above = int(port) + distance
        return "127.0.0.1", (
            0 if port == "0" else above if above <= PORT_MAX else int(port) - distance
        )


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS of the gRPC and HTTP ports."""

    # PEM file with the server's certificate, followed by its intermediates. You can renew it
    # without a restart: new connections use the new file.
    certificate: str = setting("WEIR_TLS_CERTIFICATE", "", str)
    # PEM file with the private key. It must not be encrypted, because a server cannot enter a
    # passphrase.
    key: str = setting("WEIR_TLS_KEY", "", str)
    # PEM file with the authorities of client certificates. If you set it, clients need a
    # certificate (mTLS) and an API key.
    client_ca: str = setting("WEIR_TLS_CLIENT_CA", "", str)
    # Listen on any address without TLS. Everyone on the network can then read API keys and prompts,
    # so use it behind a TLS proxy only.
    allow_plaintext: bool = setting("WEIR_ALLOW_PLAINTEXT", False, truth)

    def files(self) -> tuple[Path, Path, Path | None] | None:
        """Return the paths of certificate, key and client CA; None without TLS.

        Raises SettingInvalid if only some of the required files are set.
        """
        if not self.certificate and not self.key:
            if self.client_ca:
                raise SettingInvalid(
                    "WEIR_TLS_CLIENT_CA: client certificates require TLS: set"
                    " WEIR_TLS_CERTIFICATE too"
                )
            return None
        for variable, value in (
            ("WEIR_TLS_CERTIFICATE", self.certificate),
            ("WEIR_TLS_KEY", self.key),
        ):
            if not value:
                raise SettingInvalid(
                    f"{variable} is not set: a certificate requires its key, and a key its"
                    " certificate"
                )
        return (
            Path(self.certificate),
            Path(self.key),
            Path(self.client_ca) if self.client_ca else None,
        )


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Authentication of calls."""

    # How often one address (IPv6: one /64) may fail to authenticate, at once and per minute; 0: as
    # often as it likes. This keeps a flood of wrong keys from the database. Keys that were valid
    # before are exempt. Use 0 behind a proxy that hides addresses.
    failures_per_minute: int = setting("WEIR_AUTH_FAILURES_PER_MINUTE", 60, whole(0, 1_000_000))
    # Networks of your proxies, separated by commas. Weir trusts their `X-Forwarded-For`, and their
    # `X-Forwarded-Proto` for cookies. Unset: none.
    trusted_proxies: str = setting("WEIR_TRUSTED_PROXIES", "", networks)
    # How often the key of an open stream is checked again. Processes are told of changes at once;
    # this is for one that missed the news.
    stream_key_check_s: float = setting("WEIR_STREAM_KEY_CHECK_S", 60.0, positive(86_400))
    # How often the last uses of keys are written, all keys in one statement.
    key_use_interval_s: float = setting("WEIR_KEY_USE_INTERVAL_S", 60.0, positive(3600))
    # Let issuers of tokens use http and private addresses; only the operator may trust any then.
    private_issuers: bool = setting("WEIR_TOKEN_ISSUERS_PRIVATE", False, truth)
    # File with the identity providers by which persons sign in to the console. Unset: by links and
    # invitations only.
    sign_in_file: str = setting("WEIR_SIGN_IN", "", str)

    def proxy_networks(self) -> tuple[Network, ...]:
        """Return the networks of trusted proxies."""
        return networks_of(tuple(filter(None, self.trusted_proxies.split(","))))


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """Messages that clients send."""

    # How large a message or an HTTP body may be. The default holds a prompt of some hundred
    # thousand tokens; parsing more would delay other streams.
    bytes_max: int = setting("WEIR_MESSAGE_BYTES_MAX", 4 * 2**20, whole(1024, 2**30))
    # How many frames a message may have. The default is two for each request of a stream. A message
    # is handled in slices, between those of other streams.
    frames_max: int = setting("WEIR_FRAMES_PER_MESSAGE_MAX", 2000, whole(1, 1_000_000))
    # Share of the event loop's time that frames and calls of one key may take; all keys of an
    # organization may take twice that. Beyond it, their frames are read more slowly. A client that
    # sends thousands of frames per second needs a tenth of it.
    frames_share_max: float = setting("WEIR_FRAMES_SHARE_MAX", 0.25, positive(1))


@dataclass(frozen=True, slots=True)
class PreparationSettings:
    """Rendering and tokenizing of prompts."""

    # How many characters of one key's prompts are rendered and tokenized at once: two of the
    # largest messages. Each message of a conversation counts 30 more. Tokenizing takes some 30
    # times the memory of the text.
    chars_per_key_max: int = setting(
        "WEIR_PREPARATION_CHARS_PER_KEY_MAX", 8 * 2**20, whole(1024, 2**40)
    )
    # How many characters of prompts a process renders and tokenizes at once, for all keys. The keys
    # of one organization never take more than they leave free for others.
    chars_max: int = setting("WEIR_PREPARATION_CHARS_MAX", 32 * 2**20, whole(1024, 2**40))
    # Threads that render and tokenize. If you set more than you have cores, the event loop is late.
    thread_count: int = setting("WEIR_PREPARATION_THREADS", 2, whole(1, 64))


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Connections of the gRPC port, and bounds of all connections."""

    # How large the metadata of one call may be, as HPACK counts it. A key, a deadline and a trace
    # context take a tenth of the default.
    metadata_bytes_max: int = setting("WEIR_METADATA_BYTES_MAX", 16 * 2**10, whole(1024, 2**20))
    # How many streams a connection may open, about 40 kB each. A stream carries many requests, so
    # clients need few.
    streams_max: int = setting("WEIR_STREAMS_PER_CONNECTION_MAX", 1000, whole(1, 100_000))
    # How many gRPC connections a process accepts, about 20 kB each, 50 kB with TLS. It closes any
    # more unread. To limit connections per address, use your firewall, which knows how many clients
    # share one.
    count_max: int = setting("WEIR_CONNECTIONS_MAX", 10_000, whole(1, 1_000_000))
    # How long a connection may be without calls before it is closed. Clients reconnect by
    # themselves.
    idle_max_s: float = setting("WEIR_CONNECTION_IDLE_MAX_S", 1800.0, positive(86_400))
    # How old a connection may be and still take new calls. After that clients find new servers, and
    # client certificates are checked again. Running calls continue.
    age_max_s: float = setting("WEIR_CONNECTION_AGE_MAX_S", 86_400.0, positive(31_536_000))
    # How long the handshakes of TLS and HTTP/2 may take. A silent connection occupies a file
    # descriptor.
    handshake_max_s: float = setting("WEIR_HANDSHAKE_MAX_S", 10.0, positive(3600))


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Connections of the HTTP port."""

    # How many HTTP connections a process accepts, about 20 kB each. It closes any more.
    connections_max: int = setting("WEIR_HTTP_CONNECTIONS_MAX", 4000, whole(1, 1_000_000))
    # How long an HTTP connection may be idle before it is closed, and how long a new one may take
    # to send its head. Keep it longer than the idle time of your load balancer, usually 60 s: if
    # the server closes first, a client may get a 502.
    idle_max_s: float = setting("WEIR_HTTP_IDLE_MAX_S", 75.0, positive(3600))
    # After this time, an HTTP response that is not streamed begins with blanks, so that balancers
    # keep its connection. Its status is then 200, and a later failure ends it without its last
    # chunk. 0: never; set the timeout of your balancers above the longest answer instead.
    padding_after_s: float = setting("WEIR_HTTP_PADDING_AFTER_S", 30.0, number(0, 3600))


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Models that a process serves."""

    # Your models, as `name=directory` pairs of checkpoints in Hugging Face layout. Each gets an
    # engine.
    directories: Mapping[str, Path] = setting("WEIR_MODELS", bundled_models, paths_by_name)
    # How your models write tool calls, as `name=hermes`, `llama` or `mistral`. Unset: as their
    # templates show.
    tool_call_formats: Mapping[str, CallFormat] = setting(
        "WEIR_TOOL_CALL_FORMATS", dict, call_formats
    )
    # Your embedding models, as `name=directory` pairs in the layout of sentence-transformers.
    # Unset: the bundled `demo-embedding` if you have set no models, loaded by its first request;
    # else none.
    encoders: Mapping[str, Path] = setting("WEIR_ENCODERS", dict, paths_by_name)
    # How many tokens an encoder computes at once. On a CPU, larger batches gain nothing and delay
    # the next one; a GPU can take many more.
    encoder_batch_tokens: int = setting("WEIR_ENCODER_BATCH_TOKENS", 1024, whole(1, 2**20))
    # File with rules that prompts and outputs are checked by. Unset: nothing is checked.
    safety_rules: str = setting("WEIR_SAFETY_RULES", "", str)
    # File with your models, replicas, aliases and regions, instead of WEIR_MODELS
    # (`docs/reference/fleet.md`). The first process stores it as a version of the fleet, and the
    # newest version counts from then on: `weir fleet`.
    fleet_file: str = setting("WEIR_FLEET", "", str)
    # Region of this process, one of the fleet file. Requests that name no region run here if they
    # can.
    region: str = setting("WEIR_REGION", "", str)


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Output tokens that a running request leases, in slices."""

    # How many output tokens a request leases at once. The first slice covers most answers, so they
    # need no second write.
    slice_tokens: int = setting("WEIR_LEASE_SLICE_TOKENS", 128, whole(1, 65_536))
    # How many output tokens a request must be able to lease to start. A shorter answer would be
    # useless.
    min_tokens: int = setting("WEIR_LEASE_MIN_TOKENS", 16, whole(1, 65_536))
    # How many leased tokens are left when a request asks for the next slice. They last for a
    # commit, at thousands of tokens per second.
    margin_tokens: int = setting("WEIR_LEASE_MARGIN_TOKENS", 32, whole(0, 65_536))
    # How long a hold lives if its process does not renew it.
    expiry_s: float = setting("WEIR_HOLD_EXPIRY_S", 60.0, positive(3600))
    # How often a process looks for journals of processes that have ended.
    recovery_interval_s: float = setting("WEIR_RECOVERY_INTERVAL_S", 5.0, positive(3600))

    def first_slice(self, output_token_count_max: int) -> tuple[int, int]:
        """Compute the first slice of a request with at most this output, and its minimum."""
        first = min(self.slice_tokens, output_token_count_max)
        return first, min(self.min_tokens, first)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Running requests."""

    # How many requests a stream may run at once.
    per_stream_max: int = setting("WEIR_REQUESTS_PER_STREAM_MAX", 1000, whole(1, 1_000_000))
    # How many requests a process may run and keep waiting, together.
    per_process_max: int = setting("WEIR_REQUESTS_PER_PROCESS_MAX", 2000, whole(1, 1_000_000))
    # How often a waiting request gets a `progress` frame.
    progress_interval_s: float = setting("WEIR_PROGRESS_INTERVAL_S", 0.5, positive(60))
    # How long a request waits for an engine that is loading.
    cold_start_wait_s: float = setting("WEIR_COLD_START_WAIT_S", 120.0, positive(3600))


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The queue of requests before each engine."""

    # How many requests may wait for a model, in all processes before the same engines. In a longer
    # queue they would wait for minutes.
    requests_max: int = setting("WEIR_QUEUE_REQUESTS_MAX", 2000, whole(1, 1_000_000))
    # How many requests of one organization may wait for a model. An organization cannot take more
    # places than it leaves free for others either.
    requests_per_tenant_max: int = setting(
        "WEIR_QUEUE_REQUESTS_PER_TENANT_MAX", 1000, whole(1, 1_000_000)
    )
    # Which request is next. `fair`: one of the organization that was served least. `arrival`: first
    # come, first served.
    order: Literal["fair", "arrival"] = setting(
        "WEIR_QUEUE_ORDER", "fair", one_of("fair", "arrival")
    )
    # How long the batch tier may wait behind interactive requests.
    batch_wait_max_s: float = setting("WEIR_QUEUE_BATCH_WAIT_MAX_S", 30.0, positive(86_400))


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Output on its way to clients."""

    # How many tokens of a request a client may leave unread before it counts as stalled. A slow
    # network leaves far fewer.
    unread_tokens_max: int = setting(
        "WEIR_OUTBOX_TOKENS_PER_REQUEST_MAX", 4096, whole(1, 1_000_000)
    )
    # How long a client may read nothing, or grant no credit, before its request ends with
    # `SLOW_CONSUMER`.
    stall_max_s: float = setting("WEIR_CLIENT_STALL_MAX_S", 60.0, positive(3600))
    # How fast a client must take waiting output, in tokens per second; it may lag by
    # WEIR_CLIENT_STALL_MAX_S. Reading and speech need three tokens per second.
    tokens_per_s_min: float = setting("WEIR_CLIENT_TOKENS_PER_SECOND_MIN", 1.0, positive(1000))
    # How long a request may go on without its client (`keep_on_disconnect`). It occupies an engine
    # all the while.
    keep_on_disconnect_max_s: float = setting(
        "WEIR_KEEP_ON_DISCONNECT_MAX_S", 600.0, positive(86_400)
    )
    # How many bytes of output are kept of a request whose client may come back: about 16,000
    # tokens.
    replay_bytes_per_request_max: int = setting(
        "WEIR_REPLAY_BYTES_PER_REQUEST_MAX", 2**20, whole(1024, 2**30)
    )
    # How many bytes of output a process keeps for all clients that may come back.
    replay_bytes_max: int = setting("WEIR_REPLAY_BYTES_MAX", 2**28, whole(2**16, 2**40))


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """The end of a process."""

    # How long running requests may go on after SIGTERM. Then they are stopped and settled.
    timeout_s: float = setting("WEIR_DRAIN_S", 30.0, positive(3600))
    # How long a process still accepts connections after SIGTERM, and reports that it drains, until
    # load balancers have noticed. Set it longer than two of their health checks. A process without
    # requests stays for as long.
    notice_s: float = setting("WEIR_DRAIN_NOTICE_S", 1.0, positive(3600))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an api process, by owner. Durations are in seconds, sizes in bytes."""

    listen: ListenSettings = field(default_factory=ListenSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    messages: MessageSettings = field(default_factory=MessageSettings)
    preparation: PreparationSettings = field(default_factory=PreparationSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    remote: RemoteDefaults = field(default_factory=RemoteDefaults)
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    # Where this machine keeps its usage journal, receipt key, connection file and packed weights.
    home: Path = field(
        default_factory=default_home, metadata={"variable": "WEIR_HOME", "parse": Path}
    )
    # Private key that signs receipts. Unset: `receipt-key.pem` of WEIR_HOME if it exists; `off`:
    # receipts are chained but not signed.
    receipt_key_file: str = setting("WEIR_RECEIPT_KEY_FILE", "", str)
    # Whether exports of receipts name end users and labels: `plain` names those not erased, with
    # the salts that prove them; `hashed` has the hashes only. Receipts are the same with both.
    receipt_subjects: str = setting("WEIR_RECEIPT_SUBJECTS", "plain", one_of("plain", "hashed"))
    # Let alert webhooks use http and private addresses.
    private_webhooks: bool = setting("WEIR_ALERT_WEBHOOKS_PRIVATE", False, truth)
    models: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineDefaults = field(default_factory=EngineDefaults)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    tensorrt: TensorRtDefaults = field(default_factory=TensorRtDefaults)
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    drain: DrainSettings = field(default_factory=DrainSettings)
    issuer: IssuerSettings = field(default_factory=IssuerSettings)

    @property
    def engine_directory(self) -> Path:
        """Directory of the engine workers of this machine."""
        return (
            Path(self.engine.directory).expanduser()
            if self.engine.directory
            else (self.home / "engines")
        )

    @property
    def packed_directory(self) -> Path:
        """Directory of packed weights: the same for all processes that share engine workers."""
        shared = self.engine_directory if self.engine.directory else self.home
        return shared / "packed"

    @property
    def journal_directory(self) -> Path:
        """Directory of this machine's usage journals."""
        return self.home / "journal"

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Build settings from values that are named as in `having`."""
        return cls().having(**values)

    def having(self, **values: Any) -> Settings:
        """Return settings with other values, named by variables in lower case without `WEIR_`.

        `having(lease_slice_tokens=64)` replaces the value of WEIR_LEASE_SLICE_TOKENS. Raises
        TypeError for a name that no setting has.
        """
        return changed(self, values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read all settings from the environment. Raises SettingInvalid naming the variable."""
        for name, remedy in REMOVED.items():
            if environment.get(variable := PREFIX + name):
                raise SettingInvalid(f"{variable} is not a setting any more: {remedy}")
        settings = read(cls, environment)
        if any(environment.get(variable) for variable in MODEL_VARIABLES):
            return settings
        return settings.having(encoders=bundled_encoders())

    def to_environment(self) -> dict[str, str]:
        """Convert the settings to environment variables that `from_environment` reads back."""
        return written(self)
