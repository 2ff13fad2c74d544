"""Values are read by field names: every field and member has its source."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest
import weir_client
from google.protobuf.json_format import ParseError
from weir.v1 import (
    admin_service_pb2,
    alerts_pb2,
    billing_service_pb2,
    configuration_pb2,
    inference_service_pb2,
    live_requests_pb2,
    months_pb2,
    plans_pb2,
    prices_pb2,
    receipt_service_pb2,
    receipts_pb2,
    replicas_pb2,
    types_pb2,
    usage_reports_pb2,
)
from weir_client import (
    InvalidRequest,
    Money,
    receipts,
    wire,
)
from weir_client.plain import Value, plain

# The value, its message, and its fields without a source in the message.
PAIRS: tuple[tuple[Any, Any, set[str]], ...] = (
    (weir_client.ApiKey, admin_service_pb2.ApiKey, set()),
    (weir_client.AuditEntry, admin_service_pb2.AuditEntry, set()),
    (weir_client.BillingProfile, types_pb2.BillingProfile, set()),
    (weir_client.CreatedApiKey, admin_service_pb2.CreateApiKeyResponse, set()),
    (weir_client.MonthReport, billing_service_pb2.GetMonthReportResponse, set()),
    (weir_client.MonthReportLine, billing_service_pb2.MonthReportLine, set()),
    (weir_client.Organization, admin_service_pb2.Organization, set()),
    (weir_client.Project, admin_service_pb2.Project, set()),
    (weir_client.RotatedApiKey, admin_service_pb2.RotateApiKeyResponse, set()),
    (weir_client.Alert, alerts_pb2.Alert, set()),
    (weir_client.AlertWebhook, alerts_pb2.AlertWebhook, set()),
    (weir_client.CreatedAlertWebhook, alerts_pb2.SetAlertWebhookResponse, set()),
    (weir_client.CreditBalance, plans_pb2.GetCreditBalanceResponse, set()),
    (weir_client.CreditGrant, plans_pb2.CreditGrant, set()),
    (weir_client.Plan, plans_pb2.Plan, {"existed"}),
    (weir_client.PlanAssignment, plans_pb2.PlanAssignment, {"existed"}),
    (weir_client.PlanList, plans_pb2.ListPlansResponse, set()),
    (weir_client.PriceList, prices_pb2.ListPricesResponse, set()),
    (weir_client.PriceVersion, prices_pb2.PriceVersion, set()),
    (weir_client.SimulatedCustomer, plans_pb2.SimulatedCustomer, set()),
    (weir_client.Adjustment, months_pb2.Adjustment, set()),
    (weir_client.ClosedMonth, months_pb2.CloseMonthResponse, set()),
    (weir_client.Invoice, months_pb2.Invoice, {"credit_notes"}),
    (weir_client.InvoiceLine, months_pb2.InvoiceLine, set()),
    (weir_client.InvoicePayment, months_pb2.InvoicePayment, set()),
    (weir_client.Month, months_pb2.Month, set()),
    (weir_client.MonthVerification, months_pb2.VerifyMonthResponse, set()),
    (weir_client.AppliedConfiguration, configuration_pb2.ApplyConfigurationResponse, set()),
    (weir_client.ConfigurationChange, configuration_pb2.ConfigurationChange, set()),
    (weir_client.KilledRequest, live_requests_pb2.KillRequestResponse, set()),
    (weir_client.LiveRequest, live_requests_pb2.LiveRequest, set()),
    (weir_client.LiveView, live_requests_pb2.ListLiveRequestsResponse, set()),
    (weir_client.RecordedRequest, live_requests_pb2.GetRequestResponse, set()),
    (weir_client.Model, inference_service_pb2.Model, set()),
    (weir_client.Price, inference_service_pb2.Price, set()),
    (weir_client.Quote, inference_service_pb2.QuoteResponse, set()),
    (
        receipts.Receipt,
        receipts_pb2.Receipt,
        {"admitted_at_us", "settled_at_us", "newer_version"},  # set by the client
    ),
    (receipts.ReceiptMonth, receipt_service_pb2.GetReceiptMonthResponse, set()),
    (weir_client.DrainedReplica, replicas_pb2.DrainReplicaResponse, set()),
    (weir_client.Replica, replicas_pb2.Replica, set()),
    (weir_client.ReplicaDrain, replicas_pb2.ReplicaDrain, set()),
    (weir_client.ReplicaList, replicas_pb2.ListReplicasResponse, set()),
    (weir_client.UndrainedReplica, replicas_pb2.UndrainReplicaResponse, set()),
    (weir_client.UsageForecast, usage_reports_pb2.GetForecastResponse, set()),
    (weir_client.UsageRow, usage_reports_pb2.UsageRow, set()),
    (weir_client.Admitted, inference_service_pb2.AdmittedFrame, set()),
    (weir_client.Generation, inference_service_pb2.Generation, set()),
    (weir_client.KeyRestrictions, inference_service_pb2.KeyRestrictions, set()),
    (weir_client.Progress, inference_service_pb2.ProgressFrame, set()),
    (weir_client.QuotaStatus, types_pb2.QuotaStatus, set()),
    (weir_client.Timings, types_pb2.Timings, set()),
    (weir_client.Usage, types_pb2.Usage, set()),
)
ENUMERATIONS = (
    (weir_client.TokenKind, billing_service_pb2.TokenKind),
    (weir_client.AlertDeliveryState, alerts_pb2.AlertDeliveryState),
    (weir_client.AdjustmentState, months_pb2.AdjustmentState),
    (weir_client.DocumentFormat, months_pb2.MonthDocumentFormat),
    (weir_client.MonthState, months_pb2.MonthState),
    (weir_client.PaymentState, months_pb2.PaymentState),
    (weir_client.ChangeAction, configuration_pb2.ConfigurationChange.Action),
    (weir_client.KillResult, live_requests_pb2.KillRequestResponse.Result),
    (weir_client.RequestPhase, live_requests_pb2.RequestPhase),
    (weir_client.ModelTask, inference_service_pb2.ModelTask),
    (weir_client.ReplicaState, replicas_pb2.ReplicaState),
    (weir_client.MonthExportFormat, usage_reports_pb2.MonthExportFormat),
    (weir_client.UsageGrouping, usage_reports_pb2.UsageGrouping),
    (weir_client.FinishReason, types_pb2.FinishReason),
    (weir_client.GenerationState, inference_service_pb2.Generation.State),
    (weir_client.QuotaDimension, types_pb2.QuotaDimension),
    (weir_client.QuotaSubject, types_pb2.QuotaSubject),
    (weir_client.Stage, inference_service_pb2.ProgressFrame.Stage),
)

RETURNED = [
    name for name in weir_client.__all__ if dataclasses.is_dataclass(getattr(weir_client, name))
]


@pytest.mark.parametrize(("kind", "message", "untold"), PAIRS)
def test_each_field_of_a_value_is_in_the_message(kind: Any, message: Any, untold: set[str]) -> None:
    taken = {name for name, _ in wire._takes(kind, message.DESCRIPTOR)}

    assert {each.name for each in fields(kind)} - taken == untold


@pytest.mark.parametrize(("kind", "wrapper"), ENUMERATIONS)
def test_an_enumeration_has_the_members_of_the_contract(kind: Any, wrapper: Any) -> None:
    known = wire.numbers(kind, wrapper.DESCRIPTOR)

    assert set(known) == set(kind)
    assert set(known.values()) | {0} == set(wrapper.values())


def test_absent_values_are_none_or_the_default_and_newer_ones_unspecified() -> None:
    key = wire.read(weir_client.ApiKey, admin_service_pb2.ApiKey(name="web", max_input_tokens=0))
    month = wire.read(weir_client.Month, months_pb2.Month(state=99))  # type: ignore[arg-type]
    price = wire.read(weir_client.Price, inference_service_pb2.Price())
    model = wire.read(weir_client.Model, inference_service_pb2.Model())

    assert (key.create_time, key.max_input_tokens, key.scopes) == (None, None, ())
    assert month.state == weir_client.MonthState.UNSPECIFIED
    assert month.total is None
    assert month.payments == ()
    assert price.tier == "interactive"
    assert model.task == weir_client.ModelTask.GENERATE
    assert model.price is None


def test_times_amounts_durations_and_mappings_are_read_by_their_types() -> None:
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC)
    request = live_requests_pb2.LiveRequest()
    request.age.FromMilliseconds(1500)
    request.admit_time.FromDatetime(noon)
    plan = plans_pb2.Plan(version=2)
    plan.configuration.name = "start"
    generation = inference_service_pb2.Generation(labels={"team": "search"})
    generation.cost.CopyFrom(wire.money_message(Money.of("-1.5", "USD")))

    read_request, read_plan = (
        wire.read(weir_client.LiveRequest, request),
        wire.read(weir_client.Plan, plan, existed=True),
    )
    read_generation = wire.read(weir_client.Generation, generation)

    assert read_request.age_s == 1.5
    assert read_request.admit_time == noon
    assert read_request.expire_time is None
    assert read_plan.name == "start"
    assert read_plan.configuration == {"name": "start"}
    assert read_plan.existed is True
    assert dict(read_generation.labels) == {"team": "search"}
    assert str(read_generation.cost) == "-1.50 USD"


@pytest.mark.parametrize("name", RETURNED)
def test_everything_that_a_client_returns_becomes_json(name: str) -> None:
    assert issubclass(getattr(weir_client, name), Value)


def test_plain_data_keeps_every_value() -> None:
    usage = wire.read(weir_client.Usage, types_pb2.Usage(input_token_count=3))
    now = datetime(2026, 11, 27, tzinfo=UTC)
    reported_as = {"money": Money.of("0.05", "USD"), "usage": usage, "at": now, "raw": b"\x00"}

    reported = json.loads(json.dumps(plain(reported_as)))

    assert reported["money"] == {"currency_code": "USD", "picos": 50_000_000_000}
    assert reported["usage"]["input_token_count"] == 3
    assert (reported["at"], reported["raw"]) == ("2026-11-27T00:00:00+00:00", "AA==")


def test_a_request_holds_what_python_has_for_each_field_and_none_leaves_it_unset() -> None:
    month = wire.request(
        usage_reports_pb2.GetUsageRequest, month="2026-11", group_by=[weir_client.UsageGrouping.DAY]
    )
    update = wire.request(
        admin_service_pb2.UpdateApiKeyRequest,
        api_key="k",
        name=None,
        strict_parameters=False,
        expire_time=datetime(2026, 11, 27, 12, 0, 0, 5, tzinfo=UTC),
    )
    drain = wire.request(replicas_pb2.DrainReplicaRequest, replica="0", move_after=1.5)
    quota = wire.request(admin_service_pb2.SetQuotaRequest, alert_at=[50, 80])
    amount = wire.request(months_pb2.CreateAdjustmentRequest, amount=Money("USD", -1))

    assert list(month.group_by) == [usage_reports_pb2.USAGE_GROUPING_DAY]
    assert (update.HasField("name"), update.HasField("strict_parameters")) == (False, True)
    assert update.expire_time.nanos == 5_000
    assert (drain.move_after.seconds, drain.move_after.nanos) == (1, 500_000_000)
    assert list(quota.alert_at.values) == [50, 80]
    assert wire.money(amount.amount) == Money("USD", -1)
    for minutes, why in (
        (2**31, "between"),
        (-(2**31) - 1, "between"),
        (True, "a whole number"),
        ("5", "a whole number"),
        (5.5, "a whole number"),
    ):
        with pytest.raises(InvalidRequest, match=f"^window_minutes: must be {why}"):
            wire.request(admin_service_pb2.SetQuotaRequest, window_minutes=minutes)
    with pytest.raises(ParseError, match="no field named"):
        wire.request(
            configuration_pb2.ApplyConfigurationRequest, configuration={"organisations": []}
        )
