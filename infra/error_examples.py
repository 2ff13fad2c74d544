"""One example of each error that clients receive, as the server raises it.

The pages of the reasons show them, as the server converts them to gRPC and HTTP, and a test checks
that their messages are short, plain and say what to do.
"""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from functools import cache

from api.access.auth import KEY_REVOKED
from api.core import errors
from api.core.errors import Cause, FieldViolation, LongInput
from api.generation.request.readiness import interrupted
from api.generation.state import End, error_before_hold
from api.openai.error_responses import (
    CLIENT_CLOSED,
    INVALID_HTTP,
    HttpFault,
    invalid_http_message,
)
from api.openai.listener import too_large
from inference import errors as engine_errors
from inference.routing.router import ModelMismatch, ModelUnknown
from metering.core import errors as metering_errors
from metering.core.errors import Obstacle, ObstacleKind
from metering.core.models import Outcome, QuotaDimension, QuotaSubject
from metering.holds.operations import RequestSettled, Settled
from metering.quotas.quota_rules import QuotaRule, QuotaState
from metering.quotas.quotas import InsufficientCredit, QuotaExceeded
from metering.tenants.networks import parse_address

NOW = datetime(2026, 11, 27, 9, 30, 6, tzinfo=UTC)
KEY_ID = uuid.UUID("0b9dc1a6-2f0d-4b0c-9a53-8d9a6c0f7e11")


INVALID = FieldViolation("sampling.temperature", "must be between 0 and 2, got 5")
SETTLED = Settled(uuid.UUID(int=0), 10, 4, 33, 32, 32, 12_345_000, "USD", Outcome.STOP)


END_USER_LIMIT = QuotaState(
    QuotaRule(
        KEY_ID,
        QuotaSubject.END_USER,
        KEY_ID,
        "",
        QuotaDimension.REQUESTS_PER_MINUTE,
        3,
        within_id=KEY_ID,
        subject_name="alice",
    ),
    3,
    0,
    NOW,
)


def limit(dimension: QuotaDimension, value: int, used: int, model: str = "") -> QuotaState:
    """Return a limit of an API key, or of an organization on money; rolling ones of 5 hours."""
    is_money = "picos" in dimension
    subject = QuotaSubject.ORGANIZATION if is_money else QuotaSubject.API_KEY
    minutes = 300 if dimension.endswith("_per_window") else 0
    rule = QuotaRule(KEY_ID, subject, KEY_ID, model, dimension, value, window_minutes=minutes)
    return QuotaState(rule, used, 0, NOW)


def quota(dimension: QuotaDimension, value: int, used: int, requested: int) -> QuotaExceeded:
    """Return the refusal of a request by one limit."""
    return QuotaExceeded([limit(dimension, value, used)], [requested], "USD")


@cache
def quota_examples() -> tuple[Exception, ...]:
    """Return a refusal by each measure and in each window, prepaid credit at the end."""
    credit = InsufficientCredit(
        [limit(QuotaDimension.PREPAID_CREDIT_PICOS, 10**12, 10**12 - 4 * 10**6)],
        [37 * 10**6],
        "USD",
    )
    return (
        quota(QuotaDimension.REQUESTS_PER_MINUTE, 3, 3, 1),
        quota(QuotaDimension.CONCURRENT_REQUESTS, 2, 2, 1),
        quota(QuotaDimension.TOKENS_PER_MINUTE, 1000, 980, 64),
        quota(QuotaDimension.INPUT_TOKENS_PER_MINUTE, 1000, 980, 64),
        quota(QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, 1000, 980, 64),
        quota(QuotaDimension.TOKENS_PER_DAY, 50_000, 49_990, 64),
        quota(QuotaDimension.TOKENS_PER_MONTH, 50_000, 0, 64_000),  # never fits
        quota(QuotaDimension.COST_PICOS_PER_DAY, 5 * 10**12, 4_999 * 10**9, 19 * 10**9),
        quota(QuotaDimension.COST_PICOS_PER_MONTH, 250 * 10**12, 250 * 10**12, 19 * 10**9),
        quota(QuotaDimension.REQUESTS_PER_WEEK, 1000, 1000, 1),
        quota(QuotaDimension.COST_PICOS_PER_HOUR, 10**12, 999 * 10**9, 19 * 10**9),
        quota(QuotaDimension.TOKENS_PER_WINDOW, 100_000, 99_980, 64),
        quota(QuotaDimension.COST_PICOS_PER_LIFETIME, 20 * 10**12, 20 * 10**12, 19 * 10**9),
        credit,
    )


