"""Limits on end users and labels over every API: setting, refusals, lists, and isolation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from grpc import StatusCode
from weir.v1 import end_users_pb2, types_pb2

from tests.calls import Calls, calls
from tests.e2e.openai_clients import connect, user_message
from tests.service import MODEL, Refusal, Service, Tenant, start

PER_MINUTE = types_pb2.QUOTA_DIMENSION_REQUESTS_PER_MINUTE
PER_DAY = types_pb2.QUOTA_DIMENSION_TOKENS_PER_DAY
ORGANIZATION = types_pb2.QUOTA_SUBJECT_ORGANIZATION
PROJECT = types_pb2.QUOTA_SUBJECT_PROJECT
END_USER = types_pb2.QUOTA_SUBJECT_END_USER
LABEL = types_pb2.QUOTA_SUBJECT_LABEL
CHAT: Any = {"model": MODEL, "messages": user_message("Hi"), "max_tokens": 2}


class Admin:
    """Administrator of one customer."""

    def __init__(self, service: Service, tenant: Tenant, call: Calls) -> None:
        self.service, self.tenant, self.call = service, tenant, call

    async def set(self, limit_value: int, dimension: Any = PER_MINUTE, **fields: Any) -> Any:
        """Set a limit within the organization; return its status."""
        given = {"subject": ORGANIZATION, "subject_ref": self.tenant.name} | fields
        answer = await self.call("SetQuota", dimension=dimension, limit_value=limit_value, **given)
        return answer.quota

    async def end(self, **fields: Any) -> Refusal | None:
        """Make one request with the customer's key; return its refusal."""
        async with self.service.stream(self.tenant.secret) as stream:
            request_id = await stream.begin(max_output_tokens=2, **fields)
            frame = await stream.end(request_id)
            if frame.WhichOneof("kind") == "finished":
                return None
            return await stream.failed(request_id)

    async def left(self, **fields: Any) -> list[tuple[str, int, int]]:
        """Return what the customer's key sees: subject, limit and remainder of each quota."""
        async with calls(self.service, self.tenant.secret) as call:
            found = await call("GetQuota", **fields)
        return [
            (each.subject_name, each.limit_value, each.remaining_value) for each in found.quotas
        ]


@pytest.fixture
async def admin(service: Service, tenant: Tenant) -> AsyncIterator[Admin]:
    """Yield an administrator, whose own key is another customer's."""
    operator = await service.tenant(scopes=("admin",))
    async with calls(service, operator.secret) as call:
        yield Admin(service, tenant, call)


