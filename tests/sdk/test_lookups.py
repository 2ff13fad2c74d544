"""Unary calls of all three services, and the values of their answers."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import (
    admin_service_pb2_grpc,
    billing_service_pb2_grpc,
    configuration_pb2,
    end_users_pb2,
    live_requests_pb2,
    prices_pb2,
    replicas_pb2,
    types_pb2,
)
from weir.v1 import billing_service_pb2 as billing_pb
from weir.v1 import inference_service_pb2 as pb
from weir_client import (
    AdminClient,
    AsyncAdminClient,
    AsyncBillingClient,
    AsyncClient,
    BillingClient,
    EndUserState,
    GenerationState,
    InvalidRequest,
    Money,
    NotFound,
    QuotaDimension,
    QuotaStatus,
    QuotaSubject,
    TokenKind,
    Unavailable,
)

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference

NOON = Timestamp(seconds=1_795_176_000)  # 2026-11-20 12:00 UTC

KEY = admin_pb.ApiKey(
    api_key_id="k1", name="laptop", prefix="weir_ab12", scopes=["inference"], create_time=NOON
)


async def test_models_quotas_counts_and_generations() -> None:
    server = ScriptedInference(scripted.answer)
    price = pb.Price(
        version=3,
        currency_code="USD",
        input_picos_per_token=150_000,
        output_picos_per_token=600_000,
    )
    server.replies["ListModelsRequest"] = pb.ListModelsResponse(
        models=[
            pb.Model(name="demo", context_window_tokens=2048, engine="torch", price=price),
            pb.Model(name="other"),
        ]
    )
    server.replies["CountTokensRequest"] = pb.CountTokensResponse(
        input_token_count=12, context_window_tokens=2048
    )
    quota = types_pb2.QuotaStatus(
        quota_id="q1",
        subject=types_pb2.QUOTA_SUBJECT_API_KEY,
        dimension=types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS,
        limit_value=50,
        remaining_value=50,
    )
    server.replies["GetQuotaRequest"] = pb.GetQuotaResponse(quotas=[quota])
    generation = pb.Generation(
        request_id="r", state=pb.Generation.STATE_SETTLED, admit_time=NOON, outcome="STOP"
    )
    generation.cost.CopyFrom(scripted.COST)
    server.replies["GetGenerationRequest"] = pb.GetGenerationResponse(generation=generation)

    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        models = await client.list_models()
        count = await client.count_tokens("demo", "How long is this?")
        raw = await client.count_tokens("demo", text="")
        quotas = await client.get_quota("demo", end_user="alice", labels={"team": "search"})
        settled = await client.get_generation("r")
        with pytest.raises(InvalidRequest):
            await client.count_tokens("demo")

    assert models[0].price is not None
    assert models[0].name == "demo"
    assert models[0].price.output_picos_per_token == 600_000
    assert models[1].price is None
    assert (count.input_token_count, raw.context_window_tokens) == (12, 2048)
    requested = next(each for each in server.requests if isinstance(each, pb.GetQuotaRequest))
    assert requested == pb.GetQuotaRequest(
        model="demo", end_user="alice", labels={"team": "search"}
    )
    assert quotas[0].subject is QuotaSubject.API_KEY
    assert quotas[0].dimension == "concurrent-requests"
    assert quotas[0].reset_time is None
    assert quotas[0].reset_delay_s is None
    assert settled.state is GenerationState.SETTLED
    assert settled.admit_time == datetime(2026, 11, 20, 12, tzinfo=UTC)
    assert (settled.settle_time, settled.timings) == (None, None)
    assert settled.cost == Money("USD", 1_840_000_000)
    assert server.metadata["authorization"] == "Bearer key"


async def test_a_look_up_is_tried_again_and_a_missing_thing_is_not() -> None:
    server = ScriptedInference(scripted.answer)
    busy = scripted.status("UNAVAILABLE", "busy", "DATABASE_UNAVAILABLE", retry_after_s=0.01)
    server.refusals += [(busy, True), (busy, True)]

    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        assert await client.list_models() == []
        assert len(server.requests) == 3

        server.refusals += [(busy, True)] * 3
        with pytest.raises(Unavailable):
            await client.list_models()
        server.refusals.append(
            (scripted.status("NOT_FOUND", "no such request", "REQUEST_UNKNOWN"), True)
        )
        with pytest.raises(NotFound, match="no such request"):
            await client.get_generation("r")


class Recorder:
    """Service that answers every method with a prepared reply, and records the requests."""

    def __init__(self, *replies: Message) -> None:
        self.replies = {type(reply).__name__: reply for reply in replies}
        self.requests: list[Message] = []
        self.refusals: list[Any] = []
        self.first: dict[str, Message] = {}  # the reply to the first call of a method

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Message, context: Any) -> Message:
            self.requests.append(request)
            if self.refusals:
                await scripted.abort(context, self.refusals.pop(0))
            modules = (
                prices_pb2,
                admin_pb,
                billing_pb,
                end_users_pb2,
                live_requests_pb2,
                configuration_pb2,
                replicas_pb2,
            )
            [module] = [each for each in modules if hasattr(each, f"{method}Response")]
            reply = self.first.pop(method, None) or self.replies.get(
                f"{method}Response", getattr(module, f"{method}Response")()
            )
            assert isinstance(reply, Message)
            return reply

        return answer

    def add(self, server: grpc.aio.Server) -> None:
        """Register it for both services."""
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self, server)  # type: ignore[arg-type]
        billing_service_pb2_grpc.add_BillingServiceServicer_to_server(self, server)  # type: ignore[arg-type]


async def test_admins_manage_organizations_keys_quotas_and_prices() -> None:
    recorder = Recorder(
        admin_pb.CreateOrganizationResponse(
            organization=admin_pb.Organization(name="acme", currency_code="EUR")
        ),
        admin_pb.ListOrganizationsResponse(organizations=[admin_pb.Organization(name="acme")]),
        admin_pb.CreateProjectResponse(project=admin_pb.Project(name="web", create_time=NOON)),
        admin_pb.ListProjectsResponse(projects=[admin_pb.Project(name="web")]),
        admin_pb.CreateApiKeyResponse(api_key=KEY, secret="weir_ab12_secret"),
        admin_pb.RevokeApiKeyResponse(api_key=admin_pb.ApiKey(api_key_id="k1", revoke_time=NOON)),
        admin_pb.ListApiKeysResponse(api_keys=[KEY]),
        admin_pb.SetQuotaResponse(quota=types_pb2.QuotaStatus(quota_id="q1", limit_value=5)),
        admin_pb.ListQuotasResponse(quotas=[types_pb2.QuotaStatus(quota_id="q1")]),
        admin_pb.SetPriceResponse(
            version=4,
            versions=[prices_pb2.PriceVersion(version=4), prices_pb2.PriceVersion(version=5)],
        ),
        prices_pb2.WithdrawPriceResponse(
            versions=[prices_pb2.PriceVersion(version=6, withdrawn=True)]
        ),
        prices_pb2.ListPricesResponse(
            prices=[
                prices_pb2.AppliedPrice(
                    model="demo",
                    tier=pb.SERVICE_TIER_BATCH,
                    source=prices_pb2.AppliedPrice.SOURCE_LIST,
                )
            ]
        ),
        admin_pb.ListAuditEntriesResponse(
            entries=[admin_pb.AuditEntry(entry_id=9, action="api_key.revoke")]
        ),
    )
    inference = ScriptedInference(scripted.answer)
    async with (
        scripted.serve(inference, recorder.add) as address,
        AsyncAdminClient(address, "key") as admin,
    ):
        assert (await admin.create_organization("acme", currency_code="EUR")).currency_code == "EUR"
        assert [each.name async for each in admin.list_organizations()] == ["acme"]
        assert (await admin.create_project("acme", "web")).create_time == datetime(
            2026, 11, 20, 12, tzinfo=UTC
        )
        assert [each.name async for each in admin.list_projects("acme")] == ["web"]
        created = await admin.create_api_key("acme", "web", "laptop", lifetime=timedelta(days=30))
        assert (await admin.revoke_api_key("weir_ab12")).revoke_time is not None
        assert [each.expire_time async for each in admin.list_api_keys()] == [None]
        quota = await admin.set_quota(
            QuotaSubject.PROJECT, "acme/web", QuotaDimension.COST_PER_MONTH, 5 * 10**12
        )
        assert [each.quota_id async for each in admin.list_quotas("acme")] == ["q1"]
        await admin.delete_quota("q1")
        versions = await admin.set_price(
            "demo",
            input_picos_per_token=3,
            cached_input_picos_per_token=1,
            output_picos_per_token=9,
            effective_time=datetime(2026, 11, 20, 12, tzinfo=UTC),
        )
        assert (await admin.withdraw_price("acme", "demo"))[0].withdrawn
        [paid] = (await admin.list_prices("acme", history=True)).prices
        assert (paid.model, paid.tier, paid.source) == ("demo", "batch", "list")
        assert (await anext(admin.list_audit_entries(page_size=1))).action == "api_key.revoke"

    sent = {type(request).__name__: request for request in recorder.requests}
    assert created.secret == "weir_ab12_secret"
    assert "secret" not in repr(created), "a key that is logged by accident is not given away"
    assert created.api_key.scopes == ("inference",)
    assert sent["CreateApiKeyRequest"].lifetime.seconds == 30 * 24 * 3600  # type: ignore[attr-defined]
    assert quota.quota_id == "q1"
    assert quota.subject == QuotaSubject.UNSPECIFIED
    assert [each.version for each in versions] == [4, 5]
    assert sent["SetQuotaRequest"] == admin_pb.SetQuotaRequest(
        subject=types_pb2.QUOTA_SUBJECT_PROJECT,
        subject_ref="acme/web",
        dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH,
        limit_value=5 * 10**12,
    )
    assert sent["SetPriceRequest"].effective_time == NOON  # type: ignore[attr-defined]


async def test_end_users_are_listed_page_by_page_and_limited() -> None:
    recorder = Recorder(
        end_users_pb2.ListEndUsersResponse(end_users=[end_users_pb2.EndUser(name="bob")]),
        admin_pb.ListQuotasResponse(quotas=[types_pb2.QuotaStatus(quota_id="q1")]),
        admin_pb.SetQuotaResponse(quota=types_pb2.QuotaStatus(for_each="end_user")),
    )
    alice = end_users_pb2.EndUser(name="alice", state=end_users_pb2.END_USER_STATE_ARCHIVED)
    first = end_users_pb2.ListEndUsersResponse(end_users=[alice], next_page_token="next")
    recorder.first["ListEndUsers"] = first
    inference = ScriptedInference(scripted.answer)
    async with (
        scripted.serve(inference, recorder.add) as address,
        AsyncAdminClient(address, "key") as admin,
        AsyncBillingClient(address, "key") as billing,
    ):
        found = [each async for each in billing.list_end_users("acme", prefix="b", page_size=1)]
        limits = (
            admin.list_quotas("acme", end_user="alice"),
            admin.list_quotas("acme", label="team=search"),
            admin.list_quotas(quota_id="q1"),
        )
        assert [each.quota_id for listed in limits async for each in listed] == ["q1"] * 3
        selector = await admin.set_quota(
            QuotaSubject.ORGANIZATION,
            "acme",
            QuotaDimension.TOKENS_PER_DAY,
            9,
            for_each="end_user",
        )

    states = [EndUserState.ARCHIVED, EndUserState.UNSPECIFIED]
    assert [(each.name, each.state) for each in found] == list(
        zip(("alice", "bob"), states, strict=True)
    )
    assert found[0].month_cost is None
    requested: dict[str, Any] = {"organization": "acme", "prefix": "b", "page_size": 1}
    assert recorder.requests[:5] == [
        end_users_pb2.ListEndUsersRequest(**requested),
        end_users_pb2.ListEndUsersRequest(**requested, page_token="next"),
        admin_pb.ListQuotasRequest(organization="acme", end_user="alice", page_size=100),
        admin_pb.ListQuotasRequest(organization="acme", label="team=search", page_size=100),
        admin_pb.ListQuotasRequest(quota_id="q1", page_size=100),
    ]
    assert selector.for_each == "end_user"


def test_the_text_of_a_limit_names_the_end_user() -> None:
    status = QuotaStatus(
        subject=QuotaSubject.END_USER,
        dimension=QuotaDimension.TOKENS_PER_DAY,
        subject_name="alice",
    )
    assert str(status) == "tokens per day of the end user alice"


async def test_creations_are_retried_under_the_id_of_the_first_attempt() -> None:
    recorder = Recorder(admin_pb.CreateProjectResponse(project=admin_pb.Project(name="web")))
    recorder.refusals += [
        scripted.status("UNAVAILABLE", "busy", "DATABASE_UNAVAILABLE", retry_after_s=0.01)
    ]
    inference = ScriptedInference(scripted.answer)

    async with (
        scripted.serve(inference, recorder.add) as address,
        AsyncAdminClient(address, "key") as admin,
    ):
        await admin.create_project("acme", "web")
        await admin.create_project("acme", "web", request_id="mine", allow_existing=True)

    first, again, other = recorder.requests
    assert first == again
    assert str(uuid.UUID(first.request_id)) == first.request_id  # type: ignore[attr-defined]
    assert other == admin_pb.CreateProjectRequest(
        organization="acme", name="web", request_id="mine", allow_existing=True
    )


async def test_calls_that_return_a_secret_are_never_retried() -> None:
    """The first answer contained the secret, so a retry cannot help."""
    recorder = Recorder()
    recorder.refusals += [
        scripted.status("UNAVAILABLE", "busy", "DATABASE_UNAVAILABLE", retry_after_s=0.01)
    ] * 2
    inference = ScriptedInference(scripted.answer)

    async with (
        scripted.serve(inference, recorder.add) as address,
        AsyncAdminClient(address, "key") as admin,
    ):
        with pytest.raises(Unavailable):
            await admin.create_api_key("acme", "web", "laptop")
        assert len(recorder.requests) == 1
        assert [each async for each in admin.list_organizations()] == []

    assert len(recorder.requests) == 3


async def test_the_month_of_a_customer() -> None:
    line = billing_pb.MonthReportLine(
        model="demo",
        token_kind=billing_pb.TOKEN_KIND_CACHED_INPUT,
        price_version=1,
        request_count=50,
        token_count=10_000,
        unit_price_picos=50_000,
        amount=types_pb2.Money(currency_code="USD", picos=500_000_000),
    )
    report = billing_pb.GetMonthReportResponse(
        organization_name="acme",
        month="2026-11",
        lines=[line],
        request_counts=billing_pb.RequestCounts(
            total_count=50, completed_count=46, cancelled_count=4
        ),
        total=types_pb2.Money(currency_code="USD", units=-1, picos=-500_000_000_000),
        reconciliation=billing_pb.Reconciliation(
            usage_token_count=5, ledger_token_count=5, balanced=True
        ),
    )
    recorder = Recorder(report)
    inference = ScriptedInference(scripted.answer)

    async with (
        scripted.serve(inference, recorder.add) as address,
        AsyncBillingClient(address, "key") as billing,
    ):
        month = await billing.get_month_report("acme", "2026-11")

    assert month.lines[0].token_kind is TokenKind.CACHED_INPUT
    assert str(month.lines[0].amount) == "0.0005 USD"
    assert str(month.total) == "-1.50 USD"
    assert month.reconciliation.balanced


def test_the_blocking_twins_make_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(
        admin_pb.CreateApiKeyResponse(api_key=KEY, secret="s"),
        admin_pb.SetPriceResponse(versions=[prices_pb2.PriceVersion(version=2)]),
    )
    with scripted.serve_in_thread(ScriptedInference(scripted.answer), recorder.add) as address:
        monkeypatch.setenv("WEIR_ADDRESS", address)
        monkeypatch.setenv("WEIR_ADMIN_KEY", "key")
        with AdminClient() as admin:
            admin.create_organization("acme")
            list(admin.list_organizations())
            admin.create_project("acme", "web")
            list(admin.list_projects("acme"))
            assert admin.create_api_key("acme", "web", "laptop").secret == "s"
            admin.revoke_api_key("k1")
            list(admin.list_api_keys("acme"))
            admin.set_quota(
                QuotaSubject.API_KEY, "k1", QuotaDimension.TOKENS_PER_DAY, 5, model="demo"
            )
            admin.delete_quota("q1")
            list(admin.list_quotas())
            [version] = admin.set_price(
                "demo",
                input_picos_per_token=1,
                cached_input_picos_per_token=1,
                output_picos_per_token=1,
            )
            assert version.version == 2
            assert admin.withdraw_price("acme", "demo") == []
            assert admin.list_prices("acme").prices == ()
            list(admin.list_audit_entries())
            assert admin.rotate_api_key("k1", overlap=timedelta(hours=1)).secret == ""
            assert (
                admin.update_api_key("k1", scopes=("admin",), never_expires=True).expire_time
                is None
            )
            assert admin.list_live_requests("acme", stuck_only=True).requests == ()
            assert admin.kill_request("r1", reason="loops").generation is None
            assert admin.expire_overdue_holds() == 0
            assert admin.list_replicas("chat").drains == ()
            assert admin.drain_replica("chat", "chat#0", move_after_s=1.5).replicas == ()
            assert admin.undrain_replica("chat", "chat#0").undrained is False
            assert (
                admin.apply_configuration(
                    {"organizations": [{"name": "acme"}]}, dry_run=True
                ).changes
                == ()
            )
            assert admin.export_configuration("acme") == {}
        with BillingClient() as billing:
            assert billing.get_month_report("acme", "2026-11").lines == ()

    assert len(recorder.requests) == 25
