"""Address, key, TLS files, limits and timeouts of a remote engine. Imports no gRPC.

A key is read from a file, sent as a header, and never shown: a server's text may repeat it, so
every such text passes through `masked`.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.settings import pairs, positive, setting, truth, whole
from inference.adapters.external_queue import AbortLimits

# Message to clients about a server that cannot be used: the reason may name addresses.
LOSS_MESSAGE = "its server cannot be used now; operators find the reason in the log"
TARGET_FORM = (
    "must be trtllm://host:port, vllm://host:port or sglang://host:port, or"
    " openai+http://host:port or openai+https://host:port, both optionally with /model"
)
AUTHORIZATION = "authorization"
KEY_BYTES_MAX = 8 << 10
SECRET_CHARS_MIN = 4  # shorter ones would be masked in ordinary words
# Headers that the clients write, or that have a meaning for a connection.
_RESERVED = re.compile(
    r"grpc-.*|.*-bin|accept-encoding|connection|content-.*|expect|host|te|trailer|"
    r"transfer-encoding|upgrade|user-agent|x-request-id|x-tenant-id"
)
_HEADER = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Service(StrEnum):
    """Kind of server; the values are the schemes of target addresses."""

    TRTLLM = "trtllm"
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI_HTTP = "openai+http"
    OPENAI_HTTPS = "openai+https"

    @property
    def is_http(self) -> bool:
        return self in (Service.OPENAI_HTTP, Service.OPENAI_HTTPS)


@dataclass(frozen=True, slots=True)
class Target:
    """Address of one server as host:port. `model` is the model's name on an HTTP server, if it
    differs from the name that Weir serves. `name` is the host:port of which `address` is one of
    several addresses; empty if there is none.
    """

    service: Service
    address: str
    model: str = ""
    name: str = ""

    def __str__(self) -> str:
        path = f"/{self.model}" if self.model else ""
        return f"{self.service.value}://{self.address}{path}"


def parse_target(text: str) -> Target:
    """Parse an address such as `vllm://host:port`. Raises ValueError, with `TARGET_FORM`."""
    scheme, separator, rest = text.partition("://")
    address, slash, model = rest.partition("/")
    host, _, port = address.rpartition(":")
    if (
        not separator
        or scheme not in set(Service)
        or not host
        or not port.isdecimal()
        or not 0 < int(port) < 1 << 16
        or (slash and not (Service(scheme).is_http and model))
    ):
        raise ValueError(f"{text!r} {TARGET_FORM}")
    return Target(Service(scheme), address, model)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. `authority` is the CA of the server's certificate; `certificate` and
    `key` are the client's for mTLS, both or neither.

    `server_name` is the name in the server's certificate, if it is not the target's host.
    """

    authority: Path
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError if only one of certificate and key is set."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client certificate needs its key, and the key its certificate")


targets_by_name = pairs("name=value pairs", str)
files_by_name = pairs("model=file pairs", Path)


