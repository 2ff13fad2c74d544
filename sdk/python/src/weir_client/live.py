"""Values of running requests and of configuration changes, as admins see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.plain import Value
from weir_client.values import Generation


class RequestPhase(StrEnum):
    """Phase of a running request. UNSPECIFIED if the request's process did not report it."""

    UNSPECIFIED = "unspecified"
    PREPARING = "preparing"
    QUEUED = "queued"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class LiveRequest(Value):
    """Running or waiting request. Without a hold yet, `admit_time` and `expire_time` are None."""

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
    """Sums over the running requests of one organization."""

    organization_id: str
    name: str
    request_count: int
    hold_count: int
    held_token_count: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LiveView(Value):
    """Running requests of all processes.

    The oldest come first; counts and sums cover all. `unresponsive_process_ids` has the processes
    that did not answer.
    """

    requests: tuple[LiveRequest, ...]
    organizations: tuple[LiveOrganization, ...]
    request_count: int
    unresponsive_process_ids: tuple[str, ...]


class KillResult(StrEnum):
    """Result of ending a request by an admin.

    PENDING means that the request's process did not answer; the hold ends at
    `KilledRequest.expire_time`.
    """

    UNSPECIFIED = "unspecified"
    ENDED = "ended"
    ALREADY_ENDED = "already-ended"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class RecordedRequest(Value):
    """Record of one request, with the organization, project and key that it belongs to."""

    generation: Generation
    organization_name: str
    project_name: str
    api_key_prefix: str


@dataclass(frozen=True, slots=True)
class KilledRequest(Value):
    """Request that an admin has ended. `generation` is its record, None if it had no hold."""

    result: KillResult
    generation: Generation | None
    expire_time: datetime | None


class ChangeAction(StrEnum):
    """Change that a configuration makes to an object. KEEP: the configuration does not name it."""

    UNSPECIFIED = "unspecified"
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class FieldChange(Value):
    """Changed field, before and after, as JSON text; None if absent."""

    field: str
    before_json: str | None
    after_json: str | None


@dataclass(frozen=True, slots=True)
class ConfigurationChange(Value):
    """Change to one object. `quota` is a limit as JSON of `QuotaConfiguration`, else empty."""

    action: ChangeAction
    kind: str
    path: str
    fields: tuple[FieldChange, ...]
    quota: dict[str, object]
    api_key_prefix: str
    secret: str = field(repr=False)  # kept out of logs


@dataclass(frozen=True, slots=True)
class ConfigurationViolation(Value):
    """Error in a configuration, with the path of the field."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class AppliedConfiguration(Value):
    """Changes that were applied or planned; empty if there are violations.

    `kept` lists the objects that exist but are not in the configuration.
    """

    changes: tuple[ConfigurationChange, ...]
    kept: tuple[ConfigurationChange, ...]
    violations: tuple[ConfigurationViolation, ...]
