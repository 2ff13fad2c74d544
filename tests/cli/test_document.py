"""Configuration files: errors with line and remedy, values by their type, and round trips."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import configuration_pb2
from weir_cli import yaml_files
from weir_cli.document import (
    KEY,
    MEMBER,
    ORGANIZATION,
    QUOTA,
    RESALE_PRICE,
    TOKEN_ISSUER,
    read_document,
    write_document,
)
from weir_cli.document_fields import Section

GOOD = """\
version: 1
organizations:
- name: acme
  currency: EUR
  quotas:
  - {dimension: cost-per-month, limit: 1_250.50}
  - dimension: tokens-per-minute
    model: demo
    limit: 100000
    for_new_keys: true
    cached_input_weight: 0.25
  projects:
  - name: no
    keys:
    - name: "0123"
      scopes: [admin, inference]
      expires: 2027-06-30
      quotas: []
prices:
- {model: demo, input: 0.15, cached_input: 0.075, output: 0.6}
"""

WRONG = [
    ("organizations:\n- name: a\n  limts: []\n", 3, "organizations[0].limts", "known are name"),
    ("organizations:\n- nane: a\n", 2, "organizations[0].nane", "did you mean `name`?"),
    ("organizations:\n- currency: EUR\n", 2, "organizations[0]", "`name` is missing"),
    (
        "organizations:\n- name: a\n  name: b\n",
        3,
        "organizations[0].name",
        "written before, in line 2",
    ),
    ("organizations:\n- name:\n", 2, "organizations[0].name", "has no value"),
    ("organizations:\n- name: [a]\n", 2, "organizations[0].name", "write a single value"),
    ("organizations:\n  name: a\n", 2, "organizations", "each entry in a line of its own"),
    ("organizations:\n- acme\n", 2, "organizations[0]", "write a mapping"),
    ("- acme\n", 1, "", "write a mapping"),
    ("", 1, "", "the file is empty"),
    ("organizations: [\n", 2, "", "not valid YAML"),
    ("a: 1\n---\nb: 2\n", 2, "", "not valid YAML"),
    ("a: &x [*x]\n", 1, "", "`*x` is part of itself: write its value without the alias"),
    ("version: 2\n", 1, "version", "the supported version is 1"),
    ("organizations: !!python/object:os.system []\n", 1, "", ""),
    ("prices:\n- {model: m, input: 1, output: 1}\n", 2, "prices[0]", "`cached_input` is missing"),
    (
        "prices:\n- {model: m, input: -1, cached_input: 0, output: 1}\n",
        2,
        "prices[0].input",
        "0 or more",
    ),
    (
        "prices:\n- {model: m, input: 0.0000001, cached_input: 0, output: 1}\n",
        2,
        "prices[0].input",
        "finer than a pico",
    ),
]
WRONG_QUOTAS = [
    ("dimension: bananas\n    limit: 1", 4, "dimension", "give one of concurrent-requests"),
    ("dimension: tokens-per-day\n    limit: lots", 5, "limit", "not a number"),
    ("dimension: tokens-per-day\n    limit: 1.5", 5, "limit", "whole numbers"),
    ("dimension: cost-per-month\n    limit: 0.0000000000001", 5, "limit", "finer than a pico"),
    (
        "dimension: tokens-per-day\n    limit: 1\n    enforced: no",
        6,
        "enforced",
        "write true or false",
    ),
    (
        "dimension: tokens-per-day\n    limit: 1\n    input_weight: 0.0001",
        6,
        "input_weight",
        "three decimals",
    ),
    (
        "dimension: tokens-per-day\n    limit: 1\n    override_until: soon",
        6,
        "override_until",
        "2026-12-31T18:00:00Z",
    ),
]


def normal(configuration: Any) -> configuration_pb2.Configuration:
    """Return a message, in which a number and its text are equal."""
    return ParseDict(configuration, configuration_pb2.Configuration())


def test_a_file_becomes_the_configuration_that_it_says() -> None:
    read = read_document(GOOD, prune=False)

    assert read.errors == []
    assert MessageToDict(normal(read.configuration), preserving_proto_field_name=True) == {
        "organizations": [
            {
                "name": "acme",
                "currency_code": "EUR",
                "quotas": [
                    {
                        "dimension": "QUOTA_DIMENSION_COST_PICOS_PER_MONTH",
                        "limit_value": "1250500000000000",
                    },
                    {
                        "dimension": "QUOTA_DIMENSION_TOKENS_PER_MINUTE",
                        "model": "demo",
                        "limit_value": "100000",
                        "for_new_keys": True,
                        "cached_input_weight_milli": "250",
                    },
                ],
                # YAML reads `no` as false and 0123 as a number; here a name stays a name.
                "projects": [
                    {
                        "name": "no",
                        "keys": [
                            {
                                "name": "0123",
                                "scopes": ["admin", "inference"],
                                "expire_time": "2027-06-30T00:00:00Z",
                            }
                        ],
                    }
                ],
            }
        ],
        "prices": [
            {
                "model": "demo",
                "input_picos_per_token": "150000",
                "cached_input_picos_per_token": "75000",
                "output_picos_per_token": "600000",
            }
        ],
    }


def test_only_lists_that_are_there_are_pruned() -> None:
    [organization] = read_document(GOOD, prune=True).configuration["organizations"]

    assert organization["prune_quotas"] is True
    [project] = organization["projects"]
    assert project["prune_keys"] is True
    assert "prune_quotas" not in project, "the file is empty of the project's own limits"
    assert project["keys"][0]["prune_quotas"] is True, "an empty list is a list"


@pytest.mark.parametrize(("content", "line", "location", "remedy"), WRONG)
def test_a_mistake_has_line_and_remedy(content: str, line: int, location: str, remedy: str) -> None:
    errors = read_document(content, prune=False).errors

    if remedy:
        [error] = errors
        assert (error.line, error.location) == (line, location)
        assert remedy in error.message
    else:
        assert errors == [], "a tag is not obeyed: nothing but texts is ever made of a file"


@pytest.mark.parametrize(("quota", "line", "key", "remedy"), WRONG_QUOTAS)
def test_an_invalid_limit_is_reported_too(quota: str, line: int, key: str, remedy: str) -> None:
    [error] = read_document(
        f"organizations:\n- name: a\n  quotas:\n  - {quota}\n", prune=False
    ).errors

    assert (error.line, error.location) == (line, f"organizations[0].quotas[0].{key}")
    assert remedy in error.message


def test_all_mistakes_are_reported_at_once_in_the_order_of_lines() -> None:
    content = (
        GOOD.replace("1_250.50", "many")
        .replace("EUR", "")
        .replace("name: no", "nam: no")
        .replace("0.075", "x")
    )

    assert [error.line for error in read_document(content, prune=False).errors] == [4, 6, 13, 20]


def test_the_servers_mistakes_are_reported_at_the_nearest_location_of_the_file() -> None:
    read = read_document(GOOD, prune=False)

    for path, line, location in (
        ("organizations[0].quotas[1].limit_value", 9, "organizations[0].quotas[1].limit"),
        ("organizations[0].quotas[1].output_weight_milli", 7, "organizations[0].quotas[1]"),
        ("organizations[0].projects[0].keys", 15, "organizations[0].projects[0].keys"),
        ("organizations[7].name", 3, "organizations"),
        ("nothing", 1, ""),
    ):
        error = read.error_at(path, "no")
        assert (error.line, error.location) == (line, location)


def test_parts_may_be_written_once_and_used_again() -> None:
    content = """\
