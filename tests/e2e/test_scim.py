"""Provisioning over HTTP: what providers send, borders, errors, races and large groups."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text

from metering.core.errors import KeyInvalid
from metering.tenants.authentication import authenticate
from metering.tenants.sign_in import Identity, identify
from tests.calls import calls
from tests.e2e.test_key_access import keys_of
from tests.metering.test_members import joined
from tests.service import Service, Tenant

USER = "urn:ietf:params:scim:schemas:core:2.0:User"
GROUP = "urn:ietf:params:scim:schemas:core:2.0:Group"
ENTERPRISE = "urn:ietf:params:scim:schemas:extension:enterprise:2.0:User"
PATCH = "urn:ietf:params:scim:api:messages:2.0:PatchOp"
ERROR = "urn:ietf:params:scim:api:messages:2.0:Error"
MANY = 10_000
OPERATION = {"op": "replace", "path": "displayName", "value": "x"}
WRONG: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/Users", b"{", 400, "invalidSyntax"),
    ("POST", "/Users", b"[" * 100_000, 400, "invalidSyntax"),
    ("POST", "/Users", {"userName": "a"}, 400, "invalidSyntax"),
    ("POST", "/Users", {"schemas": [USER]}, 400, "invalidValue"),
    ("POST", "/Users", {"schemas": [USER], "userName": 1}, 400, "invalidValue"),
    ("POST", "/Users", {"schemas": [USER], "userName": "a\u0000"}, 400, "invalidValue"),
    ("POST", "/Users", {"schemas": [USER], "userName": "a", "activ": True}, 400, "invalidSyntax"),
    ("POST", "/Users", {"schemas": [USER], "userName": "a", "active": "no"}, 400, "invalidValue"),
    ("POST", "/Users", {"schemas": [USER], "userName": "a" * 2000}, 400, "invalidValue"),
    ("POST", "/Users", {"schemas": [USER], "userName": "a", "emails": ["b"]}, 400, "invalidValue"),
    ("POST", "/Users", b"x" * (2**21 + 1), 413, ""),
    ("POST", "/Groups", {"schemas": [GROUP], "displayName": " "}, 400, "invalidValue"),
    ("PATCH", "Users/ID", {"schemas": [PATCH]}, 400, "invalidSyntax"),
    ("PATCH", "Users/ID", {"schemas": [USER], "Operations": [OPERATION]}, 400, "invalidSyntax"),
    ("GET", "/Users?filter=userName", None, 400, "invalidFilter"),
    ("GET", "/Users?sortBy=password", None, 400, "invalidPath"),
    ("GET", "/Users?startIndex=x", None, 400, "invalidValue"),
    ("GET", "/Users?attributes=id&excludedAttributes=id", None, 400, "invalidValue"),
    ("GET", "Users/none", None, 404, ""),
    ("GET", f"/Users/{uuid.uuid4()}", None, 404, ""),
    ("GET", "/Schemas?filter=id%20pr", None, 403, ""),
    ("GET", "/Schemas/none", None, 404, ""),
    ("GET", "/none", None, 404, ""),
    ("PATCH", "/Users", {}, 405, ""),
    ("POST", "/Schemas", {}, 405, ""),
    ("POST", "/Bulk", {}, 501, ""),
    ("GET", "/Me", None, 501, ""),
]
WRONG_PATCHES: list[tuple[Any, str]] = [
    ({"op": "move", "path": "displayName", "value": "x"}, "invalidSyntax"),
    ({"op": "remove"}, "noTarget"),
    ({"op": "remove", "path": "userName"}, "mutability"),
    ({"op": "replace", "path": "groups", "value": []}, "mutability"),
    ({"op": "replace", "path": "id", "value": "x"}, "mutability"),
    ({"op": "replace", "path": "unknown", "value": "x"}, "invalidPath"),
    ({"op": "replace", "path": "name.unknown", "value": "x"}, "invalidPath"),
    ({"op": "replace", "path": "emails[", "value": "x"}, "invalidPath"),
    ({"op": "replace", "path": 'emails[type eq "no"].value', "value": "x"}, "noTarget"),
    ({"op": "add", "path": 'emails[type co "no"].value', "value": "x"}, "noTarget"),
    ({"op": "replace", "path": "active", "value": "maybe"}, "invalidValue"),
    ({"op": "add", "path": "emails", "value": [{"value": "x"}] * 21}, "invalidValue"),
]


@dataclass
class Client:
    """Identity provider of an organization."""

    http: aiohttp.ClientSession
    url: str
    secret: str

    async def send(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        sent = {"authorization": f"Bearer {self.secret}"} | headers
        if body is not None:
            sent.setdefault("content-type", "application/scim+json")
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        data = None if content is None else io.BytesIO(content)
        url = f"{self.url}/{path.removeprefix('/')}"
        async with self.http.request(method, url, data=data, headers=sent) as answer:
            content = await answer.read()
            if answer.status in (429, 503):  # on a busy machine; providers send it again as well
                await asyncio.sleep(float(answer.headers["retry-after"]))
                return await self.send(method, path, body, **headers)
            if content:
                assert answer.headers["content-type"] == "application/scim+json; charset=utf-8"
            found = json.loads(content) if content else None
            if answer.status >= 400:
                assert found is not None
                assert found["schemas"] == [ERROR]
                assert found["status"] == str(answer.status)
                assert found["detail"]
            return answer.status, found, {k.lower(): v for k, v in answer.headers.items()}

    async def get(self, path: str, **parameters: str | int) -> Any:
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        status, found, _ = await self.send("GET", f"{path}?{query}")
        assert status == 200, found
        return found

    async def user(self, user_name: str, /, **more: Any) -> str:
        emails = [{"value": user_name, "type": "work", "primary": True}]
        body = {"schemas": [USER], "userName": user_name, "emails": emails, "active": True} | more
        status, found, headers = await self.send("POST", "/Users", body)
        assert status == 201, found
        assert headers["location"] == found["meta"]["location"] == f"{self.url}/Users/{found['id']}"
        return str(found["id"])

    async def group(self, name: str, *ids: str) -> str:
        members = [{"value": each} for each in ids]
        body = {"schemas": [GROUP], "displayName": name, "members": members}
        status, found, _ = await self.send("POST", "/Groups", body)
        assert status == 201, found
        return str(found["id"])

    async def patch(self, path: str, *operations: Any, **headers: str) -> tuple[int, Any]:
        body = {"schemas": [PATCH], "Operations": list(operations)}
        return (await self.send("PATCH", path, body, **headers))[:2]

    async def members(self, group: str) -> set[str]:
        found = await self.get(f"/Groups/{group}", attributes="members.value")
        return {each["value"] for each in found.get("members", ())}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def client_of(
    service: Service, tenant: Tenant, http: aiohttp.ClientSession, scope: str = "scim"
) -> Client:
    _, secret = await service.new_key(tenant, scope)
    return Client(http, f"{service.openai_url.removesuffix('/v1')}/scim/v2", secret)


@pytest.fixture
async def client(service: Service, tenant: Tenant, http: aiohttp.ClientSession) -> Client:
    return await client_of(service, tenant, http)


def address() -> str:
    return f"{uuid.uuid4().hex[:12]}@example.com"


async def test_as_entra_id_provisions(client: Client) -> None:
    """Requests in the forms of Microsoft's documentation."""
    name, manager = address(), {"value": "1"}
    user = await client.user(
        name,
        schemas=[USER, ENTERPRISE],
        externalId="e-1",
        title="Dr.",
        roles=[],
        name={"formatted": "Ann Lee", "familyName": "Lee", "givenName": "Ann"},
        **{ENTERPRISE: {"department": "R&D", "manager": manager}},
    )
    found = await client.get("/Users", filter=f'userName%20eq%20"{name.upper()}"')
    assert (found["totalResults"], found["Resources"][0]["id"]) == (1, user)
    assert "title" not in found["Resources"][0]

    status, changed = await client.patch(
        f"/Users/{user}",
        {"op": "Replace", "path": "active", "value": "False"},
        {"op": "Add", "path": 'emails[type eq "home"].value', "value": "home@example.com"},
        {"op": "Replace", "path": 'emails[type eq "work"].value', "value": f"new.{name}"},
        {"op": "Replace", "value": {"displayName": "Ann", "name.givenName": "Anna"}},
        {"op": "Add", "path": f"{ENTERPRISE}:department", "value": "Sales"},
        {"op": "Replace", "path": "title", "value": "Prof."},
    )
    assert status == 200, changed
    assert (changed["active"], changed["displayName"]) == (False, "Ann")
    assert changed["name"] == {"formatted": "Ann Lee", "familyName": "Lee", "givenName": "Anna"}
    assert changed["emails"] == [
        {"value": f"new.{name}", "type": "work", "primary": True},
        {"value": "home@example.com", "type": "home"},
    ]

    group = await client.group("Sales")
    assert await client.patch(
        f"/Groups/{group}",
        {"op": "Add", "path": "members", "value": [{"$ref": None, "value": user}]},
    ) == (204, None)
    found = await client.get(f"/Groups/{group}", excludedAttributes="members")
    assert "members" not in found
    assert await client.members(group) == {user}
    await client.patch(
        f"/Groups/{group}", {"op": "Remove", "path": "members", "value": [{"value": user}]}
    )
    assert await client.members(group) == set()


