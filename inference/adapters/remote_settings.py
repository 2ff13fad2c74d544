"""Where a remote engine is, how its connection is secured, and every bound and wait around it. Imports no gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference.adapters.external_core import Handling


class Service(StrEnum):
    """Which of the two services a server speaks; the values are the schemes of target addresses."""

    TRTLLM = "trtllm"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Target:
    """One server. address: host:port, as gRPC takes it."""

    service: Service
    address: str

    def __str__(self) -> str:
        return f"{self.service.value}://{self.address}"


def parse_target(text: str) -> Target:
    """From `trtllm://host:port` or `vllm://host:port`. Raises: ValueError with what would do."""
    scheme, separator, address = text.partition("://")
    host, _, port = address.rpartition(":")
    if not separator or scheme not in set(Service) or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} must be trtllm://host:port or vllm://host:port")
    return Target(Service(scheme), address)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. authority: whose certificate the server must have. certificate, key: ours, for servers that ask (mTLS); both or
    none. server_name: what the server's certificate is made out to, where that is not the target's host.
    """

    authority: Path
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for half of a client certificate."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client certificate needs its key, and the key its certificate")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How to use one server. Durations in seconds.

    directory: the checkpoint's config.json, tokenizer.json and chat template on this machine; its weights are not needed.
    share_prefixes: whether a prefix cached for one tenant may serve others; otherwise a server that does it is not used.
    running_sequence_count_max: so many are sent at once, fewer if the server takes fewer; the others wait here by rank. Of texts
    to embed `waiting_token_count_max` may wait.

    connect_timeout_s: for all that is asked before the first request. call_timeout_s: for each small call afterwards.
    poll_interval_s: between looks at the server's health and load. probe_interval_s: between looks whether it has begun to share
    prefixes of tenants, each of two prompts of its own. first_token_timeout_s, inter_token_timeout_s: silence of one
    sequence after which it, or the server, is taken for stuck. block_tokens: how many tokens the server caches as one, if it does
    not say; 0 is its default. abort_drain_s: see `Handling`.
    """

    directory: Path
    name: str
    target: Target
    tls: TlsFiles | None = None
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
        """Raises ValueError for bounds that nothing fits."""
        for name in ("running_sequence_count_max", "waiting_sequence_count_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def handling(settings: RemoteSettings) -> Handling:
    """What the service is known to bear: TensorRT-LLM has hung when aborted in prefill, and crashed beside log-probabilities
    (NVIDIA/TensorRT-LLM#10810); orphaned blocks of its cache make every answer end at once (#12933).
    """
    is_vllm = settings.target.service is Service.VLLM
    return Handling(
        abort_prefill=is_vllm,
        abort_with_logprobs=is_vllm,
        abort_drain_s=settings.abort_drain_s,
        empty_answer_count_max=0 if is_vllm else 16,
    )