@cache
def http_examples() -> tuple[HttpFault, ...]:
    """Return an error of each code that begins in HTTP, before there is a call of the contract."""
    unknown = "unknown URL POST /v1/moderations: the operator configures the safety checks"
    return (
        HttpFault(404, unknown, "unknown_url"),
        HttpFault(405, "send POST, not GET, to /v1/chat/completions", "method_not_allowed"),
        HttpFault(404, "the console does not offer this call: use gRPC", "not_offered"),
        HttpFault(400, invalid_http_message("Bad status line 'hello'"), INVALID_HTTP),
        HttpFault(417, "The header Expect must be 100-continue or absent.", "expectation_failed"),
        HttpFault(415, "Send the body as it is, without content-encoding.", "unsupported_encoding"),
        HttpFault(415, "send the request as application/json", "unsupported_media_type"),
        HttpFault(
            408,
            "Your body was not received within 30 s. Send it whole, and at once.",
            "request_timeout",
        ),
        too_large(4_194_304),
        HttpFault(
            400,
            "the body is not valid JSON: unexpected end of data. Send one JSON object",
            "invalid_json",
        ),
        HttpFault(
            404,
            "the model 'gpt-4' does not exist: choose one that GET /v1/models lists",
            "model_not_found",
        ),
        *(
            HttpFault(CLIENT_CLOSED, f"the answer was cut off: {why}", code)
            for code, why in (
                ("slow_consumer", "it was read too slowly. Read it as it arrives"),
                ("cancelled", "you cancelled it. Send the request again if you need it"),
                ("deadline", "its deadline has passed. Allow more time"),
            )
        ),
    )


