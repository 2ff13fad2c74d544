"""Configuration as a whole: idempotent and atomic changes, and all errors reported at once."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import configuration_pb2 as pb

from metering.core.models import GroupMembership, Invitation
from metering.store.db import psycopg_conninfo
from metering.tenants.admin_requests import CHANGES_LOCK_ID
from metering.tenants.invitations import accept_invitation, resend_invitation
from tests.service import MODEL, Service, Tenant, bearer, refused

LATER = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)
NEXT_YEAR = f"{LATER:%Y-%m-%dT%H:%M:%SZ}"


class Admin:
    """Admin who applies configurations."""

    def __init__(
        self, service: Service, stub: Any, tenant: Tenant, secret: str, prefix: str
    ) -> None:
        self.service, self.stub, self.tenant = service, stub, tenant
        self.secret, self.prefix = secret, prefix

    async def apply(
        self, *organizations: dict[str, Any], dry_run: bool = False, **parts: Any
    ) -> pb.ApplyConfigurationResponse:
        """Apply organizations and other parts."""
        request = pb.ApplyConfigurationRequest(dry_run=dry_run)
        ParseDict({"organizations": organizations, **parts}, request.configuration)
        answer: pb.ApplyConfigurationResponse = await self.stub.ApplyConfiguration(
            request, metadata=bearer(self.secret)
        )
        return answer

    async def export(self, organization: str) -> dict[str, Any]:
        """Return the state of one organization."""
        request = pb.ExportConfigurationRequest(organization=organization)
        answer = await self.stub.ExportConfiguration(request, metadata=bearer(self.secret))
        configuration = MessageToDict(answer.configuration, preserving_proto_field_name=True)
        [exported] = configuration["organizations"]
        return dict(exported)

    def audit_count(self) -> int:
        """Return the number of entries in the audit log."""
        [row] = self.service.database.rows("SELECT count(*) AS n FROM audit_log")
        return int(row["n"])


@pytest.fixture
async def admin(service: Service) -> AsyncIterator[Admin]:
    """Yield an admin of a new tenant."""
    tenant = await service.tenant()
    key, secret = await service.new_key(tenant, "admin")
    async with service.channel() as channel:
        yield Admin(service, pb_grpc.AdminServiceStub(channel), tenant, secret, key.prefix)


def team(name: str, **fields: Any) -> dict[str, Any]:
    """Return an organization with limits, a project and two keys."""
    quota = {"dimension": "QUOTA_DIMENSION_TOKENS_PER_MONTH", "limit_value": 1000}
    keys = [
        {
            "name": "copilot",
            "quotas": [
                {
                    "dimension": "QUOTA_DIMENSION_REQUESTS_PER_MINUTE",
                    "limit_value": 9,
                    "enforced": False,
                }
            ],
        },
        {
            "name": "nightly",
            "scopes": ["inference", "billing"],
            "models": [MODEL],
            "expire_time": NEXT_YEAR,
            "max_input_tokens": 900,
            "strict_parameters": True,
            "allowed_networks": ["203.0.113.7"],  # a common spelling of a single address
        },
    ]
    weighted = {
        "dimension": "QUOTA_DIMENSION_TOKENS_PER_DAY",
        "model": MODEL,
        "limit_value": 500,
        "output_weight_milli": 2500,
    }
    raised = {
        "override_limit_value": 800,
        "override_end_time": NEXT_YEAR,
        "override_reason": "launch",
    }
    project = {"name": "search", "quotas": [weighted | raised], "keys": keys}
    return {"name": name, "currency_code": "EUR", "quotas": [quota], "projects": [project]} | fields


def unique() -> str:
    """Return an unused name."""
    return f"a{uuid.uuid4().hex[:16]}"


def brief(changes: Any) -> list[tuple[str, str, str]]:
    """Return the changes in brief."""
    return [
        (pb.ConfigurationChange.Action.Name(each.action)[7:].lower(), each.kind, each.path)
        for each in changes
    ]


def fields_of(change: pb.ConfigurationChange) -> dict[str, tuple[Any, Any]]:
    """Return values before and after by changed field."""
    read = [
        json.loads(text) if text else None
        for each in change.fields
        for text in (each.before_json, each.after_json)
    ]
    return {each.field: (read[2 * n], read[2 * n + 1]) for n, each in enumerate(change.fields)}


async def test_a_configuration_is_applied_and_its_keys_work(service: Service, admin: Admin) -> None:
    name = unique()

    first = await admin.apply(team(name))
    second = await admin.apply(team(name))

    assert brief(first.changes) == [
        ("create", "organization", name),
        ("create", "quota", name),
        ("create", "project", f"{name}/search"),
        ("create", "quota", f"{name}/search"),
        ("create", "key", f"{name}/search/copilot"),
        ("create", "quota", f"{name}/search/copilot"),
        ("create", "key", f"{name}/search/nightly"),
    ]
    assert not second.changes
    assert not second.kept
    assert [fields_of(change) for change in first.changes if change.kind == "key"] == [
        {"scopes": (None, ["inference"])},
        {
            "scopes": (None, ["billing", "inference"]),
            "models": (None, [MODEL]),
            "allowed_networks": (None, ["203.0.113.7/32"]),
            "max_input_tokens": (None, 900),
            "strict_parameters": (None, True),
            "expire_time": (None, NEXT_YEAR),
        },
    ]
    secrets = {change.path: change.secret for change in first.changes if change.secret}
    assert secrets.keys() == {f"{name}/search/copilot", f"{name}/search/nightly"}
    async with service.client(secrets[f"{name}/search/copilot"]) as client:
        limits = {(str(each.dimension), each.limit_value) for each in await client.get_quota(MODEL)}
    assert limits >= {("tokens-per-month", 1000), ("requests-per-minute", 9)}
    assert all(
        secret not in json.dumps(service.database.rows("SELECT after FROM audit_log"))
        for secret in secrets.values()
    )


async def test_an_exported_configuration_applies_without_a_change(admin: Admin) -> None:
    name = unique()
    await admin.apply(team(name))
    await admin.stub.CreateApiKey(
        admin_pb.CreateApiKeyRequest(organization=name, project="search", name="nightly"),
        metadata=bearer(admin.secret),
    )

    exported = await admin.export(name)
    again = await admin.apply(exported)

    assert not again.changes
    assert not again.kept
    assert not again.violations
    keys = exported["projects"][0]["keys"]
    shown = [(key["name"], "prefix" in key) for key in keys]
    assert shown == [("copilot", False), ("nightly", True), ("nightly", True)]


async def test_a_billing_profile_is_applied_as_a_whole_and_exported(admin: Admin) -> None:
    name = unique()
    profile = {
        "emails": ["billing@acme.example"],
        "legal_name": "Acme GmbH",
        "address_line1": "Lindenstraße 1",
        "country": "DE",
    }
    await admin.apply(team(name))

    applied = await admin.apply(team(name, billing_profile=profile))
    untouched = await admin.apply(team(name))
    exported = await admin.export(name)
    wrong = profile | {"country": "Germany"}
    mistaken = await admin.apply({"name": name, "billing_profile": wrong})
    shorter = {"emails": ["billing@acme.example"]}
    changed = await admin.apply({"name": name, "billing_profile": shorter})

    assert brief(applied.changes) == [("update", "billing_profile", name)]
    assert fields_of(applied.changes[0])["emails"] == ([], ["billing@acme.example"])
    assert not untouched.changes
    assert exported["billing_profile"] == profile
    [error] = mistaken.violations
    assert error.field == "organizations[0].billing_profile.country"
    assert fields_of(changed.changes[0])["legal_name"] == ("Acme GmbH", "")


async def test_a_queue_weight_is_applied_kept_and_exported(admin: Admin) -> None:
    name = unique()
    await admin.apply(team(name))

    applied = await admin.apply({"name": name, "queue_weight_milli": "2500"})
    untouched = await admin.apply(team(name))
    mistaken = await admin.apply({"name": name, "queue_weight_milli": "0"})

    assert fields_of(applied.changes[0]) == {"queue_weight_milli": (1000, 2500)}
    assert not untouched.changes
    [error] = mistaken.violations
    assert error.field == "organizations[0].queue_weight_milli"
    assert (await admin.export(name))["queue_weight_milli"] == "2500"


async def test_a_region_is_applied_only_if_the_fleet_has_it(admin: Admin) -> None:
    name = unique()
    await admin.apply(team(name))

    for dry_run in (True, False):
        answer = await admin.apply({"name": name, "region": "mars"}, dry_run=dry_run)
        [error] = answer.violations
        assert error.field == "organizations[0].region"
        assert "there are: none" in error.description
    assert "region" not in await admin.export(name)


async def test_a_profile_that_no_font_shows_is_refused_by_field(admin: Admin) -> None:
    name = unique()
    await admin.apply(team(name))

    for dry_run in (True, False):
        answer = await admin.apply(
            {
                "name": name,
                "billing_profile": {"legal_name": "A", "address_line1": "東京", "country": "JP"},
            },
            dry_run=dry_run,
        )
        [violation] = answer.violations
        assert violation.field == "organizations[0].billing_profile.address_line1"
        assert "no font shows 東 (U+6771)" in violation.description

    assert "billing_profile" not in await admin.export(name)


async def test_a_dry_run_reports_the_same_and_changes_nothing(admin: Admin) -> None:
    name = unique()
    before = admin.audit_count()

    planned = await admin.apply(team(name), dry_run=True)

    assert admin.audit_count() == before
    assert not any(change.secret or change.api_key_prefix for change in planned.changes), (
        "a secret that will never work"
    )
    done = await admin.apply(team(name))
    assert brief(planned.changes) == brief(done.changes)
    assert list(map(fields_of, planned.changes)) == list(map(fields_of, done.changes))


async def test_changes_are_shown_with_old_and_new_values(admin: Admin) -> None:
    name = unique()
    await admin.apply(team(name))
    wanted = team(name)
    wanted["quotas"][0]["limit_value"] = 2000
    search = wanted["projects"][0]
    search["quotas"][0] |= {"output_weight_milli": 1000, "override_limit_value": 900}
    search["keys"][1] |= {
        "scopes": ["inference"],
        "models": [],
        "max_input_tokens": 0,
        "max_output_tokens": 50,
        "strict_parameters": False,
        "allowed_networks": [],
    }
    del search["keys"][1]["expire_time"]

    changed = await admin.apply(wanted)

    assert [(change.kind, fields_of(change)) for change in changed.changes] == [
        ("quota", {"limit_value": (1000, 2000)}),
        ("quota", {"output_weight_milli": (2500, 1000), "override_limit_value": (800, 900)}),
        (
            "key",
            {
                "scopes": (["billing", "inference"], ["inference"]),
                "models": ([MODEL], []),
                "allowed_networks": (["203.0.113.7/32"], []),
                "max_input_tokens": (900, None),
                "max_output_tokens": (None, 50),
                "strict_parameters": (True, False),
                "expire_time": (NEXT_YEAR, None),
            },
        ),
    ]
    assert (await admin.export(name))["quotas"][0]["limit_value"] == "2000"


async def test_thresholds_follow_the_file_and_reset_to_the_default(admin: Admin) -> None:
    name = unique()
    brief = []
    for alert_at in (None, [100, 80, 50], [90, 10], [10, 90], [], None):
        wanted = team(name)
        wanted["quotas"][0] |= {} if alert_at is None else {"alert_at": {"values": alert_at}}
        applied = await admin.apply(wanted)
        brief.append([fields_of(each) for each in applied.changes if each.kind == "quota"])
        exported = (await admin.export(name))["quotas"][0]

    assert brief[1:] == [
        [],
        [{"alert_at": (None, [10, 90])}],
        [],
        [{"alert_at": ([10, 90], [])}],
        [{"alert_at": ([], None)}],
    ]
    assert "alert_at" not in exported


async def test_pruning_removes_what_is_not_listed(service: Service, admin: Admin) -> None:
    """Limits that new keys get by default are in no file: pruning keeps them."""
    name = unique()
    default = {
        "dimension": "QUOTA_DIMENSION_TOKENS_PER_MINUTE",
        "limit_value": 7,
        "for_new_keys": True,
    }
    first = await admin.apply(team(name, quotas=[*team(name)["quotas"], default]))
    keys = [change for change in first.changes if change.kind == "key"]
    [copilot] = [change for change in keys if change.path.endswith("copilot")]
    nightly = {
        "name": "nightly",
        "scopes": ["billing", "inference"],
        "models": [MODEL],
        "max_input_tokens": 900,
        "strict_parameters": True,
        "allowed_networks": ["203.0.113.7"],
        "expire_time": NEXT_YEAR,
        "prune_quotas": True,
    }
    project: dict[str, Any] = {"name": "search", "quotas": [], "keys": [nightly]}

    kept = await admin.apply({"name": name, "quotas": [default], "projects": [project]})
    pruning = project | {"prune_quotas": True, "prune_keys": True}
    pruned = await admin.apply({"name": name, "quotas": [default], "projects": [pruning]})

    assert brief(kept.changes) == []
    assert brief(kept.kept) == [
        ("keep", "quota", name),
        ("keep", "quota", f"{name}/search"),
        ("keep", "key", f"{name}/search/copilot"),
    ]
    search = f"{name}/search"
    assert brief(pruned.changes) == [
        ("delete", "quota", search),
        ("delete", "key", f"{search}/copilot"),
    ]
    assert brief(pruned.kept) == [("keep", "quota", name)], "it is not pruned"
    async with service.stream(copilot.secret) as stream:
        assert await stream.closed() is StatusCode.UNAUTHENTICATED
    exported = await admin.export(name)
    [key] = exported["projects"][0]["keys"]
    assert [quota["limit_value"] for quota in key["quotas"]] == ["7"]


async def test_mistakes_are_located_and_change_nothing(admin: Admin) -> None:
    name = unique()
    before = admin.audit_count()
    wrong = team(name)
    wrong["projects"][0]["keys"][0] |= {"scopes": ["root"], "models": ["larg"]}
    wrong["projects"][0]["keys"][1] |= {"max_output_tokens": -1, "allowed_networks": []}
    wrong["projects"][0]["keys"].append({"name": "away", "allowed_networks": ["10.0.0.1/8"]})
    wrong["projects"][0]["keys"].append({"name": "nightly"})
    wrong["projects"][0]["quotas"] += [
        {"dimension": "QUOTA_DIMENSION_TOKENS_PER_DAY", "model": "nothing", "limit_value": 1},
        {"dimension": "QUOTA_DIMENSION_CONCURRENT_REQUESTS", "limit_value": -1},
        {
            "dimension": "QUOTA_DIMENSION_TOKENS_PER_MINUTE",
            "limit_value": 5,
            "override_limit_value": 9,
        },
        {"limit_value": 5},
    ]
    caps = {"name": "Caps", "projects": [{"name": "fine", "keys": [{"name": ""}]}]}

    dollar = {
        "name": unique(),
        "currency_code": "DOLLAR",
        "projects": [{"name": "fine", "keys": [{"name": ""}]}],
    }

    answer = await admin.apply(
        wrong, caps, {"name": name, "currency_code": "USD"}, dollar, prices=[price("a b")]
    )

    assert {error.field for error in answer.violations} == {
        "organizations[0].projects[0].keys[0].scopes",
        "organizations[0].projects[0].keys[0].models",
        "organizations[0].projects[0].keys[1].max_output_tokens",
        "organizations[0].projects[0].keys[2].allowed_networks",
        "organizations[0].projects[0].keys[3].name",
        "organizations[0].projects[0].quotas[1].model",
        "organizations[0].projects[0].quotas[2].limit_value",
        "organizations[0].projects[0].quotas[3].override_limit_value",
        "organizations[0].projects[0].quotas[4].dimension",
        "organizations[1].name",
        "organizations[1].projects[0].keys[0].name",
        "organizations[2].name",
        "organizations[2].currency_code",
        "organizations[3].currency_code",
        "organizations[3].projects[0].keys[0].name",
        "prices[0].model",
    }
    assert all(error.description for error in answer.violations)
    assert not answer.changes
    assert admin.audit_count() == before


def price(model: str, output: int = 3) -> dict[str, Any]:
    """Return prices of a model."""
    return {
        "model": model,
        "input_picos_per_token": 2,
        "cached_input_picos_per_token": 1,
        "output_picos_per_token": output,
    }


async def test_a_price_gets_a_version_only_where_it_differs(admin: Admin) -> None:
    model = f"m{uuid.uuid4().hex[:8]}"

    first = await admin.apply(prices=[price(model)])
    same = await admin.apply(prices=[price(model)])
    dearer = await admin.apply(prices=[price(model, output=4)])

    assert brief(first.changes) == [("create", "price", f"{model} in USD")]
    assert not same.changes
    [change] = dearer.changes
    assert fields_of(change) == {"output_picos_per_token": (3, 4)}


async def test_a_price_of_reasoning_is_that_of_output_unless_it_is_stated(admin: Admin) -> None:
    model = f"m{uuid.uuid4().hex[:8]}"
    stated = {"reasoning_picos_per_token": 9}

    answers = [
        await admin.apply(prices=[price(model) | each])
        for each in (stated, stated, {}, {"reasoning_picos_per_token": 3}, {})
    ]

    assert [[fields_of(change) for change in answer.changes] for answer in answers[1:]] == [
        [],
        [{"reasoning_picos_per_token": (9, None)}],
        [],
        [],
    ]


async def test_admins_cannot_remove_their_own_access(admin: Admin) -> None:
    """Neither by pruning the call's key, nor by removing its scope or its time."""
    own = admin.tenant.name
    project = {"name": "main", "prune_keys": True}
    without_scope = {"name": "main", "keys": [{"name": "more", "scopes": ["inference"]}]}
    ended = {"name": "more", "scopes": ["admin"], "expire_time": "2020-01-01T00:00:00Z"}
    past = {"name": "main", "keys": [ended]}

    for wanted in (project, without_scope, past):
        answer = await admin.apply({"name": own, "projects": [wanted]})
        [error] = answer.violations
        assert ".keys" in error.field, wanted
    assert not (await admin.apply({"name": own, "projects": [{"name": "main"}]})).changes


