"""Scripted Weir on loopback: all three services with fixed answers, for tests of the commands.

`python -m tests.cli.scripted_weir PORT` serves it for manual use of the commands.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2, status_pb2
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import (
    admin_service_pb2_grpc,
    billing_service_pb2_grpc,
    closures_pb2,
    end_users_pb2,
    prices_pb2,
    types_pb2,
)
from weir.v1 import billing_service_pb2 as billing_pb
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import usage_reports_pb2 as usage_pb

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

NOON = Timestamp(seconds=1_795_176_000)  # 2026-11-20 12:00 UTC
ANSWER = ("Two hotels ", "have a pool: ", "the Grand Pier ", "and the Old Mill.")
TIMINGS = types_pb2.Timings(
    auth_ms=0.4,
    tokenize_ms=2.1,
    admission_ms=3.5,
    queue_ms=24,
    prefill_ms=182,
    decode_ms=1450,
    client_stall_ms=0,
    settle_ms=4,
    ttft_ms=212,
    total_ms=1666,
)
USAGE = types_pb2.Usage(
    input_token_count=1025,
    cached_input_token_count=200,
    generated_token_count=150,
    delivered_token_count=150,
    billed_token_count=150,
)
COST = types_pb2.Money(currency_code="USD", picos=223_750_000)
BAD_TEMPERATURE = error_details_pb2.BadRequest(
    field_violations=[
        error_details_pb2.BadRequest.FieldViolation(
            field="start.sampling.temperature", description="must be 0 to 2"
        )
    ]
)
QUOTA = types_pb2.QuotaStatus(
    enforced=True,
    quota_id="5b1f4c1e-0000-4000-8000-000000000001",
    subject=types_pb2.QUOTA_SUBJECT_PROJECT,
    subject_id="5b1f4c1e-0000-4000-8000-000000000002",
    dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE,
    limit_value=100_000,
    used_value=58_750,
    held_value=1_175,
    remaining_value=40_075,
    reset_time=NOON,
)
QUOTA.reset_delay.FromMilliseconds(41_500)
RAISED = types_pb2.QuotaStatus()
RAISED.CopyFrom(QUOTA)
RAISED.MergeFrom(
    types_pb2.QuotaStatus(
        limit_value=500_000,
        base_limit_value=100_000,
        override_end_time=NOON,
        override_reason="launch",
        input_weight_milli=1000,
        cached_input_weight_milli=100,
        output_weight_milli=4000,
        binding=True,
        narrowed_by_quota_id="5b1f4c1e-0000-4000-8000-000000000003",
    )
)
BUDGET = types_pb2.QuotaStatus(
    enforced=True,
    quota_id="5b1f4c1e-0000-4000-8000-000000000003",
    subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
    model="demo",
    dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH,
    limit_value=250 * 10**12,
    used_value=12_345_678_900_000,
    remaining_value=237_654_321_100_000,
)
SUSPENSION = admin_pb.Suspension(reason="unpaid", create_time=NOON, by_operator=True)
CLOSURE = closures_pb2.Closure(
    reason="unpaid",
    close_time=NOON,
    by_operator=True,
    remaining_credit=closures_pb2.REMAINING_CREDIT_REFUND,
    final_month="2026-11",
)
EFFECTS = closures_pb2.ClosureEffects(
    running_request_count=2,
    active_key_count=3,
    open_months=["2026-10", "2026-11"],
    unbilled=types_pb2.Money(currency_code="USD", units=4),
    remaining_credit=types_pb2.Money(currency_code="USD", units=7),
)
KEY = admin_pb.ApiKey(
    api_key_id="5b1f4c1e-0000-4000-8000-00000000000a",
    name="laptop",
    prefix="weir_ab12cd",
    scopes=["inference"],
    create_time=NOON,
    organization_name="acme",
    project_name="web",
)
ALICE = end_users_pb2.EndUser(
    name="alice",
    create_time=NOON,
    last_use_day="2026-11-28",
    state=end_users_pb2.END_USER_STATE_ACTIVE,
    month_cost=types_pb2.Money(currency_code="USD", picos=1_250_000_000_000 // 10),
    month_request_count=1234,
    tightest_quota=types_pb2.QuotaStatus(
        dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_DAY,
        limit_value=1000,
        used_value=800,
        held_value=39,
    ),
)
MODEL = pb.Model(
    name="demo",
    architecture="LlamaForCausalLM",
    context_window_tokens=2048,
    vocabulary_size=4096,
    engine="torch",
    price=pb.Price(
        version=1,
        currency_code="USD",
        input_picos_per_token=150_000,
        cached_input_picos_per_token=50_000,
        output_picos_per_token=600_000,
        reasoning_picos_per_token=600_000,
        effective_time=NOON,
    ),
)

LISTED = prices_pb2.PriceVersion(
    version=2,
    model="demo",
    currency_code="USD",
    tier=pb.SERVICE_TIER_INTERACTIVE,
    input_picos_per_token=150_000,
    cached_input_picos_per_token=150_000,
    output_picos_per_token=600_000,
    reasoning_picos_per_token=600_000,
    multiplier_milli=1000,
    effective_time=Timestamp(seconds=1_796_083_200),
)
OWN_BATCH = prices_pb2.PriceVersion(
    version=3,
    model="demo",
    currency_code="USD",
    tier=pb.SERVICE_TIER_BATCH,
    organization_id=str(uuid.UUID(int=9)),
    organization_name="acme",
    input_picos_per_token=75_000,
    cached_input_picos_per_token=75_000,
    output_picos_per_token=300_000,
    reasoning_picos_per_token=300_000,
    multiplier_milli=500,
    effective_time=NOON,
)
ENDED = prices_pb2.PriceVersion(
    version=4,
    model="demo",
    currency_code="USD",
    tier=pb.SERVICE_TIER_BATCH,
    organization_id=str(uuid.UUID(int=9)),
    organization_name="acme",
    multiplier_milli=1000,
    withdrawn=True,
    effective_time=NOON,
)
PAID = [
    prices_pb2.AppliedPrice(
        model="demo",
        tier=pb.SERVICE_TIER_INTERACTIVE,
        source=prices_pb2.AppliedPrice.SOURCE_LIST,
        version=LISTED,
    ),
    prices_pb2.AppliedPrice(
        model="demo",
        tier=pb.SERVICE_TIER_BATCH,
        source=prices_pb2.AppliedPrice.SOURCE_ORGANIZATION,
        version=OWN_BATCH,
    ),
]

CENT = 10**10

FORECAST = usage_pb.GetForecastResponse(
    organization_name="acme",
    month="2026-11",
    time_zone="UTC",
    as_of_time=NOON,
    month_to_date=types_pb2.Money(currency_code="USD", units=1_234, picos=567_800_000_000),
    expected=types_pb2.Money(currency_code="USD", units=2_000),
    low=types_pb2.Money(currency_code="USD", units=1_900),
    high=types_pb2.Money(currency_code="USD", units=2_100, picos=500_000_000_000),
    confidence_percent=80,
    complete_day_count=28,
    method="Used so far, plus the mean.",
    warnings=["No trend."],
)
QUOTE = pb.QuoteResponse(
    input_token_count=1025,
    predicted_cached_token_count=200,
    max_output_token_count=1000,
    expected_output_token_count=150,
    worst_case_cost=types_pb2.Money(currency_code="USD", picos=4_000_000_000),
    expected_cost=types_pb2.Money(currency_code="USD", picos=900_000_000),
    price_version=3,
    would_admit=True,
    quotas=[QUOTA],
)


def usd(picos: int) -> types_pb2.Money:
    return types_pb2.Money(currency_code="USD", picos=picos)


def report_line(
    kind: billing_pb.TokenKind.ValueType, tokens: int, cancelled: int, unit: int
) -> billing_pb.MonthReportLine:
    """Return a line with the amount that results from its numbers."""
    return billing_pb.MonthReportLine(
        model="demo",
        token_kind=kind,
        price_version=1,
        request_count=50,
        token_count=tokens,
        cancelled_token_count=cancelled,
        unit_price_picos=unit,
        amount=usd(tokens * unit),
        rounded_amount=usd((tokens * unit + CENT // 2) // CENT * CENT),
    )


REPORT = billing_pb.GetMonthReportResponse(
    organization_name="acme",
    organization_id="5b1f4c1e-0000-4000-8000-000000000009",
    month="2026-11",
    lines=[
        report_line(billing_pb.TOKEN_KIND_INPUT, 41_450, 2_475, 150_000),
        report_line(billing_pb.TOKEN_KIND_CACHED_INPUT, 9_800, 600, 50_000),
        report_line(billing_pb.TOKEN_KIND_OUTPUT, 7_121, 71, 600_000),
    ],
    request_counts=billing_pb.RequestCounts(total_count=50, completed_count=47, cancelled_count=3),
    total=usd(10_980_100_000),
    total_rounded=usd(2 * CENT),
    carried_in=usd(5_000_000_000),
    carried_out=usd(-4_019_900_000),
    rounding=usd(CENT),
    tax_note="tax not included",
    reconciliation=billing_pb.Reconciliation(
        usage_token_count=58_371, ledger_token_count=58_371, balanced=True
    ),
)


def usage_row(tokens: int, cancelled: int = 0, **keys: Any) -> usage_pb.UsageRow:
    """Return a row of this many input tokens, and half as many of each other kind."""

    def share(requests: int, count: int) -> usage_pb.UsageShare:
        money = types_pb2.Money(currency_code="USD", picos=count * 150_000)
        return usage_pb.UsageShare(request_count=requests, token_count=count, amount=money)

    return usage_pb.UsageRow(
        organization_name="acme",
        request_count=10,
        input_token_count=tokens,
        cached_input_token_count=tokens // 2,
        output_token_count=tokens // 2,
        cancelled=share(1 if cancelled else 0, cancelled),
        limited=share(0, 0),
        failed=share(0, 0),
        amount=types_pb2.Money(currency_code="USD", picos=tokens * 150_000),
        pending_amount=types_pb2.Money(currency_code="USD"),
        **keys,
    )


USAGE_PAGE = usage_pb.GetUsageResponse(
    rows=[
        usage_row(1_000 * day, 7 if day == 3 else 0, day=f"2026-11-{day:02d}")
        for day in range(1, 19)
    ],
    total=usage_row(171_000, 7),
    time_zone="UTC",
)


class ScriptedAccounts:
    """Servicer that answers account calls with prepared replies and records requests and keys."""

    def __init__(self) -> None:
        organization = admin_pb.Organization(
            organization_id=str(uuid.UUID(int=9)),
            name="acme",
            currency_code="USD",
            create_time=NOON,
            billing_profile=types_pb2.BillingProfile(legal_name="Acme GmbH", country="DE"),
            queue_weight_milli=2500,
        )
        project = admin_pb.Project(
            project_id=str(uuid.UUID(int=2)),
            organization_id=str(uuid.UUID(int=9)),
            name="web",
            create_time=NOON,
        )
        suspended = admin_pb.Organization(name="acme", suspension=SUSPENSION)
        replies: list[Message] = [
            admin_pb.CreateOrganizationResponse(organization=organization),
            admin_pb.ListOrganizationsResponse(organizations=[organization]),
            admin_pb.SetBillingProfileResponse(organization=organization),
            admin_pb.SetQueueWeightResponse(organization=organization),
            admin_pb.UpdateOrganizationResponse(organization=organization),
            admin_pb.SuspendOrganizationResponse(organization=suspended),
            admin_pb.ResumeOrganizationResponse(organization=organization),
            admin_pb.CloseOrganizationResponse(
                organization=admin_pb.Organization(name="acme", closure=CLOSURE), effects=EFFECTS
            ),
            admin_pb.CloseProjectResponse(
                project=admin_pb.Project(name="web", closure=CLOSURE), effects=EFFECTS
            ),
            admin_pb.UpdateProjectResponse(project=project),
            admin_pb.SuspendProjectResponse(
                project=admin_pb.Project(name="web", suspension=suspended.suspension)
            ),
            admin_pb.ResumeProjectResponse(project=project),
            admin_pb.CreateProjectResponse(project=project),
            admin_pb.ListProjectsResponse(projects=[project]),
            admin_pb.CreateApiKeyResponse(api_key=KEY, secret="weir_ab12cd_topsecret"),
            admin_pb.RevokeApiKeyResponse(
                api_key=admin_pb.ApiKey(name="laptop", prefix="weir_ab12cd", revoke_time=NOON)
            ),
            admin_pb.ListApiKeysResponse(api_keys=[KEY]),
            admin_pb.SetQuotaResponse(quota=QUOTA),
            admin_pb.OverrideQuotaResponse(quota=RAISED),
            admin_pb.DeleteQuotaResponse(deleted=True),
            admin_pb.ListQuotasResponse(quotas=[BUDGET, QUOTA]),
            end_users_pb2.ListEndUsersResponse(
                end_users=[ALICE, end_users_pb2.EndUser(name="alina")]
            ),
            end_users_pb2.GetEndUserResponse(end_user=ALICE, quotas=[QUOTA]),
            admin_pb.SetPriceResponse(version=2, versions=[LISTED, OWN_BATCH]),
            prices_pb2.WithdrawPriceResponse(versions=[ENDED]),
            prices_pb2.ListPricesResponse(prices=PAID, versions=[LISTED, OWN_BATCH, ENDED]),
            admin_pb.ListAuditEntriesResponse(
                entries=[
                    admin_pb.AuditEntry(
                        entry_id=17,
                        create_time=NOON,
                        actor="weir_ab12cd",
                        action="quota.set",
                        subject_id=QUOTA.quota_id,
                        before_json='{"limit_value": 10, "model": ""}',
                        after_json='{"limit_value": 20, "model": ""}',
                    )
                ]
            ),
            REPORT,
            USAGE_PAGE,
            FORECAST,
        ]
        self.replies = {
            type(reply).DESCRIPTOR.name.removesuffix("Response"): reply for reply in replies
        }
        self.requests: list[Any] = []
        self.refusals: list[status_pb2.Status] = []
        self.refusals_of: dict[str, status_pb2.Status] = {}  # by organization
        self.keys: list[str] = []

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Message, context: Any) -> Message:
            self.requests.append(request)
            self.keys.append(str(dict(context.invocation_metadata()).get("authorization", "")))
            if self.refusals:
                await scripted.abort(context, self.refusals.pop(0))
            if (refusal := self.refusals_of.get(getattr(request, "organization", ""))) is not None:
                await scripted.abort(context, refusal)
            return self.replies[method]

        return answer

    async def ExportMonth(self, request: usage_pb.ExportMonthRequest, context: Any) -> None:
        """`ExportMonth` handler that sends a small file in two pieces."""
        self.requests.append(request)
        if self.refusals:
            await scripted.abort(context, self.refusals.pop(0))
        await context.write(
            usage_pb.ExportMonthResponse(
                file_name="acme.bin", media_type="application/octet-stream", chunk=b"first "
            )
        )
        await context.write(usage_pb.ExportMonthResponse(chunk=b"second"))

    def add(self, server: grpc.aio.Server) -> None:
        """Register the servicer for both services."""
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self, server)  # type: ignore[arg-type]
        billing_service_pb2_grpc.add_BillingServiceServicer_to_server(self, server)  # type: ignore[arg-type]


async def behave(stream: ServerStream, pace_s: float = 0.0) -> None:
    """Answer by the first word of the prompt: a refusal, a stall until cancelled, or the text."""
    while (frame := await stream.read()) is not None:
        request_id = frame.request_id
        if frame.WhichOneof("kind") == "cancel":
            end = scripted.finished(request_id, 1, types_pb2.FINISH_REASON_CANCELLED)
            end.finished.cost.CopyFrom(COST)
            await stream.send(end)
            continue
        question = frame.start.conversation.messages[-1].content
        word = question.split()[0]
        refusals = {
            "hot": scripted.status(
                "INVALID_ARGUMENT", "temperature must be 0 to 2", "FIELD_INVALID", BAD_TEMPERATURE
            ),
            "poor": scripted.quota_status(retry_after_s=31.2),
            "huge": scripted.quota_status(retry_helps=False),
            "busy": scripted.status(
                "UNAVAILABLE", "no engine is free", "ENGINE_OVERLOADED", retry_after_s=5
            ),
            "unknown": scripted.status(
                "NOT_FOUND", "there is no model named x: see ListModels", "MODEL_UNKNOWN"
            ),
        }
        if word in refusals:
            await stream.send(scripted.failed(request_id, refusals[word]))
            continue
        await stream.send(scripted.admitted(request_id, 1025, cached=200))
        if word == "loading":
            progress = pb.ProgressFrame(stage=pb.ProgressFrame.STAGE_ENGINE_LOADING)
            progress.estimated_wait.FromMilliseconds(1500)
            await stream.send(pb.ServerFrame(request_id=request_id, progress=progress))
        for seq, text in enumerate(ANSWER, 1):
            await asyncio.sleep(pace_s)
            await stream.send(
                scripted.delta(request_id, seq, text if word != "escape" else f"\x1b[31m{text}")
            )
            if word == "slow":
                break
        if word != "slow":
            finished = pb.FinishedFrame(
                reason=types_pb2.FINISH_REASON_STOP, usage=USAGE, cost=COST, timings=TIMINGS
            )
            if word == "spent":
                finished.reason = types_pb2.FINISH_REASON_QUOTA_EXHAUSTED
                finished.exhausted_quotas.append(QUOTA)
            await stream.send(pb.ServerFrame(request_id=request_id, finished=finished))


def scripted_inference(pace_s: float = 0.0) -> ScriptedInference:
    """Return the inference service with prepared look-ups."""

    async def script(stream: ServerStream) -> None:
        await behave(stream, pace_s)

    server = ScriptedInference(script)
    generation = pb.Generation(
        request_id="7f3c1d52-6f0e-4b1a-9a53-0d8c6f2b1e77",
        state=pb.Generation.STATE_SETTLED,
        model="demo",
        admit_time=NOON,
        settle_time=NOON,
        usage=USAGE,
        cost=COST,
        timings=TIMINGS,
        outcome="STOP",
        labels={"agent": "1"},
    )
    server.replies["ListModelsRequest"] = pb.ListModelsResponse(models=[MODEL])
    server.replies["CountTokensRequest"] = pb.CountTokensResponse(
        input_token_count=1025, context_window_tokens=2048
    )
    server.replies["GetQuotaRequest"] = pb.GetQuotaResponse(quotas=[BUDGET, QUOTA])
    server.replies["QuoteRequest"] = QUOTE
    server.replies["GetGenerationRequest"] = pb.GetGenerationResponse(generation=generation)
    return server


async def serve_for_ever(port: int) -> None:
    """Serve until interrupted."""
    async with scripted.serve(
        scripted_inference(pace_s=0.3), ScriptedAccounts().add, address=f"127.0.0.1:{port}"
    ) as address:
        print(f"serving on {address}")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_for_ever(int(sys.argv[1])))
