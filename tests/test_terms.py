"""A term of keys, limits or prices is offered wherever it is set, shown or configured."""

from __future__ import annotations

from dataclasses import fields

import pytest
from weir.v1 import admin_service_pb2, configuration_pb2, inference_service_pb2
from weir_cli.document import KEY, PRICE, QUOTA
from weir_cli.terms import TERMS

from metering.configuration.configuration import KEY_FIELDS, KeySpec
from metering.core.models import ApiKey, PriceVersion, Quota, QuotaTerms
from metering.pricing.prices import RATES, PriceTerms
from metering.tenants.api_keys import KeyRecord
from metering.tenants.key_terms import KeyTerms

KEY_TERMS = {each.name for each in fields(KeyTerms)}
MESSAGES = (
    admin_service_pb2.ApiKey,
    admin_service_pb2.CreateApiKeyRequest,
    admin_service_pb2.UpdateApiKeyRequest,
    configuration_pb2.ApiKeyConfiguration,
    inference_service_pb2.KeyRestrictions,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.DESCRIPTOR.name)
def test_a_message_about_a_key_has_every_term(message: type) -> None:
    assert set(message.DESCRIPTOR.fields_by_name) >= KEY_TERMS  # type: ignore[attr-defined]


def test_an_update_leaves_a_term_that_it_does_not_name() -> None:
    by_name = admin_service_pb2.UpdateApiKeyRequest.DESCRIPTOR.fields_by_name

    assert all(by_name[each].is_repeated or by_name[each].has_presence for each in KEY_TERMS)


def test_the_table_records_and_configurations_have_every_term() -> None:
    assert set(ApiKey.__table__.columns.keys()) >= KEY_TERMS
    assert {each.name for each in fields(KeyRecord)} >= KEY_TERMS
    assert {each.name for each in fields(KeySpec)} >= KEY_TERMS
    assert set(KEY_FIELDS) >= KEY_TERMS


def test_the_command_line_and_its_file_have_every_term() -> None:
    assert [each.field for each in TERMS["key"]] == [each.name for each in fields(KeyTerms)]
    assert KEY.keys.keys() >= KEY_TERMS


def test_limits_have_every_term_in_calls_files_and_the_table() -> None:
    terms = {each.name for each in fields(QuotaTerms)}
    rows = {each.field for each in TERMS["quota"]} | {"limit_value"}

    for message in (admin_service_pb2.SetQuotaRequest, configuration_pb2.QuotaConfiguration):
        assert set(message.DESCRIPTOR.fields_by_name) >= terms
    assert set(Quota.__table__.columns.keys()) >= terms == rows
    assert terms - {"limit_value"} <= {entry.name for entry in QUOTA.keys.values()}


def test_prices_have_every_term_in_calls_files_and_the_table() -> None:
    terms = {each.name for each in fields(PriceTerms)} - {"effective_at"}

    for message in (admin_service_pb2.SetPriceRequest, configuration_pb2.PriceConfiguration):
        assert set(message.DESCRIPTOR.fields_by_name) >= terms
    assert set(PriceVersion.__table__.columns.keys()) >= set(RATES)
    assert {each.field for each in TERMS["price"]} == {*RATES, "batch_multiplier_milli"}
    assert terms <= {entry.name for entry in PRICE.keys.values()}