async def test_each_end_user_has_the_limit_of_a_selector(admin: Admin) -> None:
    selector = await admin.set(2, for_each="end_user")

    assert [await admin.end(end_user="alice") for _ in range(2)] == [None, None]
    refusal = await admin.end(end_user="alice")
    assert refusal is not None
    assert await admin.end(end_user="bob") is None
    assert await admin.end() is None, "no end user, no limit"

    assert (refusal.code, refusal.reason) == (StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert refusal.status.message.startswith("End user alice of your organization may make 2 ")
    facts = refusal.info.metadata
    assert (facts["subject"], facts["subject_name"]) == ("end-user", "alice")
    assert refusal.retry_after_s is not None
    assert (selector.for_each, selector.subject_name) == ("end_user", admin.tenant.name)


async def test_a_single_limit_wins_over_a_selector_and_gives_the_row_back(admin: Admin) -> None:
    await admin.set(1, for_each="end_user")
    assert await admin.end(end_user="alice") is None
    assert await admin.end(end_user="alice") is not None

    own = await admin.set(3, end_user="alice")
    assert (own.subject, own.subject_name) == (END_USER, "alice")
    assert (own.within_name, own.used_value, own.selector_id) == (admin.tenant.name, 1, "")
    assert await admin.end(end_user="alice") is None
    assert await admin.left(end_user="alice") == [("alice", 3, 1)]

    await admin.call("DeleteQuota", quota_id=own.quota_id)
    assert await admin.left(end_user="alice") == [("alice", 1, -1)]
    assert await admin.end(end_user="alice") is not None
    [status] = (
        await admin.call("ListQuotas", organization=admin.tenant.name, end_user="alice")
    ).quotas
    refusal = await admin.call.refused("DeleteQuota", quota_id=status.quota_id)
    assert refusal.fields == ["quota_id"], "one that a selector gives"


async def test_labels_are_limited_by_value_and_by_selector(admin: Admin) -> None:
    project = f"{admin.tenant.name}/main"
    await admin.set(1, for_each="label:team", subject=PROJECT, subject_ref=project)
    await admin.set(2, label="team=search", subject=PROJECT, subject_ref=project)

    search, ads = {"team": "search"}, {"team": "ads", "other": "x"}
    assert [await admin.end(labels=ads) is None for _ in range(2)] == [True, False]
    assert [await admin.end(labels=search) is None for _ in range(3)] == [True, True, False]
    refusal = await admin.end(labels=ads)
    assert refusal is not None
    assert refusal.status.message.startswith("Label team=ads of project main may make 1 ")
    assert refusal.info.metadata["subject_name"] == "team=ads"
    assert await admin.end(labels={"other": "x"}) is None


async def test_a_key_learns_what_an_end_user_may_still_spend(admin: Admin) -> None:
    await admin.set(5, for_each="end_user")
    await admin.set(9, for_each="label:team")

    assert await admin.left() == []
    assert await admin.left(end_user="new") == [("new", 5, 5)], "before its first request"
    assert await admin.left(labels={"team": "a", "other": "b"}) == [("team=a", 9, 9)]
    await admin.end(end_user="new", labels={"team": "a"})
    both = await admin.left(end_user="new", labels={"team": "a"}, model=MODEL)
    assert both == [("new", 5, 4), ("team=a", 9, 8)]
    async with calls(admin.service, admin.tenant.secret) as call:
        await admin.set(1, end_user="new")
        quote = await call("Quote", start=start(max_output_tokens=2, end_user="new").start)
    assert (quote.would_admit, [each.subject_name for each in quote.failing_quotas]) == (
        False,
        ["new"],
    )


async def test_http_says_who_is_limited_and_when_to_try_again(admin: Admin) -> None:
    await admin.set(1, for_each="end_user")
    with connect(admin.service, admin.tenant.secret) as client:
        first = client.chat.completions.with_raw_response.create(**CHAT, user="alice")
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT, user="alice")

    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    headers = refused.value.response.headers
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 <= int(headers["retry-after"]) <= 60
    assert refused.value.code == "rate_limit_exceeded"
    assert "End user alice of your organization" in refused.value.message


async def test_a_rolling_window_is_shown_wherever_limits_are(admin: Admin) -> None:
    window = {"dimension": types_pb2.QUOTA_DIMENSION_REQUESTS_PER_WINDOW, "for_each": "end_user"}
    await admin.set(1, **window, window_minutes=300)
    await admin.set(5, **window, window_minutes=10_080)
    refused = await admin.call.refused(
        "SetQuota", subject=ORGANIZATION, subject_ref=admin.tenant.name, limit_value=1, **window
    )
    assert refused.fields == ["window_minutes"]

    with connect(admin.service, admin.tenant.secret) as client:
        first = client.chat.completions.with_raw_response.create(**CHAT, user="alice")
        with pytest.raises(openai.RateLimitError) as over_http:
            client.chat.completions.create(**CHAT, user="alice")
    over_grpc = await admin.end(end_user="alice")
    async with calls(admin.service, admin.tenant.secret) as call:
        found = (await call("GetQuota", end_user="alice")).quotas
        quote = await call("Quote", start=start(max_output_tokens=2, end_user="alice").start)

    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert "may make 1 request in any 300 minutes and has made 1" in over_http.value.message
    assert over_http.value.code == "insufficient_quota"
    assert over_grpc is not None
    assert over_grpc.info.metadata["dimension"] == "requests-per-window"
    assert over_grpc.info.metadata["window_minutes"] == "300"
    waits = [
        int(over_http.value.response.headers["retry-after"]),
        over_grpc.retry_after_s or 0,
        quote.retry_delay.seconds,
    ]
    assert all(300 * 60 < each <= 310 * 60 for each in waits), waits
    assert [(each.window_minutes, each.remaining_value, each.binding) for each in found] == [
        (300, 0, True),
        (10_080, 4, True),
    ]