organizations:
- name: a
  quotas: &limits
  - &one {dimension: tokens-per-day, limit: 5}
  - {<<: *one, dimension: tokens-per-month, limit: 6}
- name: b
  quotas: *limits
"""
    read = read_document(content, prune=False)

    assert read.errors == []
    first, second = read.configuration["organizations"]
    assert first["quotas"] == second["quotas"]
    assert [quota["limit_value"] for quota in first["quotas"]] == [5, 6]


def test_a_file_that_grows_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines of nested aliases can expand beyond any memory."""
    monkeypatch.setattr(yaml_files, "NODES_MAX", 1000)
    quotas = ", ".join(["{dimension: tokens-per-day, limit: 1}"] * 50)
    content = f"organizations:\n- &o {{name: a, quotas: [{quotas}]}}\n" + "- *o\n" * 50

    [error] = read_document(content, prune=False).errors

    assert error.line == 2
    assert error.message == "not valid YAML: has more than 1,000 values: split the file"


names = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True) | st.sampled_from(
    ["no", "yes", "null", "on", "y", "e1"]
)
times = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1)).map(
    lambda at: at.replace(tzinfo=UTC).isoformat()[:-6] + "Z"
)
picos = st.integers(0, 10**13)
weights = {
    f"{kind}_weight_milli": st.integers(0, 10**6) for kind in ("input", "cached_input", "output")
}
quotas = st.fixed_dictionaries(
    {"dimension": st.integers(1, 6), "limit_value": st.integers(0, 2**63 - 1)},
    optional={
        "model": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,20}", fullmatch=True),
        "for_new_keys": st.just(True),
        "enforced": st.just(False),
        "alert_at": st.fixed_dictionaries({"values": st.lists(st.integers(1, 1000), max_size=4)}),
        "override_limit_value": st.integers(1, 2**63 - 1),
        "override_end_time": times,
        "override_reason": st.text(
            st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=30
        ),
        **weights,
    },
)
keys = st.fixed_dictionaries(
    {
        "name": st.text(
            st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20
        )
    },
    optional={
        "prefix": st.just("wk_12345678"),
        "scopes": st.lists(
            st.sampled_from(["admin", "billing", "inference"]), unique=True, min_size=1
        ),
        "models": st.lists(st.sampled_from(["demo", "large@2"]), unique=True, min_size=1),
        "strict_parameters": st.just(True),
        "group": st.sampled_from(["free", "no", "10", "é à"]),
        "expire_time": times,
        "quotas": st.lists(quotas, min_size=1, max_size=2),
    },
)
projects = st.fixed_dictionaries(
    {"name": names}, optional={"keys": st.lists(keys, min_size=1, max_size=2)}
)
resale_prices = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("demo"),
        "markup_milli": st.integers(0, 10**6),
        "output_picos_per_token": picos,
        "request_picos": picos,
        "replica_hour_picos": st.integers(0, 10**17),
        "effective_time": times,
    },
)
members = st.fixed_dictionaries(
    {"email": st.just("ann@example.com"), "role": st.sampled_from(["owner", "no"])},
    optional={"project": names},
)
issuers = st.fixed_dictionaries(
    {
        "issuer": st.just("https://login.example.com"),
        "audience": names,
        "projects": st.lists(st.sampled_from(["a=main", "no"]), min_size=1),
    },
    optional={
        "leeway_s": st.integers(0, 300),
        "lifetime_max_s": st.integers(1, 86_400),
        "keys": st.just('{"keys": [{"kty": "EC"}]}'),
        "algorithms": st.lists(st.sampled_from(["ES256", "RS256"]), min_size=1),
        "single_use": st.just(True),
        "end_user_claim": st.sampled_from(["sub", "no"]),
        "label_claims": st.lists(names, min_size=1, max_size=2),
        "max_output_tokens": st.integers(1, 10**6),
        "allowed_networks": st.just(["203.0.113.0/24"]),
        "group": names,
    },
)
organizations = st.fixed_dictionaries(
    {"name": names, "currency_code": st.sampled_from(["EUR", "USD"])},
    optional={
        "resale_prices": st.lists(resale_prices, min_size=1, max_size=3),
        "members": st.lists(members, min_size=1, max_size=2),
        "token_issuers": st.lists(issuers, min_size=1, max_size=2),
        "quotas": st.lists(quotas, min_size=1, max_size=3),
        "projects": st.lists(projects, min_size=1, max_size=2),
    },
)
prices = st.fixed_dictionaries(
    {"model": st.just("m"), "currency_code": st.just("USD")}
    | {f"{kind}_picos_per_token": picos for kind in ("input", "cached_input", "output")}
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "organizations": st.lists(organizations, min_size=1, max_size=2),
        "prices": st.lists(prices, min_size=1, max_size=2),
    },
)