@dataclass(frozen=True, slots=True)
class RemoteDefaults:
    """Settings that all remote servers of a process share, and the servers without a fleet file."""

    # With WEIR_ENGINE=remote: `model=address` pairs, separated by commas. An address is
    # `trtllm://host:port`, `vllm://host:port`, `sglang://host:port` (all gRPC), or
    # `openai+http://host:port` (or `openai+https`), optionally with `/` and the name of a model.
    # WEIR_MODELS names the directories with config, tokenizer and chat template; those of other
    # models are fetched from the server, over gRPC only.
    targets: Mapping[str, str] = setting("WEIR_REMOTE_TARGETS", dict, targets_by_name)
    # The same as WEIR_REMOTE_TARGETS, for embedding models. If the server does not provide the
    # files, name their directory in WEIR_ENCODERS.
    encoders: Mapping[str, str] = setting("WEIR_REMOTE_ENCODERS", dict, targets_by_name)
    # `model=file` pairs: each file has the key of the model's server in WEIR_REMOTE_TARGETS or
    # WEIR_REMOTE_ENCODERS, in one line. Only its owner and group may have access. It is read again
    # when it changes.
    key_files: Mapping[str, Path] = setting("WEIR_REMOTE_KEY_FILES", dict, files_by_name)
    # Header of the keys: `authorization` (sent as `Bearer KEY`, or with the scheme in the file), or
    # another one, such as `api-key`, which has the content of the file.
    key_header: str = setting("WEIR_REMOTE_KEY_HEADER", "authorization", str)
    # Use servers even if they share cached prefixes between tenants. Without it, vLLM over gRPC
    # must run without its prefix cache.
    share_prefixes: bool = setting("WEIR_REMOTE_SHARE_PREFIXES", False, truth)
    # How many sequences a process runs in one remote server. Any more wait here, ordered by rank. A
    # server may allow fewer.
    batch_max: int = setting("WEIR_REMOTE_BATCH_MAX", 256, whole(1, 65_536))
    # Context window that clients can use; 0: that of the checkpoint. A server with a smaller window
    # is not used.
    context_tokens: int = setting("WEIR_REMOTE_CONTEXT_TOKENS", 0, whole(0, 100_000_000))
    # How long a remote sequence may take to its first token before it counts as stuck. Allow for a
    # long prompt that waits behind many others.
    first_token_s: float = setting("WEIR_REMOTE_FIRST_TOKEN_S", 120.0, positive(3600))
    # How long a remote sequence may take from token to token before it counts as stuck. If the
    # server sends the answer whole, it has this time for each token of the answer, after that for
    # the first one.
    inter_token_s: float = setting("WEIR_REMOTE_INTER_TOKEN_S", 30.0, positive(3600))
    # How often Weir tests whether a server shares prefixes between tenants. Each test computes two
    # prompts of 513 tokens.
    probe_s: float = setting("WEIR_REMOTE_PROBE_S", 600.0, positive(86_400))
    # PEM file with the CAs of remote servers. Enables TLS for their gRPC connections. Without it,
    # `openai+https` uses the CAs of the system.
    tls_ca: str = setting("WEIR_REMOTE_TLS_CA", "", str)
    # PEM file with the client certificate for remote servers (mTLS).
    tls_certificate: str = setting("WEIR_REMOTE_TLS_CERTIFICATE", "", str)
    # PEM file with the private key of WEIR_REMOTE_TLS_CERTIFICATE.
    tls_key: str = setting("WEIR_REMOTE_TLS_KEY", "", str)
    # Name in the certificates of the remote servers, if it is not the host of the target.
    tls_name: str = setting("WEIR_REMOTE_TLS_NAME", "", str)

    def tls(self) -> TlsFiles | None:
        """Return the TLS files for remote servers; None without a CA.

        Raises ValueError if other TLS settings are set without a CA.
        """
        certificate, key = self.tls_certificate, self.tls_key
        if not self.tls_ca:
            if certificate or key or self.tls_name:
                raise ValueError(
                    "WEIR_REMOTE_TLS_CA is not set: TLS requires a certificate authority"
                )
            return None
        return TlsFiles(
            Path(self.tls_ca),
            Path(certificate) if certificate else None,
            Path(key) if key else None,
            self.tls_name,
        )


_secrets: deque[str] = deque(maxlen=256)  # of all files, with those before rotations
_log = logging.getLogger("weir.inference.adapters")


def masked(text: str) -> str:
    """Replace the keys that were read in a text."""
    for secret in _secrets:
        text = text.replace(secret, "[key]")
    return text


def key_header(name: str) -> str:
    """Validate the name of a key's header and convert it to lower case. Raises: ValueError."""
    lower = name.lower()
    if not _HEADER.fullmatch(lower) or _RESERVED.fullmatch(lower):
        raise ValueError("must be the name of a header for a key, such as authorization or api-key")
    return lower


class KeyUnusable(ValueError):
    """A key cannot be used. The message names the file and the remedy, never the content."""


