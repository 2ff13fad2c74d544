"""Every way in which a request can end, with its cause and its charge, as tables and pure
functions.

`docs/reference/endings.md` shows the tables.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.core import errors
from api.core.errors import Cause
from api.generation.charges import Action, Cell, EndCharge, EndPhase, Way
from inference import errors as engine_errors
from inference.routing import router
from metering.core import errors as metering_errors
from metering.core.models import Outcome
from metering.holds.operations import RequestSettled
from metering.quotas.quotas import QuotaExceeded

CAUSES: Mapping[Cause, str] = {
    Cause.COMPLETION: "The output is complete, or was cut off by a safety rule.",
    Cause.CLIENT: "The client cancelled, disconnected, read too slowly or sent invalid data.",
    Cause.LIMIT: "A limit of the customer was reached: quota, credit, or maximum cost.",
    Cause.OPERATOR: "An administrator ended the request or revoked its key.",
    Cause.SERVICE: "The service failed. Includes every end with no other known cause.",
}
WALK = "tests/api/test_endings.py"
E2E = "tests/e2e/test_endings.py"
SIBLING = "Another prompt of the same HTTP request ended: CANCELLED, with the cause of that end"
# Stored outcome of an end that an error decided.
OUTCOMES: Mapping[Cause, Outcome] = {
    Cause.COMPLETION: Outcome.STOP,
    Cause.CLIENT: Outcome.CANCELLED,
    Cause.LIMIT: Outcome.QUOTA_EXHAUSTED,
    Cause.OPERATOR: Outcome.CANCELLED,
    Cause.SERVICE: Outcome.FAILED,
}


PHASES: Mapping[EndPhase, str] = {
    EndPhase.BEFORE_HOLD: "The request is checked and tokenized, or its hold is being taken.",
    EndPhase.HELD: "It has a hold, and waits for an engine, its turn, or its grammar.",
    EndPhase.PREFILLING: "The engine has started on the input (embedding: on some of the texts).",
    EndPhase.GENERATING: "The engine has generated tokens; none has been delivered.",
    EndPhase.DELIVERING: "At least one token has been delivered.",
    EndPhase.SETTLED: "Its usage event has been written.",
}


NOTHING = EndCharge(Action.NONE)
FREE = EndCharge(Action.VOID)
REQUEST_ALONE = EndCharge(Action.SETTLE)
INPUT = EndCharge(Action.SETTLE, bills_input=True)
INPUT_AND_DELIVERED = EndCharge(Action.SETTLE, bills_input=True, bills_output=True)
AS_SETTLED = EndCharge(Action.UNCHANGED)

P, C = EndPhase, Cause
# Only failures of the service are free, and only before the first token is delivered: delivered
# output is billed.
TABLE: Mapping[tuple[EndPhase, Cause], Cell] = {
    # A completion needs an engine; before the hold it would be an error of the service.
    (P.BEFORE_HOLD, C.COMPLETION): Cell(NOTHING, WALK),
    (P.BEFORE_HOLD, C.CLIENT): Cell(NOTHING, "tests/e2e/test_bad_input.py"),
    (P.BEFORE_HOLD, C.LIMIT): Cell(NOTHING, "tests/e2e/test_limits.py"),
    (P.BEFORE_HOLD, C.OPERATOR): Cell(NOTHING, "tests/e2e/test_keys.py"),
    (P.BEFORE_HOLD, C.SERVICE): Cell(NOTHING, "tests/e2e/test_admission.py"),
    (P.HELD, C.COMPLETION): Cell(FREE, WALK),
    (P.HELD, C.CLIENT): Cell(REQUEST_ALONE, "tests/e2e/test_cancellation.py"),
    (P.HELD, C.LIMIT): Cell(REQUEST_ALONE, WALK),
    (P.HELD, C.OPERATOR): Cell(REQUEST_ALONE, WALK),
    (P.HELD, C.SERVICE): Cell(FREE, "tests/e2e/test_cold_start.py"),
    (P.PREFILLING, C.COMPLETION): Cell(INPUT, "tests/e2e/test_embeddings.py"),
    (P.PREFILLING, C.CLIENT): Cell(INPUT, E2E),
    (P.PREFILLING, C.LIMIT): Cell(INPUT, WALK),
    (P.PREFILLING, C.OPERATOR): Cell(INPUT, WALK),
    (P.PREFILLING, C.SERVICE): Cell(FREE, WALK),
    (P.GENERATING, C.COMPLETION): Cell(INPUT, "tests/e2e/test_safety.py"),
    (P.GENERATING, C.CLIENT): Cell(INPUT, E2E),
    (P.GENERATING, C.LIMIT): Cell(INPUT, WALK),
    (P.GENERATING, C.OPERATOR): Cell(INPUT, E2E),
    (P.GENERATING, C.SERVICE): Cell(FREE, E2E),
    (P.DELIVERING, C.COMPLETION): Cell(INPUT_AND_DELIVERED, "tests/e2e/test_happy_path.py"),
    (P.DELIVERING, C.CLIENT): Cell(INPUT_AND_DELIVERED, "tests/e2e/test_cancellation.py"),
    (P.DELIVERING, C.LIMIT): Cell(INPUT_AND_DELIVERED, "tests/e2e/test_limits.py"),
    (P.DELIVERING, C.OPERATOR): Cell(INPUT_AND_DELIVERED, "tests/e2e/test_live_requests.py"),
    (P.DELIVERING, C.SERVICE): Cell(INPUT_AND_DELIVERED, "tests/e2e/test_openai_ends.py"),
    (P.SETTLED, C.COMPLETION): Cell(AS_SETTLED, WALK),
    (P.SETTLED, C.CLIENT): Cell(AS_SETTLED, WALK),
    (P.SETTLED, C.LIMIT): Cell(AS_SETTLED, WALK),
    (P.SETTLED, C.OPERATOR): Cell(AS_SETTLED, WALK),
    (P.SETTLED, C.SERVICE): Cell(AS_SETTLED, "tests/metering/test_recovery.py"),
}


# The first match decides; an end without a match is a failure of the service.
WAYS: tuple[Way, ...] = (
    Way("End of the output", C.COMPLETION, "finished STOP or TOOL_CALLS", (Outcome.STOP,)),
    Way("Stop sequence", C.COMPLETION, "finished STOP_SEQUENCE", (Outcome.STOP_SEQUENCE,)),
    Way(
        "max_output_tokens or context window reached",
        C.COMPLETION,
        "finished LENGTH",
        (Outcome.LENGTH,),
    ),
    Way("Output filtered by a safety rule", C.COMPLETION, "finished FILTERED", (Outcome.FILTERED,)),
    Way(
        "Cancel frame; stream or HTTP connection closed",
        C.CLIENT,
        "finished CANCELLED",
        (Outcome.CANCELLED,),
    ),
    Way(
        "Not attached again within keep_on_disconnect",
        C.CLIENT,
        "finished CANCELLED, to a client that attaches",
    ),
    Way("Deadline of the call; start_timeout", C.CLIENT, "finished DEADLINE", (Outcome.DEADLINE,)),
    Way(
        "Client reads too slowly or grants no credit",
        C.CLIENT,
        "finished SLOW_CONSUMER",
        (Outcome.SLOW_CONSUMER,),
    ),
    Way("Cancelled before admission", C.CLIENT, "CANCELLED", errors=(errors.CancelledEarly,)),
    Way(
        "Deadline before admission",
        C.CLIENT,
        "DEADLINE_EXCEEDED",
        errors=(errors.DeadlineBeforeStart,),
    ),
    Way(
        "More tokens than the key allows",
        C.LIMIT,
        "KEY_LIMIT_EXCEEDED",
        errors=(errors.KeyBoundExceeded,),
    ),
    Way("credit.token_count below 1", C.CLIENT, "FIELD_INVALID", errors=(errors.InvalidRequest,)),
    Way(
        "max_cost below the cost of the input",
        C.CLIENT,
        "FIELD_INVALID",
        errors=(errors.InvalidRequest,),
    ),
    Way(
        "Prompt too long, filtered or refused by the template",
        C.CLIENT,
        "CONTEXT_EXCEEDED, PROMPT_FILTERED, CHAT_TEMPLATE_FAILED",
        errors=(
            errors.PromptTooLong,
            errors.PromptTooLarge,
            errors.InputsTooLong,
            errors.PromptFiltered,
            engine_errors.ChatTemplateFailed,
        ),
    ),
    Way(
        "Unknown or unsuitable model",
        C.CLIENT,
        "MODEL_UNKNOWN, MODEL_MISMATCH, MODEL_NOT_ALLOWED",
        errors=(router.ModelUnknown, router.ModelMismatch, errors.ModelNotAllowed),
    ),
    Way(
        "Grammar that cannot be compiled or applied",
        C.CLIENT,
        "REQUEST_IMPOSSIBLE",
        errors=(engine_errors.RequestImpossible,),
    ),
    Way(
        "Request id in use or already used",
        C.CLIENT,
        "REQUEST_IN_FLIGHT, REQUEST_SETTLED, REQUEST_ID_REUSED",
        errors=(metering_errors.RequestInFlight, RequestSettled, metering_errors.RequestIdReused),
    ),
    Way(
        "Quota or credit used up, at admission or while running",
        C.LIMIT,
        "QUOTA_EXCEEDED, INSUFFICIENT_CREDIT; finished QUOTA_EXHAUSTED",
        (Outcome.QUOTA_EXHAUSTED,),
        (QuotaExceeded,),
    ),
    Way(
        "Too many prompts of the key in preparation",
        C.LIMIT,
        "PREPARATION_LIMIT",
        errors=(errors.PreparationLimit,),
    ),
    Way("max_cost reached", C.LIMIT, "finished COST_LIMIT", (Outcome.COST_LIMIT,)),
    Way("KillRequest", C.OPERATOR, "CANCELLED_BY_ADMIN", errors=(errors.CancelledByAdmin,)),
    Way(
        "Key revoked, expired or replaced",
        C.OPERATOR,
        "KEY_REVOKED, UNAUTHENTICATED",
        errors=(errors.KeyRevokedMidway, errors.Unauthenticated, metering_errors.KeyInvalid),
    ),
    Way(
        "Organization or project closed for good",
        C.OPERATOR,
        "ORGANIZATION_CLOSED, PROJECT_CLOSED",
        errors=(metering_errors.OrganizationClosed, metering_errors.ProjectClosed),
    ),
    Way(
        "Organization or project suspended",
        C.OPERATOR,
        "ORGANIZATION_SUSPENDED, PROJECT_SUSPENDED",
        errors=(errors.OrganizationSuspended, errors.ProjectSuspended),
    ),
    Way(
        "Network or permission removed from the key",
        C.OPERATOR,
        "ADDRESS_NOT_ALLOWED, PERMISSION_DENIED",
        errors=(errors.PermissionDenied,),
    ),
    Way(
        "Drain timeout",
        C.SERVICE,
        "DRAINING, or INTERRUPTED after a token",
        errors=(errors.Draining, errors.Interrupted),
    ),
    Way(
        "Server at capacity, or start would be too late",
        C.SERVICE,
        "OVERLOADED, QUEUE_FULL, STARTS_TOO_LATE",
        errors=(errors.Overloaded, errors.QueueFull, errors.StartsTooLate),
    ),
    Way(
        "Engine lost, and no other continues the request",
        C.SERVICE,
        "ENGINE_FAILED, or ENGINE_FAILED_MIDWAY after a token",
        (Outcome.FAILED,),
        (engine_errors.EngineFailed,),
    ),
    Way(
        "Engine fails to start, is down or full",
        C.SERVICE,
        "ENGINE_START_FAILED, ENGINE_UNAVAILABLE, ENGINE_OVERLOADED",
        errors=(
            engine_errors.EngineStartFailed,
            engine_errors.EngineUnavailable,
            engine_errors.EngineOverloaded,
        ),
    ),
    Way(
        "Safety classifiers unavailable",
        C.SERVICE,
        "SAFETY_UNAVAILABLE",
        errors=(engine_errors.SafetyUnavailable,),
    ),
    Way(
        "Hold not renewed in time",
        C.SERVICE,
        "HOLD_ENDED, DATABASE_UNAVAILABLE",
        errors=(metering_errors.HoldEnded, metering_errors.DatabaseUnavailable),
    ),
    Way("No price in force", C.SERVICE, "PRICE_MISSING", errors=(metering_errors.PriceMissing,)),
    Way(
        "Usage journal not writable",
        C.SERVICE,
        "JOURNAL_UNAVAILABLE",
        errors=(metering_errors.JournalUnavailable,),
    ),
    Way("Any other error", C.SERVICE, "INTERNAL with an incident id", errors=(OSError,)),
    Way(
        "Database unavailable at settlement",
        C.SERVICE,
        "nothing until it is back; then the end as above",
    ),
    Way(
        "Process killed: settled from its journal",
        C.SERVICE,
        "nothing; the request id returns its usage",
    ),
    Way(
        "Machine lost: the hold expires",
        C.SERVICE,
        "nothing; usage up to the last extension is billed",
    ),
)

_BY_OUTCOME = {outcome: way.cause for way in WAYS for outcome in way.outcomes}


class UsageSoFar(msgspec.Struct):
    """Token counts of a running request.

    `input_token_count` is 0 until the engine has started on the request; the cached count is final
    if `is_cached_final`. Tokens are journalled before they are sent, and taken when the transport
    has them. Delivered tokens are billed: those taken or, with a replay buffer, those in it. The
    `reasoning` counts are the thinking among each; a token that is recognized as thinking only
    later counts with the message that reports it.
    """

    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    journalled_token_count: int = 0
    taken_token_count: int = 0
    delivered_token_count: int = 0
    is_cached_final: bool = False
    journalled_reasoning_token_count: int = 0
    taken_reasoning_token_count: int = 0
    delivered_reasoning_token_count: int = 0

    def begun(self, input_count: int, cached_count: int, *, is_final: bool) -> None:
        """Record that an engine has started on the request. `is_final`: so is its cached count."""
        self.input_token_count = input_count
        self.cached_input_token_count = cached_count
        self.is_cached_final = is_final


def phase_of(usage: UsageSoFar) -> EndPhase:
    """Return how far a request with a hold has come."""
    if usage.delivered_token_count:
        return EndPhase.DELIVERING
    if not usage.input_token_count:
        return EndPhase.HELD
    return EndPhase.GENERATING if usage.generated_token_count else EndPhase.PREFILLING


def cause_of(outcome: Outcome | None, error: BaseException | None) -> Cause:
    """Return the cause of an end. An error takes precedence over the outcome."""
    if error is None:
        return Cause.SERVICE if outcome is None else _BY_OUTCOME[outcome]
    if isinstance(error, errors.SiblingEnded):
        return error.cause
    return next((way.cause for way in WAYS if isinstance(error, way.errors)), Cause.SERVICE)


def charge_of(phase: EndPhase, cause: Cause) -> EndCharge:
    """Look up the charge of a request that ends in this phase for this cause."""
    return TABLE[phase, cause].charge
