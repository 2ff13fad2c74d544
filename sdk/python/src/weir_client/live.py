"""Values of running requests and of configuration changes, as admins see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.plain import Value
from weir_client.values import Generation


class RequestPhase(StrEnum):
    """Phase of a running request. UNSPECIFIED: not reported by its process."""

    UNSPECIFIED = "unspecified"
    PREPARING = "preparing"
    QUEUED = "queued"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class LiveRequest(Value):
    """A running or waiting request. Without a hold yet, `admit_time` and `expire_time` are None."""

    request_id: str
    organization_id: str
    organization_name: str
    project_id: str
    project_name: str
    api_key_id: str
    api_key_prefix: str
    model: str
    phase: RequestPhase
    age_s: float
    input_token_count: int
    cached_input_token_count: int
    delivered_token_count: int
    tokens_per_second: float
    leased_token_count: int
    admit_time: datetime | None
    expire_time: datetime | None
    process_id: str
    process_name: str  # "host:pid"; empty if not reported


@dataclass(frozen=True, slots=True)
class LiveOrganization(Value):
    """Totals of the running requests of one organization."""

    organization_id: str
    name: str
    request_count: int
    hold_count: int
    held_token_count: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LiveView(Value):
    """Running requests of all processes.

    The oldest come first; counts and sums cover all. unresponsive_process_ids: processes without an
    answer.
    """

    requests: tuple[LiveRequest, ...]
    organizations: tuple[LiveOrganization, ...]
    request_count: int
    unresponsive_process_ids: tuple[str, ...]


class KillResult(StrEnum):
    """Result of ending a request.

    PENDING: its process did not answer; the hold ends at `KilledRequest.expire_time`.
    """

    UNSPECIFIED = "unspecified"
    ENDED = "ended"
    ALREADY_ENDED = "already-ended"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class RecordedRequest(Value):
    """Record of one request and its owner."""

    generation: Generation
    organization_name: str
    project_name: str
    api_key_prefix: str


@dataclass(frozen=True, slots=True)
class KilledRequest(Value):
    """A request ended by an admin. generation: its record; None if it had no hold."""

    result: KillResult
    generation: Generation | None
    expire_time: datetime | None


class ChangeAction(StrEnum):
    """Action of a configuration on one object. KEEP: it exists, is not named, and stays."""

    UNSPECIFIED = "unspecified"
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class FieldChange(Value):
    """One changed field; values as JSON text, None if absent."""

    field: str
    before_json: str | None
    after_json: str | None


@dataclass(frozen=True, slots=True)
class ConfigurationChange(Value):
    """One difference. quota: the limit as JSON mapping of `QuotaConfiguration`; else empty."""

    action: ChangeAction
    kind: str
    path: str
    fields: tuple[FieldChange, ...]
    quota: dict[str, object]
    api_key_prefix: str
    secret: str = field(repr=False)  # kept out of logs


@dataclass(frozen=True, slots=True)
class ConfigurationViolation(Value):
    """One error in a configuration, with its path."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class AppliedConfiguration(Value):
    """Applied or planned changes; empty with violations. kept: existing objects not named."""

    changes: tuple[ConfigurationChange, ...]
    kept: tuple[ConfigurationChange, ...]
    violations: tuple[ConfigurationViolation, ...]
