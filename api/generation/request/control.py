"""Control commands of other processes that stop requests here, and reports on running requests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from api.access.auth import (
    KEY_REVOKED,
    SECRET_REPLACED,
    TOKEN_REVOKED,
    Authenticator,
    BindingChange,
    SuspensionChange,
)
from api.core.errors import AddressNotAllowed, BoundToRegion, CancelledByAdmin, KeyRevokedMidway
from api.generation.request.phases import (
    STREAMING,
    AdmittedGeneration,
    Asking,
    Held,
    Loading,
    Queued,
    Received,
)
from api.generation.request.registry import RequestRegistry, Running
from metering.control.live import CancelCommand, DrainCommand
from metering.core.models import Outcome
from metering.tenants.networks import allows, networks_of


def process_name() -> str:
    """Return the name of this process in reports: "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"


def apply_command(
    registry: RequestRegistry, authenticator: Authenticator, command: CancelCommand
) -> None:
    """Stop the requests that a command names; settle their output and send the reason."""
    if command.owner_id is not None and command.bound_region is not None:
        binding = BindingChange(command.owner_id, command.bound_region, authenticator.region)
        apply_binding(registry, authenticator, binding)
        return
    if command.owner_id is not None:
        change = SuspensionChange(
            command.owner_id, command.reason, command.suspended_by_operator, command.closes
        )
        apply_suspension(registry, authenticator, change)
        return
    networks = networks_of(command.allowed_networks)
    for request in registry.running():
        payer, address = request.caller.payer, request.caller.address
        if command.api_key_id is not None and payer.api_key_id == command.api_key_id:
            request.stop(Outcome.CANCELLED, KeyRevokedMidway(KEY_REVOKED))
        elif (
            command.changed_key_id == payer.api_key_id
            and not request.caller.credentials.isdisjoint(command.ended_secrets)
        ):
            ended = TOKEN_REVOKED if request.caller.token else SECRET_REPLACED
            request.stop(Outcome.CANCELLED, KeyRevokedMidway(ended))
        elif command.changed_key_id == payer.api_key_id and not allows(networks, address):
            request.stop(Outcome.CANCELLED, AddressNotAllowed(address))
        elif (payer.project_id, request.start.request_id) == (
            command.project_id,
            command.request_id,
        ):
            why = f": {command.reason}" if command.reason else ""
            request.stop(
                Outcome.CANCELLED,
                CancelledByAdmin(
                    f"An administrator has ended your request{why}. Ask them before you send it"
                    " again."
                ),
            )
    if command.api_key_id is not None:
        authenticator.changed(command.api_key_id, is_revoked=True)
    if command.changed_key_id is not None:
        authenticator.changed(command.changed_key_id, networks, command.ended_secrets)


def apply_suspension(
    registry: RequestRegistry, authenticator: Authenticator, change: SuspensionChange
) -> None:
    """Stop the requests of an organization or project if it was suspended or closed."""
    for request in registry.running():
        if (refusal := change.refusal_of(request.caller.payer)) is not None:
            request.stop(Outcome.CANCELLED, refusal)
    authenticator.owner_changed(change)


def apply_binding(
    registry: RequestRegistry, authenticator: Authenticator, change: BindingChange
) -> None:
    """Stop the requests of an organization that began before it was bound to this region.

    In the region too: their engines may be elsewhere.
    """
    registry.bindings[change.owner_id.int] = change.region
    for request in registry.running():
        caller = request.caller
        if (
            change.region not in ("", caller.region)
            and caller.payer.organization_id == change.owner_id
        ):
            refusal = BoundToRegion(change.region, change.server_region)
            request.stop(Outcome.CANCELLED, refusal)
    authenticator.owner_changed(change)


def apply_drains(registry: RequestRegistry, commands: Sequence[DrainCommand]) -> None:
    """Drain exactly the replicas that the commands name; move requests off those that say so."""
    drained: dict[str, list[str]] = {}
    for command in commands:
        drained.setdefault(command.model, []).append(command.replica)
    registry.router.drain(drained)
    for command in commands:
        if command.is_moving:
            registry.router.move_out(command.model, command.replica)


def report_replicas(registry: RequestRegistry) -> list[dict[str, Any]]:
    """Describe this process's replicas, with the columns that `metering/control/live.py` reads."""
    return [
        {
            "model": served,
            "replica": replica.name,
            "region": replica.region,
            "state": replica.state.value,
            "reason": replica.reason,
            "is_drained": replica.is_drained,
            "request_count": replica.live_sequence_count,
            "outstanding_token_count": replica.outstanding_token_count,
        }
        for served, replica in registry.router.reports()
    ]


def report(registry: RequestRegistry) -> list[dict[str, Any]]:
    """Describe each running request, with the columns that `metering/control/live.py` reads."""
    now = time.monotonic()
    return [record(request, now) for request in registry.running()]


def live_phases(registry: RequestRegistry) -> list[tuple[str, str]]:
    """Return model and phase of each running and waiting request."""
    return [(model_of(request), request.phase.name) for request in registry.running()]


def model_of(request: Running) -> str:
    """Return the model of a request; empty before routing, when clients can have sent any text."""
    return "" if isinstance(request.phase, Received) else request.start.model


def record(request: Running, now: float) -> dict[str, Any]:
    """Describe one request without its content. `now` is on the monotonic clock."""
    payer, usage, phase = request.caller.payer, request.usage, request.phase
    return {
        "hold_id": str(phase.admitted.hold_id) if isinstance(phase, Held) else None,
        "request_id": str(request.start.request_id),
        "organization_id": str(payer.organization_id),
        "project_id": str(payer.project_id),
        "api_key_id": str(payer.api_key_id),
        "model": model_of(request),
        "phase": phase_word(request),
        "age_s": now - request.caller.received_at,
        "input_token_count": usage.input_token_count,
        "waiting_token_count": waiting_token_count(request),
        "cached_input_token_count": usage.cached_input_token_count,
        "delivered_token_count": usage.delivered_token_count,
        "tokens_per_second": request.watch.tokens_per_second(usage.delivered_token_count),
    }


def waiting_token_count(request: Running) -> int:
    """Count the input tokens of a generate request that no engine has yet; 0 if one has."""
    phase = request.phase
    if isinstance(phase, Asking):
        return len(phase.request.prompt_token_ids)
    if isinstance(phase, (Queued, Loading)) and isinstance(phase.admitted, AdmittedGeneration):
        return len(phase.admitted.request.prompt_token_ids)
    return 0


def phase_word(request: Running) -> str:
    """Name the phase of a request; a running one is in "prefill", then in "decode"."""
    if request.phase.name == STREAMING:
        return "decode" if request.usage.generated_token_count else "prefill"
    return request.phase.name