async def test_two_admins_at_once_make_one_of_each(service: Service, admin: Admin) -> None:
    """The second admin's plan begins where the first one's ended."""
    name = unique()

    answers = await asyncio.gather(*(admin.apply(team(name)) for _ in range(4)))

    assert sorted(len(answer.changes) for answer in answers) == [0, 0, 0, 7]
    assert not any(answer.violations for answer in answers)


async def test_applying_needs_the_scope_of_an_admin(service: Service, admin: Admin) -> None:
    request = pb.ApplyConfigurationRequest()
    refusal = await refused(
        admin.stub.ApplyConfiguration(request, metadata=bearer(admin.tenant.secret))
    )

    assert refusal.code is StatusCode.PERMISSION_DENIED
    impossible = pb.QuotaConfiguration(limit_value=1, override_end_time=Timestamp(seconds=2**62))
    broken = pb.Configuration(
        organizations=[pb.OrganizationConfiguration(name="x", quotas=[impossible])]
    )
    answer = await admin.stub.ApplyConfiguration(
        pb.ApplyConfigurationRequest(configuration=broken), metadata=bearer(admin.secret)
    )
    fields = {error.field for error in answer.violations}
    assert "organizations[0].quotas[0].override_limit_value" in fields


async def test_waiting_for_a_configuration_has_a_reason(service: Service, admin: Admin) -> None:
    """A configuration's lock blocks other ones and single changes beyond their lock timeout."""
    document = pb.ApplyConfigurationRequest(
        configuration=ParseDict(
            {"organizations": [{"name": admin.tenant.name}]}, pb.Configuration()
        )
    )
    with psycopg.connect(psycopg_conninfo(service.database_url)) as applying:
        applying.execute("SELECT pg_advisory_xact_lock(%s)", (CHANGES_LOCK_ID,))
        whole, single = await asyncio.gather(
            refused(admin.stub.ApplyConfiguration(document, metadata=bearer(admin.secret))),
            refused(
                admin.stub.CreateOrganization(
                    admin_pb.CreateOrganizationRequest(name="o"), metadata=bearer(admin.secret)
                )
            ),
        )

    for refusal in (whole, single):
        assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "CONCURRENT_CHANGES")
        assert refusal.retry_after_s == 5.0
        assert "Another configuration is being applied" in refusal.status.message
    await admin.apply()


