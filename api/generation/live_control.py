"""Control channel between processes: stopping requests here, and reporting what runs here."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from api.access.auth import SECRET_REPLACED, Authenticator
from api.core.errors import AddressNotAllowed, CancelledByAdmin, KeyRevokedMidway
from api.generation.life import State
from api.generation.process import Process, Running
from metering.control.live import DrainOrder, StopOrder
from metering.core.models import Outcome
from metering.tenants.networks import allows, networks_of


def process_name() -> str:
    """Return the name of this process for people: "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"


def obey(process: Process, authenticator: Authenticator, order: StopOrder) -> None:
    """Stop the requests that an order names.

    Delivered output is settled; the client gets the reason.
    """
    networks = networks_of(order.allowed_networks)
    for request in process.running():
        payer, address = request.caller.payer, request.caller.address
        if order.api_key_id is not None and payer.api_key_id == order.api_key_id:
            request.stop(Outcome.CANCELLED, KeyRevokedMidway("the API key of this request was revoked"))
        elif order.changed_key_id == payer.api_key_id and request.caller.secret_hash in order.ended_secrets:
            request.stop(Outcome.CANCELLED, KeyRevokedMidway(SECRET_REPLACED))
        elif order.changed_key_id == payer.api_key_id and not allows(networks, address):
            request.stop(Outcome.CANCELLED, AddressNotAllowed(address))
        elif (order.project_id, order.request_id) == (payer.project_id, request.start.request_id):
            why = f": {order.reason}" if order.reason else ""
            request.stop(Outcome.CANCELLED, CancelledByAdmin(f"an administrator has ended this request{why}"))
    if order.api_key_id is not None:
        authenticator.changed(order.api_key_id)
    if order.changed_key_id is not None:
        authenticator.changed(order.changed_key_id, networks, order.ended_secrets)


def keep_out_of_use(process: Process, orders: Sequence[DrainOrder]) -> None:
    """Drain exactly the replicas that orders name, and move their requests elsewhere where ordered
    and possible."""
    drained: dict[str, list[str]] = {}
    for order in orders:
        drained.setdefault(order.model, []).append(order.replica)
    process.router.drain(drained)
    for order in orders:
        if order.is_moving:
            process.router.move_out(order.model, order.replica)


def report_replicas(process: Process) -> list[dict[str, Any]]:
    """Return the states of the replicas here, with the columns that `metering/control/live.py`
    reads."""
    return [
        {
            "model": served,
            "replica": told.name,
            "region": told.region,
            "state": told.state.value,
            "reason": told.reason,
            "is_drained": told.is_drained,
            "request_count": told.live_sequence_count,
            "outstanding_token_count": told.outstanding_token_count,
        }
        for served, told in process.router.reports()
    ]


def report(process: Process) -> list[dict[str, Any]]:
    """Return a record of each running request, with the columns that `metering/control/live.py`
    reads."""
    now = time.monotonic()
    return [record(request, now) for request in process.running()]


def record(request: Running, now: float) -> dict[str, Any]:
    """Return one request as a record, without its content."""
    payer, usage = request.caller.payer, request.usage
    return {
        "hold_id": None if request.hold_id is None else str(request.hold_id),
        "request_id": str(request.start.request_id),
        "organization_id": str(payer.organization_id),
        "project_id": str(payer.project_id),
        "api_key_id": str(payer.api_key_id),
        "model": request.routed_model,
        "phase": phase_word(request),
        "age_s": now - request.caller.received_at,
        "input_token_count": usage.input_token_count,
        "cached_input_token_count": usage.cached_input_token_count,
        "delivered_token_count": usage.delivered_token_count,
        "tokens_per_second": request.tokens_per_second,
    }


def phase_word(request: Running) -> str:
    """Return the phase of a request; a running one is in decode from its first token on."""
    if request.life.state is State.RUNNING:
        return "decode" if request.usage.generated_token_count else "prefill"
    return request.life.state.phase