async def test_a_lifetime_budget_ends_without_a_retry(admin: Admin) -> None:
    lifetime = types_pb2.QUOTA_DIMENSION_REQUESTS_PER_LIFETIME
    status = await admin.set(1, dimension=lifetime, for_each="end_user")
    with connect(admin.service, admin.tenant.secret) as client:
        first = client.chat.completions.with_raw_response.create(**CHAT, user="alice")
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT, user="alice")

    assert list(status.alert_at) == [50, 80, 100]
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-reset-requests" not in first.headers
    assert refused.value.code == "insufficient_quota"
    assert "may make 1 request in total and has made 1" in refused.value.message
    assert "retry-after" not in refused.value.response.headers
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_name_of_full_length_is_set_listed_and_shown(admin: Admin) -> None:
    longest, label = "é" * 256, "k" * 64 + "=" + "v" * 512
    await admin.set(1, end_user=longest)
    await admin.set(1, end_user="zoe")
    await admin.set(2, label=label)
    who = {"organization": admin.tenant.name}
    found = []
    for prefix in ("z", longest):
        page = await admin.call("ListEndUsers", prefix=prefix, **who)
        found += [each.name for each in page.end_users]
    assert found == ["zoe", longest]
    page = await admin.call("ListEndUsers", page_size=1, **who)
    rest = await admin.call("ListEndUsers", page_token=page.next_page_token, **who)
    assert [each.name for each in (*page.end_users, *rest.end_users)] == ["zoe", longest]
    shown = await admin.call("GetEndUser", end_user=longest, **who)
    assert [each.limit_value for each in shown.quotas] == [1]
    key, _, value = label.partition("=")
    assert await admin.end(end_user=longest, labels={key: value}) is None
    assert await admin.left(end_user=longest, labels={key: value}) == [
        (longest, 1, 0),
        (label, 2, 1),
    ]


async def test_end_users_are_listed_by_name_in_pages(admin: Admin) -> None:
    names = ["al", "alice", "bob", "Ålice", "albert", "b%b"]
    for name in names:
        await admin.set(1, end_user=name)
    ordered = sorted(names, key=str.encode)

    found, token = [], ""
    for _ in range(3):
        page = await admin.call(
            "ListEndUsers", organization=admin.tenant.name, page_size=2, page_token=token
        )
        found += [each.name for each in page.end_users]
        token = page.next_page_token
    assert (found, token) == (ordered, "")
    for prefix in ("al", "b%", "Å", "x"):
        page = await admin.call("ListEndUsers", organization=admin.tenant.name, prefix=prefix)
        expected = [name for name in ordered if name.startswith(prefix)]
        assert [each.name for each in page.end_users] == expected


async def test_an_end_user_is_shown_with_its_limits(admin: Admin) -> None:
    await admin.set(7, for_each="end_user")
    await admin.set(1000, PER_DAY, end_user="alice")
    before = await admin.call("GetEndUser", organization=admin.tenant.name, end_user="alice")
    await admin.end(end_user="alice")
    after = await admin.call("GetEndUser", organization=admin.tenant.name, end_user="alice")

    def brief(answer: Any) -> list[tuple[int, int, bool]]:
        return [(each.limit_value, each.used_value, each.quota_id != "") for each in answer.quotas]

    archived, active = (
        end_users_pb2.END_USER_STATE_ARCHIVED,
        end_users_pb2.END_USER_STATE_ACTIVE,
    )
    assert (before.end_user.name, before.end_user.state) == ("alice", archived)
    assert after.end_user.state == active
    assert [each[:2] for each in brief(before)] == [(7, 0), (1000, 0)]
    assert [each[2] for each in brief(before)] == [False, True], "the selector's is to come"
    assert brief(after)[0] == (7, 1, True)
    assert len({each.end_user.end_user_id for each in (before, after)}) == 1


async def test_another_customer_neither_sees_nor_limits_these_end_users(
    service: Service, admin: Admin
) -> None:
    await admin.set(1, end_user="alice")
    await admin.set(1, label="team=search")
    await admin.end(end_user="alice", labels={"team": "search"})
    other = await service.tenant()
    theirs = Admin(service, other, admin.call)

    assert await theirs.left(end_user="alice", labels={"team": "search"}) == []
    for _ in range(2):
        assert await theirs.end(end_user="alice", labels={"team": "search"}) is None
    await theirs.set(0, for_each="end_user")
    await theirs.set(0, for_each="label:team")
    assert await theirs.end(end_user="alice") is not None
    assert await admin.end(end_user="bob", labels={"team": "ads"}) is None
    page = await admin.call("ListEndUsers", organization=other.name)
    assert [each.name for each in page.end_users] == ["alice"]
    async with calls(service, other.secret) as call:
        for name in ("ListEndUsers", "GetEndUser", "ListQuotas"):
            refusal = await call.refused(name, organization=admin.tenant.name)
            assert refusal.code is StatusCode.PERMISSION_DENIED