async def test_as_okta_provisions(client: Client) -> None:
    """Requests in the forms of Okta's documentation."""
    name = address()
    user = await client.user(
        name, displayName="Ann Lee", locale="en-US", password="x", groups=[], externalId="00u1"
    )
    status, found = await client.patch(
        f"/Users/{user}", {"op": "replace", "value": {"active": False}}
    )
    assert (status, found["active"]) == (200, False)
    whole = found | {"active": True, "name": {"givenName": "Ann"}}
    status, found, _ = await client.send("PUT", f"/Users/{user}", whole)
    assert (status, found["active"], found["name"]) == (200, True, {"givenName": "Ann"})

    group = await client.group(f"g {name}", user)
    await client.patch(
        f"/Groups/{group}",
        {"op": "replace", "value": {"id": group, "displayName": f"h {name}"}},
        {"op": "remove", "path": f'members[value eq "{user}"]'},
        {"op": "add", "path": "members", "value": [{"value": user, "display": name}]},
    )
    found = await client.get(f"/Groups/{group}")
    assert found["displayName"] == f"h {name}"
    [member] = found["members"]
    assert member == {"value": user, "$ref": f"{client.url}/Users/{user}"}
    [of_user] = (await client.get(f"/Users/{user}"))["groups"]
    assert (of_user["value"], of_user["display"]) == (group, f"h {name}")