@settings(max_examples=100, deadline=None)
@given(configurations)
def test_a_written_document_reads_back_unchanged(configuration: dict[str, Any]) -> None:
    given_message = normal(configuration)
    exported = MessageToDict(given_message, preserving_proto_field_name=True)

    written = write_document(exported)
    read = read_document(written, prune=False)

    assert read.errors == []
    assert normal(read.configuration) == given_message
    assert yaml.safe_load(written)["version"] == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (QUOTA, configuration_pb2.QuotaConfiguration),
        (KEY, configuration_pb2.ApiKeyConfiguration),
        (RESALE_PRICE, configuration_pb2.ResalePriceConfiguration),
        (MEMBER, configuration_pb2.MemberConfiguration),
        (TOKEN_ISSUER, configuration_pb2.TokenIssuerConfiguration),
        (ORGANIZATION, configuration_pb2.OrganizationConfiguration),
    ],
)
def test_every_attribute_of_an_object_in_the_contract_has_its_line_in_the_table(
    section: Section, message: type[Message]
) -> None:
    """An export would lose a new attribute that files cannot express."""
    assert {entry.name for entry in section.keys.values()} == {
        field.name for field in message.DESCRIPTOR.fields if not field.name.startswith("prune_")
    }


def test_a_billing_profile_is_a_mapping_of_texts() -> None:
    profile = {
        "emails": ["billing@acme.example"],
        "legal_name": "Acme GmbH",
        "postal_code": "01067",
        "country": "NO",
    }
    written = """\
organizations:
- name: acme
  billing_profile:
    emails: [billing@acme.example]
    legal_name: Acme GmbH
    postal_code: 01067
    country: NO
"""

    read = read_document(written, prune=False)
    again = read_document(write_document(read.configuration), prune=False)
    wrong = read_document(
        written.replace("country", "contry").replace("[billing@acme.example]", "x"), prune=False
    )

    assert read.configuration["organizations"][0]["billing_profile"] == profile
    assert again.configuration == read.configuration
    assert [(each.line, each.location) for each in wrong.errors] == [
        (4, "organizations[0].billing_profile.emails"),
        (7, "organizations[0].billing_profile.contry"),
    ]