@cache
def examples() -> tuple[Exception, ...]:
    """Return one error of each class; several of a quota."""
    return (
        errors.Unauthenticated(
            "Your call has no API key. Send the metadata `authorization: Bearer <API key>`."
        ),
        errors.KeyRevokedMidway(KEY_REVOKED),
        metering_errors.KeyInvalid(),
        metering_errors.OrganizationClosed("acme ended its contract"),
        metering_errors.ProjectClosed("the search is replaced"),
        metering_errors.TokenInvalid("it has expired"),
        errors.AddressNotAllowed(parse_address("203.0.113.7")),
        errors.PermissionDenied(
            "Your API key wk_xxtklc5q has the scope inference, and this call needs the permission"
            " keys.create of the scope admin, role owner, role admin or role developer. Use another"
            " key, or ask an administrator.",
            permission="keys.create",
        ),
        errors.RoleExceeded("wk_xxtklc5q", "the permission month.close"),
        errors.OrganizationSuspended("the invoices of May and June are unpaid"),
        errors.ProjectSuspended("its key was found in a public repository", by_operator=False),
        errors.ModelNotAllowed("wk_xxtklc5q", "large"),
        errors.InvalidRequest([INVALID]),
        errors.KeepTooLong(7200, 3600),
        errors.KeyBoundExceeded(
            "max_output_tokens",
            "must be at most 256, got 1000: this key may have 256 output tokens per request; ask"
            " for less, or ask an administrator to raise the key's max_output_tokens",
            1000,
            256,
        ),
        errors.PromptTooLong(2000, 100, 2048),
        errors.PromptTooLarge("prompt", 90_000, 65_536, 2048),
        errors.InputsTooLong([LongInput(0, 600), LongInput(3, 900)], 512),
        errors.PromptFiltered("card numbers", "prompt"),
        errors.MessageUnreadable(
            "Your message is not of this call's request type. Generate your client from the API's"
            " files."
        ),
        errors.MessageMissing(20),
        errors.MessageTooLarge(9_000_000, 4_194_304),
        engine_errors.ChatTemplateFailed(
            "this model's chat template has no place for tools: choose another model"
        ),
        engine_errors.RequestImpossible(
            "must be between -2 and 2 on this model's engine", "sampling.logit_bias"
        ),
        metering_errors.InvalidValue("limit", "must be 0 or more, got -1"),
        ModelMismatch("demo-embedding", requested="generate text", served="Embed"),
        errors.UnknownRequest(
            "Your project has no request with this request_id. Check the id, or start it."
        ),
        ModelUnknown("gpt-4", ["demo", "demo-embedding"]),
        metering_errors.NotFound("organization", "acme"),
        errors.Draining(),
        errors.Overloaded(
            "This server already runs 400 requests, which is its limit. Send the request again, to"
            " another server if there is one."
        ),
        errors.QueueFull(3, 64, 2.5),
        errors.StartsTooLate(10, 4, 6.5),
        errors.ProcessUnavailable(
            "The server that runs your request does not answer. Attach to it again."
        ),
        errors.IssuerUnavailable("https://login.example.com", "no answer within 5 s"),
        errors.EngineLost(2),
        engine_errors.EngineOverloaded("the engine's queue is full", 0.5),
        engine_errors.EngineUnavailable("the engine is restarting", 4),
        engine_errors.EngineStartFailed("the engine did not start", 30),
        engine_errors.SafetyUnavailable("the safety classifiers have not answered within 5 s", 5),
        engine_errors.CheckpointInvalid("/models/large/config.json", "is missing: add the file"),
        metering_errors.DatabaseUnavailable("The database does not answer."),
        metering_errors.WriteConflict("DeadlockDetected"),
        metering_errors.JournalUnavailable(),
        metering_errors.ConcurrentChanges(),
        metering_errors.StripeFailed(
            "The meter event is not cancelled: it is older than a day. Correct it at Stripe."
        ),
        errors.PreparationLimit("API key", 900_000, 200_000, 1_000_000),
        errors.AuthenticationThrottled(9.2),
        errors.TooManyReports(4),
        errors.TooManyCalls(1.5),
        errors.TooManyStreams(
            "This connection has 64 open streams, which is its limit. Close some, or send several"
            " requests on one stream."
        ),
        *quota_examples(),
        QuotaExceeded([END_USER_LIMIT], [1], "USD"),
        metering_errors.EndUsersExhausted("end users", 1_000_000),
        errors.NotAdmittedYet(
            "Your request is not admitted yet. Change its limits after the `admitted` frame."
        ),
        metering_errors.BillingDetailsMissing(
            ["acme has no e-mail address: set one with `weir org billing acme --email`"]
        ),
        metering_errors.PriceMissing("large", "EUR"),
        metering_errors.InvitationInvalid(),
        metering_errors.LastOwner("acme"),
        metering_errors.KeyRevoked(
            "The key wk_xxtklc5q is revoked, which cannot be undone. Create another one."
        ),
        metering_errors.MonthClosed(KEY_ID, date(2026, 10, 1)),
        metering_errors.MonthNotClosable(
            [
                Obstacle(
                    ObstacleKind.MONTH_NOT_OVER, "2026-11 is not over: close it from 2026-12-01 on"
                )
            ]
        ),
        metering_errors.MonthOpen(
            "2026-11 of acme is not closed, so there is no close to compare it with. Close the"
            " month first."
        ),
        metering_errors.ApprovalRefused(
            "wk_n2q4m7ab was created by wk_u6c1x9de, which proposed this adjustment. Approve it"
            " with an unrelated, older key."
        ),
        errors.EngineLostMidway(120),
        interrupted(errors.Draining(), 120),
        errors.AttachedElsewhere(
            "Another stream has attached to your request and receives its output now. Attach again"
            " to take it back."
        ),
        metering_errors.RequestInFlight(),
        metering_errors.HoldEnded("it was voided, and usage can no longer be recorded"),
        errors.OutputGone(3, 40, 90),
        errors.RequestUnderWay(
            "A request with this request_id and another payload is already running. Use a new"
            " request_id for a new request."
        ),
        errors.RequestOver("FAILED"),
        metering_errors.RequestIdReused(),
        RequestSettled(SETTLED),
        metering_errors.AlreadyExists("organization", "acme"),
        errors.CallMissing("/weir.v1.Inference/Embed"),
        error_before_hold(End(Outcome.CANCELLED)),
        errors.SiblingEnded(Cause.LIMIT),
        errors.CancelledByAdmin(
            "An administrator has ended your request: it looped. Ask them before you send it again."
        ),
        errors.DeadlineBeforeStart(
            "The deadline passed before your request was admitted. Allow more time."
        ),
        engine_errors.EngineFailed("SIGSEGV"),
        engine_errors.InvariantViolated("block 7 is neither free nor held"),
        metering_errors.InvariantViolated("the entries do not sum to zero"),
    )