async def test_a_deactivated_person_is_out_at_once_with_its_streams(
    service: Service, tenant: Tenant, client: Client
) -> None:
    name = address()
    async with service.session() as session:
        accepted = await joined(
            session, name, "developer", organization=tenant.name, create_key=True
        )
    user = await client.user(name)
    async with service.stream(accepted.secret) as stream:
        request = await stream.begin(max_output_tokens=4000)
        await client.patch(f"/Users/{user}", {"op": "replace", "path": "active", "value": False})
        assert (await stream.failed(request)).reason == "KEY_REVOKED"

    async with service.session() as session:
        with pytest.raises(KeyInvalid):
            await authenticate(session, accepted.secret)
    await client.patch(f"/Users/{user}", {"op": "replace", "path": "active", "value": True})
    async with service.session() as session:
        principal = await authenticate(session, accepted.secret)
    assert principal.person_id == accepted.member.person_id


async def test_a_group_gives_its_role_by_the_setting_of_the_owner(
    service: Service, tenant: Tenant, client: Client
) -> None:
    name = address()
    user = await client.user(name)
    await client.group("Engineers", user)
    _, owner_secret = await service.new_key(tenant, role="owner")
    async with calls(service, owner_secret) as owner:
        [listed] = (await owner("ListProvisionedGroups", organization=tenant.name)).groups
        assert (listed.group, listed.member_count, listed.role) == ("Engineers", 1, "")
        made = await owner(
            "SetGroupRole", organization=tenant.name, group="engineers", role="developer"
        )
        assert (made.group.group, made.group.role) == ("Engineers", "developer")
        async with service.session() as session:
            await identify(session, Identity("corp", "https://idp", name, name), ())
        [member] = (await owner("ListMembers", organization=tenant.name)).members
        assert (member.email, member.role) == (name, "developer")
        await client.patch(f"/Users/{user}", {"op": "replace", "value": {"active": False}})
        [member] = (await owner("ListMembers", organization=tenant.name)).members
        assert member.HasField("deactivate_time")
        entries = (await owner("ListAuditEntries", action_prefix="scim_user.update")).entries
        assert [each.actor_role for each in entries] == ["scim"]


