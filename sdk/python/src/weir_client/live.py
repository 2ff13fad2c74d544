"""What an admin sees of running requests, and of a configuration that is applied: the values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.values import Generation


class RequestPhase(StrEnum):
    """Where a running request stands. UNSPECIFIED: its process has not told."""

    UNSPECIFIED = "unspecified"
    PREPARING = "preparing"
    QUEUED = "queued"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request that runs or waits. Without a hold yet, `admit_time` and `expire_time` are None."""

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
    owner_id: str
    owner_name: str  # "host:pid"; empty if it has not told


@dataclass(frozen=True, slots=True)
class LiveOrganization:
    """All that runs for one organization."""

    organization_id: str
    name: str
    request_count: int
    hold_count: int
    held_token_count: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LiveView:
    """What runs in all processes: the oldest requests first, sums over all of them, and the processes that did not answer."""

    requests: tuple[LiveRequest, ...]
    organizations: tuple[LiveOrganization, ...]
    request_count: int
    silent_owner_ids: tuple[str, ...]


class KillResult(StrEnum):
    """What came of ending a request. PENDING: its process did not answer; the hold ends at `KilledRequest.expire_time`."""

    UNSPECIFIED = "unspecified"
    ENDED = "ended"
    HAD_ENDED = "had-ended"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it is recorded, and whose it is."""

    generation: Generation
    organization_name: str
    project_name: str
    api_key_prefix: str


@dataclass(frozen=True, slots=True)
class KilledRequest:
    """A request that an admin has ended. generation: as recorded; None if it waited without a hold."""

    result: KillResult
    generation: Generation | None
    expire_time: datetime | None


class ChangeAction(StrEnum):
    """What applying a configuration does to one thing. KEEP: it exists, is not named, and stays."""

    UNSPECIFIED = "unspecified"
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that becomes different; values as JSON text, None for none."""

    field: str
    before_json: str | None
    after_json: str | None


@dataclass(frozen=True, slots=True)
class ConfigurationChange:
    """One difference. quota: which limit, as JSON mapping of `QuotaConfiguration`; empty for other things."""

    action: ChangeAction
    kind: str
    path: str
    fields: tuple[FieldChange, ...]
    quota: dict[str, object]
    api_key_prefix: str
    secret: str = field(repr=False)  # kept out of logs


@dataclass(frozen=True, slots=True)
class ConfigurationMistake:
    """One thing that is wrong with a configuration, by its path in it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class AppliedConfiguration:
    """What was done, or would be; nothing if there are mistakes. kept: what exists and was not named."""

    changes: tuple[ConfigurationChange, ...]
    kept: tuple[ConfigurationChange, ...]
    mistakes: tuple[ConfigurationMistake, ...]