async def test_resale_prices_and_groups_are_applied_exported_and_pruned(admin: Admin) -> None:
    wanted = team(unique())
    wanted["resale_prices"] = [
        {"markup_milli": "1250"},
        {"model": MODEL, "markup_milli": "1000", "replica_hour_picos": "4000000000000"},
    ]
    wanted["projects"][0]["keys"][0]["group"] = "free"
    wanted["quotas"].append(
        {"dimension": "QUOTA_DIMENSION_REQUESTS_PER_DAY", "for_each": "key:free", "limit_value": 7}
    )
    first = await admin.apply(wanted)
    exported = await admin.export(wanted["name"])
    again = await admin.apply(exported)
    wanted["resale_prices"] = [{"markup_milli": "1500"}]
    kept = await admin.apply(wanted)
    pruned = await admin.apply(wanted | {"prune_resale_prices": True})

    name = wanted["name"]
    kinds = [(each.kind, each.path) for each in first.changes]
    assert kinds[1:3] == [
        ("resale_price", f"all models of {name}"),
        ("resale_price", f"{MODEL} of {name}"),
    ]
    assert not [*again.changes, *again.kept, *again.violations]
    assert exported["projects"][0]["keys"][0]["group"] == "free"
    assert [fields_of(each) for each in kept.changes] == [{"markup_milli": (1250, 1500)}]
    assert [each.path for each in kept.kept] == [f"{MODEL} of {name}"]
    assert [each.path for each in pruned.changes] == [f"{MODEL} of {name}"]