async def test_each_scope_and_role_but_two_is_refused(
    service: Service, tenant: Tenant, http: aiohttp.ClientSession, client: Client
) -> None:
    keys = await keys_of(service, tenant)
    _, keys["admin"] = await service.new_key(tenant, "admin")
    for held, secret in keys.items():
        status, _, _ = await Client(http, client.url, secret).send("GET", "/Users")
        assert status == (200 if held in ("scim", "role:owner") else 403), held
    for secret in ("", "wk_aaaaaaaa_" + "x" * 43):
        status, _, headers = await Client(http, client.url, secret).send("GET", "/Users")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")


async def test_a_provider_finds_nothing_of_another_organization(
    service: Service, http: aiohttp.ClientSession, client: Client
) -> None:
    other = await client_of(service, await service.tenant(), http)
    name = address()
    user, mine = await client.user(name), await other.user(name)
    group = await client.group("theirs", user)

    assert (await other.get("/Users"))["totalResults"] == 1
    assert (await other.get("/Groups"))["Resources"] == []
    for path in (f"/Users/{user}", f"/Groups/{group}"):
        schema = USER if "Users" in path else GROUP
        whole = {"schemas": [schema], "userName": "x", "displayName": "x"}
        whole.pop("userName" if schema == GROUP else "displayName")
        assert (await other.send("GET", path))[0] == 404
        assert (await other.send("DELETE", path))[0] == 404
        assert (await other.send("PUT", path, whole))[0] == 404
        replaced = {"op": "replace", "value": {"displayName": "x"}}
        assert (await other.patch(path, replaced))[0] == 404
    body = {"schemas": [GROUP], "displayName": "mine", "members": [{"value": user}]}
    status, found, _ = await other.send("POST", "/Groups", body)
    assert (status, found["scimType"]) == (400, "invalidValue")
    assert await client.members(group) == {user}
    assert mine != user


async def test_wrong_requests_are_refused_in_the_form_of_scim(client: Client) -> None:
    user = await client.user(address(), displayName="before")
    for method, path, body, status, kind in WRONG:
        found = await client.send(method, path.replace("ID", user), body)
        assert (found[0], found[1].get("scimType", "")) == (status, kind), (method, path, found)
    for operation, kind in WRONG_PATCHES:
        code, error = await client.patch(f"/Users/{user}", OPERATION, operation)
        assert (code, error.get("scimType")) == (400, kind), (operation, error)
    found = await client.send("POST", "/Users", {}, **{"content-type": "text/plain"})
    assert found[0] == 415
    found = await client.send("GET", "/Users", authorization="Basic x")
    assert found[0] == 401
    assert (await client.get(f"/Users/{user}"))["displayName"] == "before", "nothing half done"


async def test_a_repeated_creation_conflicts_and_other_repetitions_change_nothing(
    client: Client,
) -> None:
    name = address()
    user = await client.user(name)
    body = {"schemas": [USER], "userName": name.upper(), "active": True}
    status, found, _ = await client.send("POST", "/Users", body)
    assert (status, found["scimType"]) == (409, "uniqueness")
    group = await client.group("once", user)
    status, found, _ = await client.send(
        "POST", "/Groups", {"schemas": [GROUP], "displayName": "ONCE"}
    )
    assert (status, found["scimType"]) == (409, "uniqueness")
    added = {"op": "add", "path": "members", "value": [{"value": user}]}
    assert [await client.patch(f"/Groups/{group}", added) for _ in range(2)] == [(204, None)] * 2
    assert (await client.get(f"/Groups/{group}"))["meta"]["version"] == 'W/"1"'
    assert [(await client.send("DELETE", f"/Users/{user}"))[0] for _ in range(2)] == [204, 404]