class KeyFile:
    """API key for a server, read from a file, and again when the file changes.

    It is sent in `authorization` as `Bearer KEY`, unless the file names a scheme, as in `Basic
    KEY`; any other header has the content of the file. If a change cannot be used, the last key
    stays, since the file may have been half written.
    """

    def __init__(self, path: Path, header: str = AUTHORIZATION) -> None:
        """Create without reading the file. Raises ValueError for an invalid header."""
        self.path = path
        self._header = key_header(header)
        self._version: tuple[int, ...] | None = None  # of the file when it was read
        self._value = ""

    def header(self) -> dict[str, str]:
        """Build the header with the current key. Raises KeyUnusable if there never was one."""
        version: tuple[int, ...]
        try:
            found = os.stat(self.path)
            version = (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)
        except OSError:
            version = ()  # reading it says why
        if version != self._version or not self._value:
            self._version = version
            try:
                self._value = self._read()
            except KeyUnusable as error:
                if not self._value:
                    raise
                _log.warning("the last key is used on: %s", error)
        return {self._header: self._value}

    def _read(self) -> str:
        try:
            with open(self.path, "rb", opener=_without_waiting) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise KeyUnusable(f"{self.path} is not a regular file: write the key into one")
                if mode & stat.S_IRWXO:
                    raise KeyUnusable(
                        f"{self.path} has mode {stat.S_IMODE(mode):04o}, so that every user of this"
                        " machine has access: run chmod 600 (Kubernetes: `defaultMode: 0440` and an"
                        " `fsGroup`)"
                    )
                content = file.read(KEY_BYTES_MAX + 1)
        except OSError as error:
            raise KeyUnusable(f"{self.path} cannot be read: {error.strerror}") from error
        key = content.decode("ascii", errors="replace").strip()
        if not key:
            raise KeyUnusable(f"{self.path} is empty: write the key into it")
        if len(content) > KEY_BYTES_MAX or not (key.isascii() and key.isprintable()):
            raise KeyUnusable(
                f"{self.path} must have one line of at most {KEY_BYTES_MAX} printable ASCII"
                " characters"
            )
        secret = key.rpartition(" ")[2]
        if len(secret) >= SECRET_CHARS_MIN and secret not in _secrets:
            _secrets.append(secret)
        return f"Bearer {key}" if self._header == AUTHORIZATION and secret == key else key


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe without a writer


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of one remote server. Durations are in seconds. `key` is sent with every request.

    `directory` is a local directory with config.json, tokenizer.json and chat template; weights are
    not needed. `share_prefixes` allows tenants to share cached prefixes; if False, a server that
    shares them is rejected. At most `running_sequence_count_max` sequences are sent at once, or
    fewer if the server takes fewer; the rest wait here, ordered by rank. `waiting_token_count_max`
    limits the queued tokens of texts to embed.

    `connect_timeout_s` limits all checks before the first request together, `call_timeout_s` each
    small call afterwards. Health and load are polled every `poll_interval_s`; prefixes shared by
    tenants are probed for every `probe_interval_s`, with two prompts. A sequence, or the server,
    counts as stuck after a silence of `first_token_timeout_s` or `inter_token_timeout_s`.
    `block_tokens` is the number of tokens per cache block if the server does not report it, 0 for
    its default. For `abort_drain_s` see `AbortLimits`.
    """

    directory: Path
    name: str
    target: Target
    tls: TlsFiles | None = None
    key: KeyFile | None = None
    share_prefixes: bool = False
    context_window_tokens_max: int | None = None
    running_sequence_count_max: int = 256
    waiting_sequence_count_max: int = 2048
    waiting_token_count_max: int = 1 << 20
    connect_timeout_s: float = 30.0
    call_timeout_s: float = 5.0
    poll_interval_s: float = 5.0
    probe_interval_s: float = 600.0
    first_token_timeout_s: float = 120.0
    inter_token_timeout_s: float = 30.0
    block_tokens: int = 0
    abort_drain_s: float = 1.5
    close_timeout_s: float = 10.0
    restart_delay_s_min: float = 0.5
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for counts below 1."""
        for name in ("running_sequence_count_max", "waiting_sequence_count_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def abort_limits(settings: RemoteSettings) -> AbortLimits:
    """Choose the limits on aborts for a service. TensorRT-LLM has hung when aborted in prefill, and
    crashed with log-probabilities (NVIDIA/TensorRT-LLM#10810); orphaned cache blocks make every
    output empty (#12933).
    """
    is_fragile = settings.target.service is Service.TRTLLM
    return AbortLimits(
        abort_prefill=not is_fragile,
        abort_with_logprobs=not is_fragile,
        abort_drain_s=settings.abort_drain_s,
        empty_answer_count_max=16 if is_fragile else 0,
    )
