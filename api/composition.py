"""Parts of an api process, each made of the settings. `__main__.py` puts them together."""

from __future__ import annotations

import uuid
from pathlib import Path

import structlog

from api.access.auth import Authenticator
from api.access.shared_failures import SharedFailures
from api.access.tls import Tls
from api.console.console import ROOT, Console
from api.core.addresses import Proxies
from api.core.endpoint import base_url
from api.core.pace import FramePace
from api.core.setting_values import SettingInvalid
from api.core.settings import Settings
from api.generation.live_control import keep_out_of_use, obey, process_name, report, report_replicas
from api.generation.peers import Peer, PeerCertificates
from api.generation.process import Process
from api.metrics.operator_http import Probes
from api.observability.observer import Observer
from api.openai.door import Door
from api.openai.http_requests import Handle, visited
from api.openai.listener import Listener
from api.server import Servicers
from inference.routing.router import Router
from inference.safety.safety import SafetyRulesInvalid
from inference.safety.safety_file import Safety, read_safety
from inference.text.tokenizer import Tokenizer
from metering.control.control_channel import ControlChannel
from metering.core.errors import InvalidValue
from metering.holds.holds import HoldStore, UsageNotices
from metering.holds.journal import UsageJournal
from metering.holds.standing_holds import GraceTerms
from metering.receipts.signing import Signer, load_signer
from metering.store.db import Sessions, StoreGate
from metering.tenants.key_uses import KeyUses

log = structlog.get_logger(__name__)


def build_safety(settings: Settings) -> Safety:
    """What prompts and outputs are checked by, if anything. Raises: SettingInvalid naming the file and the rule."""
    if not settings.safety_rules:
        return Safety()
    try:
        return read_safety(Path(settings.safety_rules))
    except SafetyRulesInvalid as error:
        raise SettingInvalid(f"WEIR_SAFETY_RULES: {error}") from error


def load_tokenizers(router: Router, settings: Settings) -> dict[str, Tokenizer]:
    """By the names of the models. Raises: SettingInvalid, CheckpointInvalid."""
    directories = {backend.model.name: Path(backend.model.directory) for backend in router.backends()}
    formats = settings.tool_call_formats
    if unknown := sorted(formats.keys() - directories.keys()):
        raise SettingInvalid(f"WEIR_TOOL_CALL_FORMATS: no model is named {', '.join(unknown)}; known are {', '.join(directories)}")
    return {name: Tokenizer(directory, formats.get(name)) for name, directory in directories.items()}


def open_signer(settings: Settings) -> Signer | None:
    """What signs receipts, if anything. Raises: SettingInvalid."""
    try:
        signer = load_signer(settings.to_environment())
    except InvalidValue as error:
        raise SettingInvalid(str(error)) from error
    log.info("receipts_signed", key_id=signer.key_id) if signer else log.info("receipts_not_signed")
    return signer


def open_holds(
    settings: Settings, journal: UsageJournal, gate: StoreGate, signer: Signer | None, notices: UsageNotices, observer: Observer
) -> HoldStore:
    """The holds of this process, under the deployment's policy for a database that is away."""
    terms = GraceTerms(settings.grace_holds_per_key, settings.grace_input_tokens, settings.lease_slice_tokens)
    return HoldStore(
        settings.database_url,
        journal.owner_id,
        expiry_s=settings.hold_expiry_s,
        answer_wait_s=settings.store_answer_wait_s,
        gate=gate,
        grace=(terms, journal.bindings) if settings.store_away_policy == "grace" else None,
        signer=signer,
        used=notices.used,
        measured=observer.batches.measured,
    )


def open_door(settings: Settings, sessions: Sessions, uses: KeyUses, pace: FramePace) -> Authenticator:
    """Authentication, under the same policy. uses: told of each key that is used. pace: of the calls of each key."""
    grace_s = settings.hold_expiry_s if settings.store_away_policy == "grace" else 0.0
    return Authenticator(
        sessions,
        answer_wait_s=settings.store_answer_wait_s,
        grace_s=grace_s,
        failures_per_minute=settings.auth_failures_per_minute,
        used=uses.note,
        proxies=Proxies(settings.proxy_networks()),
        pace=pace,
    )


def open_control(
    settings: Settings, owner_id: uuid.UUID, peer: Peer, accepted: PeerCertificates, process: Process, authenticator: Authenticator
) -> ControlChannel:
    """The channel on which other processes tell this one whom to end, and ask what it runs."""
    return ControlChannel(
        settings.database_url,
        owner_id,
        process_name(),
        peer=(peer.address, peer.certificate),
        peers=accepted.replace,
        stop=lambda order: obey(process, authenticator, order),
        report=lambda: report(process),
        drain=lambda orders: keep_out_of_use(process, orders),
        report_replicas=lambda: report_replicas(process),
        gossip=SharedFailures(authenticator.throttle, owner_id),
    )


def openai_url(settings: Settings, listener: Listener, tls: Tls | None) -> str:
    """Bind the door for OpenAI's clients, if there is to be one; its base URL, else nothing. Raises: OSError."""
    address = settings.openai_address()
    return "" if address is None else base_url(address[0], listener.bind(address), tls=tls is not None)


def http_handle(
    settings: Settings, process: Process, authenticator: Authenticator, sessions: Sessions, servicers: Servicers, probes: Probes
) -> Handle:
    """Return the handler of the HTTP port: health checks, OpenAI's API, and the console unless it is switched off."""
    door = Door(process, authenticator, sessions).handle
    if not settings.console:
        return probes.before(visited(door, process.pace))
    capacity, stall_max_s = process.admission.capacity, settings.client_stall_max_s
    console = Console(
        servicers,
        authenticator,
        door,
        observer=process.observer,
        is_draining=lambda: capacity.is_draining,
        stall_max_s=stall_max_s,
    )
    return probes.before(visited(console.handle, process.pace))


def console_url(settings: Settings, openai_url: str) -> str:
    """Where the console is for somebody on this machine; nothing if there is none."""
    return f"{openai_url.removesuffix('/v1')}{ROOT}/" if openai_url and settings.console else ""