async def test_members_are_invited_changed_exported_and_pruned(admin: Admin) -> None:
    """A file alone makes no member, and no token is in an export."""
    wanted = team(unique())
    name, ann, bob = wanted["name"], f"ann@{unique()}.example", f"bob@{unique()}.example"
    wanted["members"] = [
        {"email": f" {ann.upper()}", "role": "owner"},
        {"email": bob, "role": "viewer", "project": "search"},
    ]

    dry = await admin.apply(wanted, dry_run=True)
    first = await admin.apply(wanted)
    again = await admin.apply(wanted)
    exported = await admin.export(name)
    anew = await admin.apply(exported | {"prune_members": True})

    made = [each for each in first.changes if each.kind == "invitation"]
    assert [each.path for each in made] == [f"{name}/{ann}", f"{name}/{bob}"]
    assert [each.secret for each in dry.changes if each.kind == "invitation"] == ["", ""]
    assert not [*again.changes, *anew.changes, *anew.kept]
    assert [each["role"] for each in exported["members"]] == ["owner", "viewer"]
    assert "wi_" not in json.dumps(exported)
    async with admin.service.session() as session:
        for each in made:
            await accept_invitation(session, token=each.secret)
    joined = await admin.apply(exported)
    wanted["members"][1] = {"email": bob, "role": "finance"}
    changed = await admin.apply(wanted)
    wanted["members"] = [{"email": ann, "role": "owner"}]
    kept = await admin.apply(wanted)
    pruned = await admin.apply(wanted | {"prune_members": True})
    last = await admin.apply({"name": name, "members": [], "prune_members": True})
    moved = await admin.apply(
        {"name": name, "members": [{"email": ann, "role": "owner", "project": "other"}]}
    )
    twice = [{"email": ann, "role": "king"}, {"email": ann, "role": "owner"}]
    wrong = await admin.apply({"name": name, "members": twice})

    assert not [*joined.changes, *joined.kept]
    [change] = changed.changes
    assert (change.kind, fields_of(change)) == ("member", {"role": ("viewer", "finance")})
    [left] = [each for each in kept.kept if each.kind == "member"]
    assert left.path == f"{name}/{bob}"
    assert [(each.action, each.path) for each in pruned.changes] == [
        (pb.ConfigurationChange.ACTION_DELETE, f"{name}/{bob}")
    ]
    assert "owner" in last.violations[0].description, "the last owner stays"
    assert [each.field for each in moved.violations] == ["organizations[0].members[0].project"]
    assert [each.field for each in wrong.violations] == [
        "organizations[0].members[1].email",
        "organizations[0].members[0].role",
    ]


