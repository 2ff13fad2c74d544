"""Settings of one api process, read from the environment once.

Every bound that protects the service stands here with its reason. Invalid values are refused at start, by name.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from api.remote_settings import RemoteEngineSettings
from api.setting_values import SettingInvalid as SettingInvalid  # told to whoever reads settings
from api.setting_values import Unshown, one_of, postgres_url, scale, seconds, setting, truth, whole
from inference.text.tools import MODEL_CALL_FORMATS, CallFormat
from metering.billing.invoice_document import Issuer, shown_by_helvetica

DEMO_MODEL_NAME = "demo"
TEXT_CHARS_MAX = 1000  # of a letterhead: more would push the invoice off its own page
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0  # beyond these a tenant would as good as stand still, or alone


def paths_by_name(text: str) -> dict[str, Path]:
    """Parser of `name=directory` pairs, separated by commas."""
    models = {}
    for pair in filter(None, text.split(",")):
        name, _, directory = pair.partition("=")
        if not name or not directory:
            raise ValueError("must be name=directory pairs separated by commas")
        models[name] = Path(directory)
    return models


def call_formats(text: str) -> dict[str, CallFormat]:
    """Parser of `name=format` pairs, separated by commas."""
    formats = {}
    for pair in filter(None, text.split(",")):
        name, _, form = pair.partition("=")
        if not name or form not in MODEL_CALL_FORMATS:
            raise ValueError(f"must be name=format pairs separated by commas, each format one of {', '.join(MODEL_CALL_FORMATS)}")
        formats[name] = CallFormat(form)
    return formats


def weights_by_id(text: str) -> dict[str, float]:
    """Parser of `id=weight` pairs, separated by commas."""
    weights = {}
    for pair in filter(None, text.split(",")):
        key, _, weight = pair.partition("=")
        try:
            weights[str(uuid.UUID(key))] = float(weight)
        except ValueError:
            raise ValueError("must be organization-id=weight pairs separated by commas") from None
        if not WEIGHT_MIN <= weights[str(uuid.UUID(key))] <= WEIGHT_MAX:
            raise ValueError(f"a weight must be between {WEIGHT_MIN} and {WEIGHT_MAX}")
    return weights


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


@dataclass(frozen=True, slots=True)
class Settings(RemoteEngineSettings):
    """Everything that an api process can be told. Durations in seconds, sizes in bytes."""

    database_url: str = setting("WEIR_DATABASE_URL", "", postgres_url)
    home: Path = field(default_factory=default_home, metadata={"variable": "WEIR_HOME", "parse": Path})
    models: Mapping[str, Path] = field(default_factory=bundled_models, metadata={"variable": "WEIR_MODELS", "parse": paths_by_name})
    # How models write tool calls, as name=hermes, =llama or =mistral, separated by commas; others write as their templates show.
    tool_call_formats: Mapping[str, CallFormat] = field(
        default_factory=dict, metadata={"variable": "WEIR_TOOL_CALL_FORMATS", "parse": call_formats}
    )
    # Models that embed, in the layout of sentence-transformers.
    encoders: Mapping[str, Path] = field(default_factory=dict, metadata={"variable": "WEIR_ENCODERS", "parse": paths_by_name})
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
    # "simulated" computes nothing and takes the time of `inference.core.cost_model`: for load tests, every answer says so.
    engine_device: Literal["cpu", "cuda", "simulated"] = setting("WEIR_ENGINE_DEVICE", "cpu", one_of("cpu", "cuda", "simulated"))
    simulated_time_scale: float = setting("WEIR_SIMULATED_TIME_SCALE", 1.0, scale(1000))  # 0: no time passes
    engine_thread_count: int = setting("WEIR_ENGINE_THREADS", 0, whole(0, 1024))  # 0: as many as there are cores
    kv_cache_bytes: int = setting("WEIR_KV_CACHE_BYTES", 2**30, whole(2**20, 2**44))  # reserved, used as far as needed

    # Of each model's engine: 0 replicas leaves it cold until a request comes. More are kept loaded whatever happens.
    min_replicas: int = setting("WEIR_MIN_REPLICAS", 1, whole(0, 64))
    # More than the least are started when all that run are full for some seconds, as far as there is free memory.
    max_replicas: int = setting("WEIR_MAX_REPLICAS", 1, whole(1, 64))
    # Without a request for so long, an engine that need not be kept is stopped and gives its memory back. 0: never.
    model_idle_timeout_s: float = setting("WEIR_MODEL_IDLE_TIMEOUT_S", 0.0, scale(86_400))
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
    tensorrt_kv_cache_fraction: float = setting("WEIR_TENSORRT_KV_CACHE_FRACTION", 0.9, scale(0.99))
    # Aborts during prefill have hung engines: "running" puts them off until the first token. "never" lets cancelled ones run out.
    tensorrt_abort: Literal["running", "always", "never"] = setting(
        "WEIR_TENSORRT_ABORT", "running", one_of("running", "always", "never")
    )
    # Refused unless empty: TensorRT-LLM 1.2.1 accepts adapters and answers with the base model.
    lora_adapters: str = setting("WEIR_LORA_ADAPTERS", "", str)
    # A file of models, replicas, aliases and regions, in the place of WEIR_MODELS; `docs/fleet.md` has its keys.
    fleet_file: str = setting("WEIR_FLEET", "", str)
    # Where this process runs: one of the regions of that file. Requests that name no region prefer it.
    region: str = setting("WEIR_REGION", "", str)

    # The first slice covers most answers without a second write; extensions come in the same size.
    lease_slice_tokens: int = setting("WEIR_LEASE_SLICE_TOKENS", 128, whole(1, 65_536))
    # Below this an answer would end before it says anything: better refused than started.
    lease_least_tokens: int = setting("WEIR_LEASE_LEAST_TOKENS", 16, whole(1, 65_536))
    # Asked for when so few leased tokens are left: covers the commit at decode speeds up to thousands of tokens/s.
    lease_margin_tokens: int = setting("WEIR_LEASE_MARGIN_TOKENS", 32, whole(0, 65_536))
    hold_expiry_s: float = setting("WEIR_HOLD_EXPIRY_S", 60.0, seconds(3600))

    # While PostgreSQL is away: "closed" refuses new requests; "grace" lets in those for which holds were set aside before, until
    # these expire. No limit is exceeded in either.
    store_away_policy: Literal["closed", "grace"] = setting("WEIR_STORE_AWAY_POLICY", "closed", one_of("closed", "grace"))
    # Longer than a commit ever takes, shorter than clients wait for a first token.
    store_answer_wait_s: float = setting("WEIR_STORE_ANSWER_WAIT_S", 5.0, seconds(60))
    # A restart of the database is over by then, and a load balancer need not move everybody because of it.
    store_away_health_s: float = setting("WEIR_STORE_AWAY_HEALTH_S", 5.0, seconds(3600))
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
    queue_weights: Mapping[str, float] = field(
        default_factory=dict, metadata={"variable": "WEIR_QUEUE_WEIGHTS", "parse": weights_by_id}
    )
    # While interactive requests wait, one of the batch tier gets its turn each so often: rarely enough not to be noticed.
    queue_batch_wait_max_s: float = setting("WEIR_QUEUE_BATCH_WAIT_MAX_S", 30.0, seconds(86_400))
    # What a client may leave unread per request before it is taken for stalled: far beyond what a network delays.
    outbox_tokens_per_request_max: int = setting("WEIR_OUTBOX_TOKENS_PER_REQUEST_MAX", 4096, whole(1, 1_000_000))
    # A client that reads nothing for so long has gone, whatever its connection says.
    client_stall_max_s: float = setting("WEIR_CLIENT_STALL_MAX_S", 60.0, seconds(3600))
    # Generation that nobody receives costs an engine all the same; a client that is gone for longer seldom comes back.
    keep_max_s: float = setting("WEIR_KEEP_MAX_S", 600.0, seconds(86_400))
    # Of output that is kept for clients that may come back: for each request some 16,000 tokens, and in all of them together.
    kept_bytes_per_request_max: int = setting("WEIR_KEPT_BYTES_PER_REQUEST_MAX", 2**20, whole(1024, 2**30))
    kept_bytes_max: int = setting("WEIR_KEPT_BYTES_MAX", 2**28, whole(2**16, 2**40))
    progress_interval_s: float = setting("WEIR_PROGRESS_INTERVAL_S", 0.5, seconds(60))
    cold_start_wait_s: float = setting("WEIR_COLD_START_WAIT_S", 120.0, seconds(3600))
    drain_s: float = setting("WEIR_DRAIN_S", 30.0, seconds(3600))
    # After SIGTERM a process that runs requests listens for so long, and says that it drains: until load balancers have noticed.
    # Then it takes no more connections, and those that it has are to be made elsewhere for new calls.
    drain_notice_s: float = setting("WEIR_DRAIN_NOTICE_S", 1.0, seconds(3600))
    recovery_interval_s: float = setting("WEIR_RECOVERY_INTERVAL_S", 5.0, seconds(3600))

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

    @property
    def journal_directory(self) -> Path:
        """Where usage journals of this machine's processes live."""
        return self.home / "journal"

    def issuer(self) -> Issuer:
        """The letterhead. Raises: SettingInvalid if it has letters that no font is given for, or the font cannot be read."""
        for variable, text in (
            ("WEIR_ISSUER_NAME", self.issuer_name),
            ("WEIR_ISSUER_ADDRESS", self.issuer_address),
            ("WEIR_ISSUER_TAX_ID", self.issuer_tax_id),
            ("WEIR_ISSUER_CONTACT", self.issuer_contact),
            ("WEIR_ISSUER_PAYMENT", self.issuer_payment),
        ):
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
