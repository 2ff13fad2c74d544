"""Values are read by field names: every field and member has its source."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest
import weir_client
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
    Money,
    accounts,
    alerts,
    billing_terms,
    bills,
    live,
    models,
    quote,
    receipts,
    replicas,
    usage,
    values,
    wire,
)
from weir_client.plain import Value, plain

# The value, its message, and its fields without a source in the message.
PAIRS: tuple[tuple[Any, Any, set[str]], ...] = (
    (accounts.ApiKey, admin_service_pb2.ApiKey, set()),
    (accounts.AuditEntry, admin_service_pb2.AuditEntry, set()),
    (accounts.BillingProfile, types_pb2.BillingProfile, set()),
    (accounts.CreatedApiKey, admin_service_pb2.CreateApiKeyResponse, set()),
    (accounts.MonthReport, billing_service_pb2.GetMonthReportResponse, set()),
    (accounts.MonthReportLine, billing_service_pb2.MonthReportLine, set()),
    (accounts.Organization, admin_service_pb2.Organization, set()),
    (accounts.Project, admin_service_pb2.Project, set()),
    (accounts.RotatedApiKey, admin_service_pb2.RotateApiKeyResponse, set()),
    (alerts.Alert, alerts_pb2.Alert, set()),
    (alerts.AlertWebhook, alerts_pb2.AlertWebhook, set()),
    (alerts.CreatedAlertWebhook, alerts_pb2.SetAlertWebhookResponse, set()),
    (billing_terms.CreditBalance, plans_pb2.GetCreditBalanceResponse, set()),
    (billing_terms.CreditGrant, plans_pb2.CreditGrant, set()),
    (billing_terms.Plan, plans_pb2.Plan, {"existed"}),
    (billing_terms.PlanAssignment, plans_pb2.PlanAssignment, {"existed"}),
    (billing_terms.PlanList, plans_pb2.ListPlansResponse, set()),
    (billing_terms.PriceList, prices_pb2.ListPricesResponse, set()),
    (billing_terms.PriceVersion, prices_pb2.PriceVersion, set()),
    (billing_terms.SimulatedCustomer, plans_pb2.SimulatedCustomer, set()),
    (bills.Adjustment, months_pb2.Adjustment, set()),
    (bills.ClosedMonth, months_pb2.CloseMonthResponse, set()),
    (bills.Invoice, months_pb2.Invoice, {"credit_notes"}),
    (bills.InvoiceLine, months_pb2.InvoiceLine, set()),
    (bills.InvoicePayment, months_pb2.InvoicePayment, set()),
    (bills.Month, months_pb2.Month, set()),
    (bills.MonthVerification, months_pb2.VerifyMonthResponse, set()),
    (live.AppliedConfiguration, configuration_pb2.ApplyConfigurationResponse, set()),
    (live.ConfigurationChange, configuration_pb2.ConfigurationChange, set()),
    (live.KilledRequest, live_requests_pb2.KillRequestResponse, set()),
    (live.LiveRequest, live_requests_pb2.LiveRequest, set()),
    (live.LiveView, live_requests_pb2.ListLiveRequestsResponse, set()),
    (live.RecordedRequest, live_requests_pb2.GetRequestResponse, set()),
    (models.Model, inference_service_pb2.Model, set()),
    (models.Price, inference_service_pb2.Price, set()),
    (quote.Quote, inference_service_pb2.QuoteResponse, set()),
    (receipts.Receipt, receipts_pb2.Receipt, {"admitted_at_us", "settled_at_us"}),
    (receipts.ReceiptMonth, receipt_service_pb2.GetReceiptMonthResponse, set()),
    (replicas.DrainedReplica, replicas_pb2.DrainReplicaResponse, set()),
    (replicas.Replica, replicas_pb2.Replica, set()),
    (replicas.ReplicaDrain, replicas_pb2.ReplicaDrain, set()),
    (replicas.ReplicaList, replicas_pb2.ListReplicasResponse, set()),
    (replicas.UndrainedReplica, replicas_pb2.UndrainReplicaResponse, set()),
    (usage.UsageForecast, usage_reports_pb2.GetForecastResponse, set()),
    (usage.UsageRow, usage_reports_pb2.UsageRow, set()),
    (values.Admitted, inference_service_pb2.AdmittedFrame, set()),
    (values.Generation, inference_service_pb2.Generation, set()),
    (values.KeyRestrictions, inference_service_pb2.KeyRestrictions, set()),
    (values.Progress, inference_service_pb2.ProgressFrame, set()),
    (values.QuotaStatus, types_pb2.QuotaStatus, set()),
    (values.Timings, types_pb2.Timings, set()),
    (values.Usage, types_pb2.Usage, set()),
)
ENUMERATIONS = (
    (accounts.TokenKind, billing_service_pb2.TokenKind),
    (alerts.AlertDeliveryState, alerts_pb2.AlertDeliveryState),
    (bills.AdjustmentState, months_pb2.AdjustmentState),
    (bills.DocumentFormat, months_pb2.MonthDocumentFormat),
    (bills.MonthState, months_pb2.MonthState),
    (bills.PaymentState, months_pb2.PaymentState),
    (live.ChangeAction, configuration_pb2.ConfigurationChange.Action),
    (live.KillResult, live_requests_pb2.KillRequestResponse.Result),
    (live.RequestPhase, live_requests_pb2.RequestPhase),
    (models.ModelTask, inference_service_pb2.ModelTask),
    (replicas.ReplicaState, replicas_pb2.ReplicaState),
    (usage.MonthExportFormat, usage_reports_pb2.MonthExportFormat),
    (usage.UsageGrouping, usage_reports_pb2.UsageGrouping),
    (values.FinishReason, types_pb2.FinishReason),
    (values.GenerationState, inference_service_pb2.Generation.State),
    (values.QuotaDimension, types_pb2.QuotaDimension),
    (values.QuotaSubject, types_pb2.QuotaSubject),
    (values.Stage, inference_service_pb2.ProgressFrame.Stage),
)

RETURNED = [
    name for name in weir_client.__all__ if dataclasses.is_dataclass(getattr(weir_client, name))
]


@pytest.mark.parametrize(("kind", "message", "untold"), PAIRS)
def test_every_field_of_a_value_has_its_source_in_the_message(
    kind: Any, message: Any, untold: set[str]
) -> None:
    taken = {name for name, _ in wire._takes(kind, message.DESCRIPTOR)}

    assert {each.name for each in fields(kind)} - taken == untold


@pytest.mark.parametrize(("kind", "wrapper"), ENUMERATIONS)
def test_an_enumeration_has_the_members_of_the_contract(kind: Any, wrapper: Any) -> None:
    known = wire.numbers(kind, wrapper.DESCRIPTOR)

    assert set(known) == set(kind)
    assert set(known.values()) | {0} == set(wrapper.values())


def test_absent_values_are_none_or_the_default_and_newer_ones_unspecified() -> None:
    key = wire.read(accounts.ApiKey, admin_service_pb2.ApiKey(name="web", max_input_tokens=0))
    month = wire.read(bills.Month, months_pb2.Month(state=99))  # type: ignore[arg-type]
    price = wire.read(models.Price, inference_service_pb2.Price())
    model = wire.read(models.Model, inference_service_pb2.Model())

    assert (key.create_time, key.max_input_tokens, key.scopes) == (None, None, ())
    assert (month.state, month.total, month.payments) == (bills.MonthState.UNSPECIFIED, None, ())
    assert (price.tier, model.task, model.price) == ("interactive", models.ModelTask.GENERATE, None)


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
        wire.read(live.LiveRequest, request),
        wire.read(billing_terms.Plan, plan, existed=True),
    )
    read_generation = wire.read(values.Generation, generation)

    assert (read_request.age_s, read_request.admit_time, read_request.expire_time) == (
        1.5,
        noon,
        None,
    )
    assert (read_plan.name, read_plan.configuration, read_plan.existed) == (
        "start",
        {"name": "start"},
        True,
    )
    assert (dict(read_generation.labels), str(read_generation.cost)) == (
        {"team": "search"},
        "-1.50 USD",
    )


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