async def test_members_of_groups_are_not_of_the_configuration(admin: Admin) -> None:
    """Their provider would undo each change at the next sign-in."""
    name, email = unique(), f"ann@{unique()}.example"
    await admin.apply(team(name, members=[{"email": email, "role": "viewer"}]))
    async with admin.service.session() as session:
        _, token = await resend(session, email)
        accepted = await accept_invitation(session, token=token)
        membership = {"membership_id": accepted.member.membership_id, "provider": "corp"}
        session.add(GroupMembership(**membership))
    pruned = await admin.apply({"name": name, "prune_members": True})
    exported = await admin.export(name)
    wrong = await admin.apply({"name": name, "members": [{"email": email, "role": "admin"}]})

    assert not pruned.changes
    assert {each.kind for each in pruned.kept} == {"project", "quota"}
    assert "members" not in exported
    assert "group of corp" in wrong.violations[0].description


async def test_token_issuers_are_trusted_exported_and_pruned(admin: Admin) -> None:
    wanted = team(unique())
    name, url = wanted["name"], f"https://{unique()}.example"
    issuer = {
        "issuer": url,
        "audience": "weir",
        "projects": ["a=search"],
        "project_claim": "team",
        "leeway_s": 0,
        "label_claims": ["team", "app"],
        "single_use": True,
        "models": [MODEL],
        "allowed_networks": ["203.0.113.7"],
    }
    wanted["token_issuers"] = [issuer, {"issuer": url, "audience": "b", "projects": ["search"]}]

    first = await admin.apply(wanted)
    again = await admin.apply(wanted)
    exported = await admin.export(name)
    anew = await admin.apply(exported | {"prune_token_issuers": True})
    narrow = await admin.apply({"name": name, "token_issuers": [issuer | {"max_input_tokens": 9}]})
    other = {"name": name, "token_issuers": [issuer | {"end_user_claim": "sub"}]}
    refused_ = await admin.apply(other)
    replaced = await admin.apply(other | {"prune_token_issuers": True})
    settled = await admin.apply(other)

    paths = [f"{name}/{url} for {each}" for each in ("weir", "b")]
    assert [each.path for each in first.changes if each.kind == "token_issuer"] == paths
    assert not [*again.changes, *again.kept, *anew.changes, *anew.kept]
    assert [each.get("requires_id", False) for each in exported["token_issuers"]] == [False, True]
    [change] = narrow.changes
    assert fields_of(change) == {"max_input_tokens": (None, 9)}
    assert [each.path for each in narrow.kept if each.kind == "token_issuer"] == paths[1:]
    assert "another end_user_claim" in refused_.violations[0].description
    assert [(each.action, each.path) for each in replaced.changes] == [
        (pb.ConfigurationChange.ACTION_UPDATE, paths[0]),
        (pb.ConfigurationChange.ACTION_DELETE, paths[1]),
    ]
    assert fields_of(replaced.changes[0]) == {
        "end_user_claim": ("", "sub"),
        "max_input_tokens": (9, None),
    }
    assert not settled.changes
    for field, value in (
        ("issuer", "http://login.example.com"),
        ("keys_url", "https://[::1]/keys"),
        ("keys", "{}"),
        ("algorithms", ["HS256"]),
        ("projects", ["search"]),
        ("leeway_s", 301),
        ("models", ["unknown"]),
    ):
        bad = issuer | {"audience": "new", field: value}
        found = await admin.apply({"name": name, "token_issuers": [bad]})
        at = [each.field for each in found.violations]
        assert at == [f"organizations[0].token_issuers[0].{field}"], (field, found.violations)
    absent = await admin.apply(
        {"name": name, "token_issuers": [issuer | {"audience": "new", "projects": ["a=nowhere"]}]}
    )
    assert absent.violations[0].field.startswith("organizations[0].token_issuers[0]")


async def resend(session: AsyncSession, email: str) -> tuple[object, str]:
    """Give the invitation of an address another token."""
    [found] = await session.scalars(select(Invitation).where(Invitation.email == email))
    return await resend_invitation(session, invitation=str(found.id), actor="test")