WRONG: list[tuple[str, dict[str, Any], str]] = [  # call, fields, and the one that is invalid
    ("SetQuota", {"for_each": "team"}, "for_each"),
    ("SetQuota", {"for_each": "label:"}, "for_each"),
    ("SetQuota", {"for_each": "label:" + "k" * 65}, "for_each"),
    ("SetQuota", {"for_each": "end_user", "end_user": "a"}, "end_user"),
    ("SetQuota", {"for_each": "end_user", "for_new_keys": True}, "for_each"),
    ("SetQuota", {"end_user": "a", "label": "a=b"}, "label"),
    ("SetQuota", {"end_user": " a"}, "end_user"),
    ("SetQuota", {"end_user": "é" * 300}, "end_user"),
    ("SetQuota", {"end_user": "sk-proj-0123456789abcdefghijklmnop"}, "end_user"),
    ("SetQuota", {"label": "team"}, "label"),
    ("SetQuota", {"label": "=search"}, "label"),
    ("SetQuota", {"label": "team="}, "label"),
    ("SetQuota", {"label": "team=" + "v" * 513}, "label"),
    ("ListQuotas", {"organization": "", "end_user": "a"}, "organization"),
    ("ListQuotas", {"end_user": "a", "label": "a=b"}, "label"),
    ("ListQuotas", {"end_user": "a", "api_key": "wk_aaaaaaaa"}, "api_key"),
    ("ListQuotas", {"label": "team"}, "label"),
    ("ListEndUsers", {"page_size": 1001}, "page_size"),
    ("ListEndUsers", {"page_size": -1}, "page_size"),
    ("ListEndUsers", {"page_token": "x"}, "page_token"),
]


@pytest.mark.parametrize(
    ("name", "fields", "field"), WRONG, ids=[f"{n} {list(f.values())}"[:60] for n, f, _ in WRONG]
)
async def test_a_wrong_field_is_named(
    admin: Admin, name: str, fields: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"organization": admin.tenant.name}
    if name == "SetQuota":
        given = {"subject": ORGANIZATION, "subject_ref": admin.tenant.name}
        given |= {"dimension": PER_MINUTE, "limit_value": 1}
    refusal = await admin.call.refused(name, **given | fields)
    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    query = "SELECT 1 FROM usage_subjects WHERE organization_id = %s"
    assert admin.service.database.rows(query, admin.tenant.organization_id) == []


async def test_a_key_has_no_end_users_of_its_own(admin: Admin) -> None:
    for fields in ({"end_user": "a"}, {"label": "a=b"}, {"for_each": "end_user"}):
        refusal = await admin.call.refused(
            "SetQuota",
            subject=types_pb2.QUOTA_SUBJECT_API_KEY,
            subject_ref=admin.tenant.key.prefix,
            dimension=PER_MINUTE,
            limit_value=1,
            **fields,
        )
        assert refusal.fields == list(fields)
    for subject in (END_USER, LABEL):
        refusal = await admin.call.refused(
            "SetQuota", subject=subject, subject_ref="a", dimension=PER_MINUTE, limit_value=1
        )
        assert refusal.fields == ["subject"]
    refusal = await admin.call.refused("GetEndUser", organization=admin.tenant.name, end_user="no")
    assert refusal.code is StatusCode.NOT_FOUND


async def test_the_question_of_a_key_is_checked(service: Service, tenant: Tenant) -> None:
    async with calls(service, tenant.secret) as call:
        for fields, field in (
            ({"end_user": " a"}, "end_user"),
            ({"labels": {"": "a"}}, "labels['']"),
            ({"labels": {f"k{n}": "v" for n in range(17)}}, "labels"),
        ):
            assert (await call.refused("GetQuota", **fields)).fields == [field]


