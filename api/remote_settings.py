"""Settings of engines on other machines: where they are, how the way there is secured, and what is borne of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from api.door_settings import DoorSettings
from api.setting_values import seconds, setting, truth, whole


def values_by_name(text: str) -> dict[str, str]:
    """Parser of `name=value` pairs, separated by commas."""
    values: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError("must be name=value pairs separated by commas")
        if name in values:
            raise ValueError(f"names {name} twice; a file named by WEIR_FLEET gives a model several engines")
        values[name] = value
    return values


@dataclass(frozen=True, slots=True)
class RemoteEngineSettings(DoorSettings):
    """With WEIR_ENGINE=remote. A link in the chain that `Settings` is made of."""

    # model=trtllm://host:port or model=vllm://host:port, separated by commas. WEIR_MODELS names the directory with a model's
    # config.json, tokenizer.json and chat template; where it does not, the server is asked for them.
    remote_targets: Mapping[str, str] = field(
        default_factory=dict, metadata={"variable": "WEIR_REMOTE_TARGETS", "parse": values_by_name}
    )
    # The same for models that embed. WEIR_ENCODERS names a directory where the server cannot be asked for the files.
    remote_encoders: Mapping[str, str] = field(
        default_factory=dict, metadata={"variable": "WEIR_REMOTE_ENCODERS", "parse": values_by_name}
    )
    # Otherwise a server that serves prefixes of one tenant to another is not used: vLLM has to run without its prefix cache then.
    remote_share_prefixes: bool = setting("WEIR_REMOTE_SHARE_PREFIXES", False, truth)
    # Sequences of one process in one server; more wait here, where their rank counts. A server may allow less.
    remote_batch_max: int = setting("WEIR_REMOTE_BATCH_MAX", 256, whole(1, 65_536))
    # Promised to clients; 0: the checkpoint's. A server whose own is smaller is not used.
    remote_context_tokens: int = setting("WEIR_REMOTE_CONTEXT_TOKENS", 0, whole(0, 100_000_000))
    # Silence of a sequence that shows that it, or its server, is stuck: the first covers a long prompt behind many others.
    remote_first_token_s: float = setting("WEIR_REMOTE_FIRST_TOKEN_S", 120.0, seconds(3600))
    remote_inter_token_s: float = setting("WEIR_REMOTE_INTER_TOKEN_S", 30.0, seconds(3600))
    # Between looks whether a server has begun to share prefixes of tenants, each of which has it compute two prompts of 513 tokens.
    remote_probe_s: float = setting("WEIR_REMOTE_PROBE_S", 600.0, seconds(86_400))
    # PEM files. With an authority the way is TLS; with certificate and key besides, servers see who asks (mTLS).
    remote_tls_ca: str = setting("WEIR_REMOTE_TLS_CA", "", str)
    remote_tls_certificate: str = setting("WEIR_REMOTE_TLS_CERTIFICATE", "", str)
    remote_tls_key: str = setting("WEIR_REMOTE_TLS_KEY", "", str)
    # What the servers' certificates are made out to, where that is not the host of the target.
    remote_tls_name: str = setting("WEIR_REMOTE_TLS_NAME", "", str)
