"""Engines on other machines, built from settings. They need `smg-grpc-proto`, which is imported here and only when one is built."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import grpc
import structlog

from api.core.setting_values import SettingInvalid
from api.core.settings import Settings, bundled_models
from inference.adapters.remote_settings import (
    RemoteSettings,
    Target,
    TlsFiles,
    parse_target,
)
from inference.engine import Encoder, Engine

FETCH_TIMEOUT_S = 30.0  # for a tokenizer of some ten MB; a server that loads its model does not answer yet

log = structlog.get_logger(__name__)


def build_remote_engines(settings: Settings) -> dict[str, Engine]:
    """One engine per model of WEIR_REMOTE_TARGETS. Raises: CheckpointInvalid, SettingInvalid."""
    if not settings.remote_targets:
        raise SettingInvalid("WEIR_ENGINE=remote needs WEIR_REMOTE_TARGETS, as in model=vllm://host:port")
    if settings.models != bundled_models() and (untargeted := sorted(set(settings.models) - set(settings.remote_targets))):
        raise SettingInvalid(f"WEIR_MODELS names {', '.join(untargeted)}, and WEIR_REMOTE_TARGETS does not say where that runs")
    return {name: build_remote_engine(settings, name, target) for name, target in settings.remote_targets.items()}


def build_remote_engine(settings: Settings, name: str, target: str, directory: Path | None = None) -> Engine:
    """One engine for one server. Raises: CheckpointInvalid, SettingInvalid."""
    wanted = remote_settings(settings, name, target, directory)
    from inference.adapters.remote_engine import RemoteEngine

    return RemoteEngine(wanted)


def build_remote_encoder(settings: Settings, name: str, target: str, directory: Path | None = None) -> Encoder:
    """One server that embeds. Raises: CheckpointInvalid, SettingInvalid."""
    wanted = remote_settings(settings, name, target, directory or settings.encoders.get(name))
    from inference.adapters.remote_encoder import RemoteEncoder

    return RemoteEncoder(wanted)


def remote_settings(settings: Settings, name: str, target_text: str, directory: Path | None = None) -> RemoteSettings:
    """How to use a server. directory: of the model's small files; None where WEIR_MODELS or the server itself has them.

    Raises: SettingInvalid.
    """
    if find_spec("smg_grpc_proto") is None:
        raise SettingInvalid(
            "WEIR_ENGINE=remote needs the package smg-grpc-proto, in a clone of the repository: "
            "pip install -e sdk/python -e '.[remote]'"
        )
    try:
        target, tls = parse_target(target_text), tls_files(settings)
    except ValueError as error:
        raise SettingInvalid(f"WEIR_REMOTE_TARGETS, WEIR_REMOTE_TLS_*: {error}") from error
    return RemoteSettings(
        directory=directory or settings.models.get(name) or fetched_directory(settings, name, target, tls),
        name=name,
        target=target,
        tls=tls,
        share_prefixes=settings.remote_share_prefixes,
        context_window_tokens_max=settings.remote_context_tokens or None,
        running_sequence_count_max=settings.remote_batch_max,
        waiting_sequence_count_max=settings.requests_per_process_max,
        first_token_timeout_s=settings.remote_first_token_s,
        inter_token_timeout_s=settings.remote_inter_token_s,
        probe_interval_s=settings.remote_probe_s,
    )


def tls_files(settings: Settings) -> TlsFiles | None:
    """The certificates; None without an authority. Raises: ValueError for parts that say nothing alone."""
    certificate, key = settings.remote_tls_certificate, settings.remote_tls_key
    if not settings.remote_tls_ca:
        if certificate or key or settings.remote_tls_name:
            raise ValueError("WEIR_REMOTE_TLS_CA is not set: without an authority there is no TLS")
        return None
    return TlsFiles(
        Path(settings.remote_tls_ca),
        Path(certificate) if certificate else None,
        Path(key) if key else None,
        settings.remote_tls_name,
    )


def fetched_directory(settings: Settings, name: str, target: Target, tls: TlsFiles | None) -> Path:
    """The model's small files from its server; those of the last time if it does not answer. Raises: SettingInvalid."""
    from inference.adapters.remote_connection import fetch_model_files
    from inference.adapters.remote_dialects import ServerUnfit

    directory = settings.home / "remote" / f"model-{quote(name, safe='')}"
    try:
        fetch_model_files(target, tls, directory, FETCH_TIMEOUT_S)
    except (ServerUnfit, grpc.RpcError) as error:
        said = str(error) if isinstance(error, ServerUnfit) else f"{error.code().name}: {error.details()}"
        if not directory.exists():
            raise SettingInvalid(
                f"WEIR_REMOTE_TARGETS: {target} does not give {name}'s tokenizer ({said}): "
                "start it first, or name the model's directory in WEIR_MODELS"
            ) from error
        log.warning("remote_tokenizer_kept", model=name, target=str(target), reason=said)
    return directory