async def test_every_change_is_in_the_audit_log(admin: Admin) -> None:
    selector = await admin.set(2, for_each="end_user")
    own = await admin.set(3, end_user="alice")
    await admin.call("DeleteQuota", quota_id=own.quota_id)
    await admin.call("DeleteQuota", quota_id=selector.quota_id)

    entries = [
        each
        for quota in (own, selector)
        for each in (await admin.call("ListAuditEntries", subject=quota.quota_id)).entries
    ]
    assert [each.action for each in entries] == ["quota.delete", "quota.set"] * 2
    of_customer = await admin.call("ListAuditEntries", subject=admin.tenant.name)
    assert {each.subject_id for each in entries} <= {
        each.subject_id for each in of_customer.entries
    }
    assert json.loads(entries[3].after_json)["for_each"] == "end_user"


async def test_a_configuration_states_all_three_and_finds_nothing_to_change(admin: Admin) -> None:
    def applied(*quotas: dict[str, Any], **fields: Any) -> dict[str, Any]:
        minute = {"dimension": "QUOTA_DIMENSION_REQUESTS_PER_MINUTE"}
        listed = [minute | each for each in quotas]
        return {"organizations": [{"name": admin.tenant.name, "quotas": listed, **fields}]}

    async def apply(document: Any) -> list[tuple[int, str, str, str]]:
        answer = await admin.call("ApplyConfiguration", configuration=document)
        assert list(answer.violations) == []
        return [
            (each.action, each.quota.for_each, each.quota.end_user, each.quota.label)
            for each in answer.changes
        ]

    three = [
        {"for_each": "end_user", "limit_value": 2},
        {"end_user": "alice", "limit_value": 3},
        {"label": "team=search", "limit_value": 4},
    ]
    created = await apply(applied(*three))
    assert created == [
        (1, "end_user", "", ""),
        (1, "", "alice", ""),
        (1, "", "", "team=search"),
    ]
    assert await apply(applied(*three)) == []
    three[1]["limit_value"] = 5
    assert await apply(applied(*three)) == [(2, "", "alice", "")]

    exported = await admin.call("ExportConfiguration", organization=admin.tenant.name)
    [organization] = exported.configuration.organizations
    keys = {(each.for_each, each.label) for each in organization.quotas}
    assert keys == {("end_user", ""), ("", "team=search")}, "no single end users"
    organization.prune_quotas = True
    assert await apply(exported.configuration) == []
    pruned = await apply(applied(three[0], prune_quotas=True))
    assert pruned == [(3, "", "", "team=search")]
    assert await admin.left(end_user="alice") == [("alice", 5, 5)]

    wrong = await admin.call(
        "ApplyConfiguration", configuration=applied({"end_user": " a", "limit_value": 1})
    )
    assert [each.field for each in wrong.violations] == ["organizations[0].quotas[0].end_user"]


async def test_each_key_of_a_group_has_a_limit_that_names_the_group(admin: Admin) -> None:
    created = await admin.call(
        "CreateApiKey", organization=admin.tenant.name, project="main", name="free", group="free"
    )
    key = created.api_key
    selector = await admin.set(1, for_each="key:free")
    assert (key.group, selector.for_each) == ("free", "key:free")

    with connect(admin.service, created.secret) as client:
        client.chat.completions.create(**CHAT)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT)
    assert "This API key of group free may make 1 request per minute" in str(refused.value)
    async with calls(admin.service, created.secret) as call:
        found = await call("GetQuota")
    assert [(each.group, each.remaining_value) for each in found.quotas] == [("free", 0)]
    assert found.restrictions.group == "free"
    assert await admin.end() is None, "another key of the customer is in no group"

    await admin.call("UpdateApiKey", api_key=key.prefix, group="")
    with connect(admin.service, created.secret) as client:
        client.chat.completions.create(**CHAT)
    listed = (await admin.call("ListQuotas", organization=admin.tenant.name)).quotas
    assert [(each.for_each, each.group) for each in listed] == [("key:free", "")]
    await admin.call("UpdateApiKey", api_key=key.prefix, group="free")
    [given] = (await admin.call("ListQuotas", api_key=key.prefix)).quotas
    assert (given.used_value, given.selector_id) == (2, selector.quota_id)
    refusal = await admin.call.refused("DeleteQuota", quota_id=given.quota_id)
    assert refusal.fields == ["quota_id"]