async def test_a_version_that_is_not_the_present_one_is_refused(client: Client) -> None:
    user = await client.user(address())
    named = {"op": "replace", "path": "displayName", "value": "a"}
    assert (await client.patch(f"/Users/{user}", named, **{"if-match": 'W/"1"'}))[0] == 200
    for method in ("PUT", "PATCH", "DELETE"):
        sent: Any = {"schemas": [USER], "userName": "x"} if method == "PUT" else None
        if method == "PATCH":
            sent = {"schemas": [PATCH], "Operations": [named]}
        status, _, _ = await client.send(method, f"/Users/{user}", sent, **{"if-match": 'W/"1"'})
        assert status == 412, method


async def test_lists_are_paged_sorted_and_counted_exactly(client: Client) -> None:
    names = sorted(address() for _ in range(7))
    for name in names:
        await client.user(name)

    seen: list[str] = []
    while True:
        page = await client.get(
            "/Users", startIndex=len(seen) + 1, count=3, sortBy="userName", attributes="userName"
        )
        assert (page["totalResults"], page["startIndex"]) == (7, len(seen) + 1)
        assert all(set(each) == {"schemas", "id", "userName"} for each in page["Resources"])
        seen += [each["userName"] for each in page["Resources"]]
        if len(seen) >= page["totalResults"]:
            break
    assert seen == names
    counted = await client.get("/Users", count=0)
    assert (counted["totalResults"], counted["Resources"]) == (7, [])
    last = await client.get("/Users", sortBy="userName", sortOrder="descending", count=1)
    assert last["Resources"][0]["userName"] == names[-1]
    body = {
        "schemas": ["urn:ietf:params:scim:api:messages:2.0:SearchRequest"],
        "filter": f'userName eq "{names[3]}"',
        "attributes": ["emails.value"],
    }
    status, found, _ = await client.send("POST", "Users/.search", body)
    assert (status, found["Resources"][0]["emails"]) == (200, [{"value": names[3]}])


async def test_changes_of_one_group_at_once_are_exact(client: Client) -> None:
    users = await asyncio.gather(*(client.user(address()) for _ in range(12)))
    group = await client.group("races", *users[6:])

    answers = await asyncio.gather(
        *(
            client.patch(
                f"/Groups/{group}",
                {"op": "add", "path": "members", "value": [{"value": user}]}
                if at < 6
                else {"op": "remove", "path": f'members[value eq "{user}"]'},
            )
            for at, user in enumerate(users)
        )
    )

    assert answers == [(204, None)] * 12
    assert await client.members(group) == set(users[:6])


async def test_the_service_describes_itself(client: Client) -> None:
    config = await client.get("/ServiceProviderConfig")
    assert config["patch"]["supported"]
    assert not config["bulk"]["supported"]
    kinds = await client.get("/ResourceTypes")
    assert [each["endpoint"] for each in kinds["Resources"]] == ["/Users", "/Groups"]
    for each in (await client.get("/Schemas"))["Resources"]:
        assert await client.get(f"/Schemas/{each['id']}") == each


async def test_large_groups_hold_no_other_request(
    service: Service, tenant: Tenant, client: Client
) -> None:
    """Ten thousand members in a request, and twice as many in a group."""
    async with service.session() as session:
        made = await session.execute(
            text("""
            INSERT INTO scim_users
                (organization_id, user_name, user_name_key, attributes, is_active)
            SELECT :id, 'u' || n, 'u' || n, '{}', true FROM generate_series(1, :count) n
            RETURNING CAST(id AS text)
            """),
            {"id": tenant.organization_id, "count": 2 * MANY},
        )
        ids = list(made.scalars())
    group = await client.group("everyone")
    for part in (ids[:MANY], ids[MANY:]):
        values = [{"value": each, "display": "a name of usual length"} for each in part]
        answer = await client.patch(
            f"/Groups/{group}", {"op": "add", "path": "members", "value": values}
        )
        assert answer == (204, None), answer
    assert await client.members(group) == set(ids)
    more = await client.user(address())
    status, found = await client.patch(
        f"/Groups/{group}", {"op": "add", "path": "members", "value": [{"value": more}]}
    )
    assert (status, found["scimType"]) == (400, "invalidValue")
    await client.patch(f"/Groups/{group}", {"op": "replace", "path": "members", "value": []})
    assert await client.members(group) == set()
    async with service.session() as session:
        size = await session.scalar(
            text(
                "SELECT max(length(after::text)) FROM audit_log WHERE action = 'scim_group.update'"
            )
        )
    assert size < 12_000, "an entry lists the first ids only"
