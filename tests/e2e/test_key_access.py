"""Every call of every service with keys that lack access: nothing is read or changed.

The calls come from the contract. Each request refers to a victim's objects by field name: a call
with an unknown field fails the test until `Victim` gets a value for it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from typing import Any, TypeVar

import aiohttp
import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from sqlalchemy import insert
from weir.v1 import billing_service_pb2_grpc, months_pb2, types_pb2, usage_reports_pb2
from weir.v1 import inference_service_pb2 as pb

from api.console.console import NAMES
from api.core.health import SERVICES
from metering.alerts.alerts import Alert
from metering.core.models import QuotaDimension
from metering.tenants.authentication import authenticate, new_secret
from metering.tenants.client_tokens import ClientTokenTerms, create_client_token
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.key_terms import KeyTerms
from metering.tenants.service_accounts import create_service_account
from metering.tenants.token_issuers import IssuerTerms, create_token_issuer
from tests.e2e.test_fuzzed_bodies import OF_OURS, incident_count
from tests.metering.usage import Consumed, Customer, add_usage, new_price
from tests.service import MODEL, Refusal, Service, Tenant, bearer, cancel, start

AT_ONCE = 16  # calls on one connection
STRANGERS = 4  # tenants
Value = TypeVar("Value")
PAST = datetime(2025, 10, 10, 12, tzinfo=UTC)
MONTH = "2025-10"
# Intended permissions, stated independently of the product's table.
CHANGING_MONEY = {
    *("CloseMonth", "CreateCreditNote"),
    *("CreateAdjustment", "ApproveAdjustment", "RejectAdjustment"),
}
RESALE = {"SetResalePrice", "RentReplicas", "EndReplicaRental"}
OF_OWNERS = {"UpdateOrganization", "CloseProject", "SetGroupRole"}
RENAMINGS = {"UpdateOrganization", "UpdateProject"}
OF_KEYS = {"CreateApiKey", "RotateApiKey", "UpdateApiKey", "RevokeApiKey"}
OF_ADMINS = {
    *("UpdateProject", "SuspendProject", "ResumeProject"),
    *("CreateProject", "SetQuota", "PreviewQuota", "OverrideQuota", "DeleteQuota"),
    "ListAuditEntries",
    *("CreateTokenIssuer", "DeleteTokenIssuer", "RevokeTokens"),
    *("ExportAuditEntries", "ListProvisionedGroups"),
    *("SetAlertWebhook", "ListAlertWebhooks", "DeleteAlertWebhook", "TestAlertWebhook"),
}
OF_ADMINS |= {
    *("InviteMember", "ListInvitations", "ResendInvitation", "RevokeInvitation"),
    *("UpdateMember", "RemoveMember"),
    *("CreateServiceAccount", "UpdateServiceAccount", "DeleteServiceAccount"),
}
OF_CREDIT = {"ListCreditGrants", "GetCreditBalance"}
OF_MEMBERS = {
    *("ListOrganizations", "ListProjects", "ListApiKeys", "ListQuotas", "ListPrices"),
    "ListTokenIssuers",
    *("ListMembers", "ListServiceAccounts"),
}
ROLES = ("owner", "admin", "developer", "finance", "viewer")
ROLES_OF_KEYS = frozenset(f"role:{each}" for each in ROLES)
# A victim's calls that must return its objects; otherwise the test would prove nothing.
SHOWN_TO_THEIR_OWNER = {
    *("GetGeneration", "GetQuota", "GetUsage", "GetForecast", "GetInvoice", "ListAdjustments"),
    *("GetMonthReport", "ExportMonth", "GetMonthDocument", "ListEndUsers", "GetEndUser"),
    *("ListAlerts", "ListMonths", "ListReceipts", "GetReceiptMonth", "GetReconciliation"),
}

# Values that belong to no customer, so that only the key is wrong.
COMMON = {
    "region": "eu",
    "model": MODEL,
    "end_user": "alice",
    "replica": "0",
    "url": "https://example.com/alerts",
    "month": MONTH,
    "day": "",
    "first_day": "",
    "last_day": "",
    "reason": "none",
    "confirm_name": "another",
    "document": "models: {m: {directory: /none}}",
    "base_directory": "/none",
    "name": "theirs",
    "currency_code": "USD",
    "page_token": "",
    "action_prefix": "",
    "plan": "none",
    "first_month": "2026-12",
    "last_month": "2026-12",
    "scopes": "inference",
    "models": MODEL,
    "allowed_networks": "192.0.2.0/24",
    "text": "x",
    "prefix": "",
    "for_each": "",
    "group": "free",
    "role": "developer",
    "label_key": "",
    "tag_label_keys": "team",
    "issuer": "https://login.example.com",
    "audience": "theirs",
    "projects": "main",
    "algorithms": "ES256",
    "keys_url": "",
    "keys": "",
    "token_type": "",
    "project_claim": "",
    "end_user_claim": "sub",
    "models_claim": "",
    "max_output_tokens_claim": "",
    "label_claims": "team",
    "claim": "sub",
    "value": "ada",
    "call": "none",
    "origins": "https://app.example.com",
    "display_name": "Ann",
    "search": "",
}


@dataclass(frozen=True)
class Victim:
    """Customer with one object of each kind.

    things: by the name of the field that refers to them; marks: texts that occur nowhere else.
    """

    tenant: Tenant
    things: dict[str, str]
    marks: tuple[str, ...]


def methods() -> Iterator[MethodDescriptor]:
    """Return all calls of the contract."""
    for name in SERVICES:
        yield from Default().FindServiceByName(name).methods


def scopes_of(method: MethodDescriptor) -> set[str]:
    """Return the scopes and roles that allow a call."""
    if method.name == "ExportOrganization":
        return {"admin", "role:owner", "role:admin"}
    if method.name == "ListReceiptKeys":
        return {"inference", "billing", "scim", "admin", *ROLES_OF_KEYS}
    match method.containing_service.name:
        case "InferenceService":
            return {"inference"}
        case "BillingService" | "ReceiptService" if method.name not in CHANGING_MONEY:
            allowed = {"billing", "admin", "role:owner", "role:finance"}
            if method.name not in RESALE:
                allowed |= {"role:admin", "role:viewer"}
            return allowed | ({"role:developer"} if method.name == "GetUsage" else set())
    match method.name:
        case "AcceptInvitation":
            return set()  # needs the token of an invitation, which is not a key
        case name if name in OF_KEYS:
            return {"admin", "role:owner", "role:admin", "role:developer"}
        case name if name in OF_OWNERS:
            return {"admin", "role:owner"}
        case name if name in OF_ADMINS:
            return {"admin", "role:owner", "role:admin"}
        case name if name in OF_CREDIT:
            return {"admin", *ROLES_OF_KEYS} - {"role:developer"}
        case name if name in OF_MEMBERS:
            return {"admin", *ROLES_OF_KEYS}
        case "SetBillingProfile":
            return {"admin", "role:owner", "role:finance"}
        case _:
            return {"admin"}


async def keys_of(service: Service, tenant: Tenant) -> dict[str, str]:
    """Return a secret for each scope and role but the operator's, by what authorizes its calls."""
    keys = {each: await service.new_key(tenant, each) for each in ("inference", "billing", "scim")}
    roles = {f"role:{each}": await service.new_key(tenant, role=each) for each in ROLES}
    return {name: secret for name, (_, secret) in (keys | roles).items()}


async def strangers_of(service: Service) -> list[dict[str, str]]:
    """Return the keys of several tenants: the calls of a single one would wait for its share."""
    return [await keys_of(service, await service.tenant()) for _ in range(STRANGERS)]


@pytest.fixture(scope="module")
def victim(service: Service) -> Victim:
    """Return the victim of all tests of a module that change nothing of it."""
    return asyncio.run(new_victim(service))


async def new_victim(service: Service) -> Victim:
    """Create a customer with requests, a closed month, an invoice, an adjustment, a credit note."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 1_234_567})
    label = f"label-{uuid.uuid4().hex}"
    async with service.session() as session:
        price = await new_price(session, f"m-{uuid.uuid4()}")
        customer = Customer(tenant.organization_id, tenant.name, tenant.key, tenant.secret)
        used = Consumed(1_000_003, 1_000, 10_007, "stop", PAST)
        await add_usage(session, customer, price, [used])
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(labels={"team": label}, end_user=f"user-{label}")
        await stream.finished(request_id)
    (_, admin), (_, other) = [await service.new_key(tenant, "admin") for _ in range(2)]
    async with service.channel() as channel:
        billing, who = billing_service_pb2_grpc.BillingServiceStub(channel), bearer(admin)
        closed = await billing.CloseMonth(
            months_pb2.CloseMonthRequest(organization=tenant.name, month=MONTH), metadata=who
        )
        amount = types_pb2.Money(currency_code="USD", units=1)
        requested = months_pb2.CreateAdjustmentRequest(
            organization=tenant.name, amount=amount, reason="good will"
        )
        adjustment = (await billing.CreateAdjustment(requested, metadata=who)).adjustment
        number = closed.month.invoice_number
        cent = types_pb2.Money(currency_code="USD", picos=10**10)
        less = months_pb2.CreateCreditNoteRequest(invoice_number=number, amount=cent, reason="less")
        proposed = (await billing.CreateCreditNote(less, metadata=who)).credit_note
        approval = months_pb2.ApproveAdjustmentRequest(adjustment_id=proposed.adjustment_id)
        note = (await billing.ApproveAdjustment(approval, metadata=bearer(other))).adjustment
    query = "SELECT id FROM quotas WHERE subject_id = %s"
    [quota] = service.database.rows(query, tenant.organization_id)
    async with service.session() as session:
        alert = {
            "organization_id": tenant.organization_id,
            "quota_id": quota["id"],
            "window_start": PAST,
        }
        await session.execute(
            insert(Alert).values(
                alert | {"threshold": 50, "limit_value": 1_234_567, "used": 700_000}
            )
        )
    async with service.session() as session:
        issuer = await create_token_issuer(
            session,
            organization=tenant.name,
            terms=IssuerTerms(issuer="https://login.example.com", audience=tenant.name),
            projects={"": "main"},
            key_terms=KeyTerms(),
            actor="test",
        )
        maker = await authenticate(session, tenant.secret)
        terms = ClientTokenTerms(call="embeddings", model=MODEL, end_user=f"user-{label}")
        client_token_id, _, _ = await create_client_token(session, maker, terms)
    things = {
        "token_issuer_id": str(issuer.id),
        "client_token_id": str(client_token_id),
        "organization": tenant.name,
        "project": f"{tenant.name}/main",
        "api_key": tenant.key.prefix,
        "request_id": request_id,
        "quota_id": str(quota["id"]),
        "number": number,
        "invoice_number": number,
        "credit_note_number": note.credit_note_number,
        "adjustment_id": adjustment.adjustment_id,
        "correcting_adjustment_id": adjustment.adjustment_id,
        "subject_ref": tenant.name,
        "subject": tenant.key.prefix,
        "actor": tenant.key.prefix,
        "end_user": f"user-{label}",
        "label": f"team={label}",
        **await people(service, tenant),
    }
    ids = (tenant.organization_id, tenant.project_id, tenant.key.id, quota["id"])
    marks = {*things.values(), label, *map(str, ids)} - {things["project"]}
    return Victim(tenant, things, tuple(sorted(marks)))


async def people(service: Service, tenant: Tenant) -> dict[str, str]:
    """Create a member, an invitation and a service account; return what refers to them."""
    email = f"{tenant.name}@example.com"
    of_tenant: dict[str, Any] = {"organization": tenant.name, "actor": "test"}
    async with service.session() as session:
        _, token = await invite(session, **of_tenant, email=email, role="viewer")
        member = (await accept_invitation(session, token=token)).member
        pending, _ = await invite(session, **of_tenant, email=f"2.{email}", role="viewer")
        account = await create_service_account(
            session, **of_tenant, name=f"ci-{tenant.name}", role=COMMON["role"]
        )
    return {
        "email": pending.email,
        "member": email,
        "person": str(member.person_id),
        "invitation_id": str(pending.invitation_id),
        "service_account": account.name,
    }


def walk_of(
    calls: Iterable[MethodDescriptor], victim: Victim, keys: Iterable[str]
) -> Iterator[tuple[MethodDescriptor, Any, str]]:
    """Yield each call with each key: with all requests for the victim's objects if it may.

    A key that may not is refused before its request is read, which has a test of its own.
    """
    for method in calls:
        requests = requests_for(method, victim)
        for held in keys:
            for request in requests if held in scopes_of(method) else requests[:1]:
                yield method, request, held


def requests_for(method: MethodDescriptor, victim: Victim) -> list[Any]:
    """Return different requests for the victim's objects: by name, by id, without organization."""
    by_id = {
        "organization": str(victim.tenant.organization_id),
        "project": str(victim.tenant.project_id),
        "api_key": str(victim.tenant.key.id),
    }
    present = {"month": f"{datetime.now(UTC):%Y-%m}"}
    others: list[dict[str, str]] = [{}, by_id, {"organization": ""}, by_id | present]
    others.append({"end_user": ""})  # alerts of all limits
    if "first_day" in method.input_type.fields_by_name:
        day = f"{PAST:%Y-%m-%d}"
        others.append(by_id | {"month": "", "first_day": day, "last_day": day})
    # The number of a credit note overrides all other fields.
    values = COMMON | victim.things
    each = [values | {"credit_note_number": ""} | other for other in others]
    requests = [filled(method.input_type, one) for one in (*each, values)]
    return list(
        {request.SerializeToString(deterministic=True): request for request in requests}.values()
    )


def filled(kind: Descriptor, values: Mapping[str, str]) -> Any:
    """Return a message with every text set. Raises: KeyError for an unknown field."""
    message: Any = GetMessageClass(kind)()
    for field in kind.fields:
        if field.name == "start" and field.message_type is pb.StartFrame.DESCRIPTOR:
            message.start.CopyFrom(start().start)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(values[field.name])
            else:
                setattr(message, field.name, values[field.name])
        elif field.type == FieldDescriptor.TYPE_ENUM:
            if field.is_repeated:
                getattr(message, field.name).append(usage_reports_pb2.USAGE_GROUPING_PROJECT)
            else:
                setattr(message, field.name, 1)
    return message


async def at_once(calls: Iterable[Awaitable[Value]]) -> list[Value]:
    """Make independent calls, some at a time, which costs less than one after the other."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def within_limit(each: Awaitable[Value]) -> Value:
        async with limit:
            return await each

    return await asyncio.gather(*map(within_limit, calls))


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Any, secret: str | None
) -> Refusal | bytes:
    """Return the refusal of a call, or its whole answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    send: Any = type(request).SerializeToString
    parts: list[bytes] = []
    try:
        if method.client_streaming:
            opened: Any = channel.stream_stream(path, request_serializer=send)(
                metadata=bearer(secret)
            )
            await opened.done_writing()
        elif method.server_streaming:
            opened = channel.unary_stream(path, request_serializer=send)(
                request, metadata=bearer(secret)
            )
        else:
            unary: Any = channel.unary_unary(path, request_serializer=send)
            return bytes(await unary(request, metadata=bearer(secret)))
        async for part in opened:
            parts.append(bytes(part))  # counts what was sent before an error
    except grpc.aio.AioRpcError as error:
        assert not parts, "an answer, and then a refusal"
        return Refusal.of(error)
    return b"".join(parts)


def rows_of(service: Service, victim: Victim) -> dict[str, list[str]]:
    """Return all rows that mention the victim, except uses of its keys, written later."""
    tables = (
        "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition AND"
        " relnamespace = 'public'::regnamespace AND relname <> 'api_key_uses'"
    )
    patterns, found = [f"%{mark}%" for mark in victim.marks], {}
    for table in (row["relname"] for row in service.database.rows(tables)):
        query = f'SELECT t::text AS row FROM "{table}" t WHERE t::text LIKE ANY(%s) ORDER BY 1'
        found[table] = [row["row"] for row in service.database.rows(query, patterns)]
    return found


def marks_in(answer: bytes, victim: Victim) -> list[str]:
    """Return the victim's marks in an answer."""
    return [mark for mark in victim.marks if mark.encode() in answer]


async def test_a_foreign_key_gets_nothing_by_grpc(service: Service, victim: Victim) -> None:
    strangers = await strangers_of(service)
    before = rows_of(service, victim)
    walk = list(walk_of(methods(), victim, strangers[0]))

    async with service.channel() as channel:
        answers = await at_once(
            call(channel, method, request, keys[held])
            for (method, request, held), keys in zip(walk, cycle(strangers), strict=False)
        )

    for (method, _, held), answer in zip(walk, answers, strict=True):
        where = f"{method.full_name} with {held}: {answer!r}"
        if held not in scopes_of(method):
            assert isinstance(answer, Refusal), where
            assert (answer.code, answer.reason) == (
                StatusCode.PERMISSION_DENIED,
                "PERMISSION_DENIED",
            ), where
        elif isinstance(answer, bytes):
            assert marks_in(answer, victim) == [], where
        else:
            assert answer.code in (StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT), where
    pairs = {(method.full_name, held) for method, _, held in walk}
    assert pairs == {(each.full_name, held) for each in methods() for held in strangers[0]}
    assert len(walk) > len(pairs) > 7 * 100, "a walk that finds nothing proves nothing"
    assert rows_of(service, victim) == before
    assert {
        len(rows)
        for table, rows in before.items()
        if table in ("usage_events", "invoices", "receipts")
    } != {0}


async def test_a_call_is_refused_before_its_request_is_read(service: Service) -> None:
    """A key without the scope or role learns nothing from errors about fields."""
    strangers = await strangers_of(service)
    refused = [
        (method, held)
        for method in methods()
        for held in strangers[0]
        if held not in scopes_of(method)
    ]

    assert len(refused) > 300
    async with service.channel() as channel:
        answers = await at_once(
            call(channel, method, out_of_range(method.input_type), keys[held])
            for (method, held), keys in zip(refused, cycle(strangers), strict=False)
        )
    for (method, held), answer in zip(refused, answers, strict=True):
        assert isinstance(answer, Refusal), (method.full_name, held)
        assert answer.reason == "PERMISSION_DENIED", (method.full_name, held, answer)


async def test_an_unknown_value_of_an_enum_is_no_fault_of_the_server(
    service: Service, victim: Victim
) -> None:
    """Numbers of newer clients arrive as they are, at any depth of a message."""
    scopes = ("inference", "admin", "billing")
    tenant = await service.tenant(scopes=scopes)
    values = defaultdict(lambda: "x", COMMON | victim.things)
    incidents = incident_count(service)
    requested = [
        (method, request)
        for method in methods()
        for base in (lambda each: filled(each, values), lambda each: GetMessageClass(each)())
        for request in unknown_enums(method.input_type, base)
    ]

    async with service.channel() as channel:
        answers = await at_once(
            call(channel, method, request, tenant.secret) for method, request in requested
        )

    for (method, request), answer in zip(requested, answers, strict=True):
        code = answer.code.name if isinstance(answer, Refusal) else ""
        assert code not in OF_OURS, (method.full_name, request, answer)
    assert len(requested) > 30
    assert incident_count(service) == incidents


def unknown_enums(
    kind: Descriptor, base: Callable[[Descriptor], Any], depth: int = 0
) -> Iterator[Any]:
    """Yield messages, otherwise as `base` makes them, with an unknown number for one enum."""
    for field in kind.fields:
        if field.enum_type is not None:
            message = base(kind)
            if field.is_repeated:
                getattr(message, field.name).append(35)
            else:
                setattr(message, field.name, 35)
            yield message
        elif field.message_type is not None and depth < 4 and field.name != "start":
            if field.message_type.GetOptions().map_entry:
                continue
            for inner in unknown_enums(field.message_type, base, depth + 1):
                message = base(kind)
                if field.is_repeated:
                    getattr(message, field.name).append(inner)
                else:
                    getattr(message, field.name).CopyFrom(inner)
                yield message


def out_of_range(kind: Descriptor) -> Any:
    """Return a message of permitted size in which no field has an allowed value."""
    message: Any = GetMessageClass(kind)()
    for field in kind.fields:
        value: Any = -1
        if field.type == FieldDescriptor.TYPE_STRING:
            value = "?"
        elif field.type == FieldDescriptor.TYPE_BOOL:
            value = True
        elif field.type == FieldDescriptor.TYPE_BYTES:
            value = b"\x00"
        elif field.message_type is not None:
            if not field.is_repeated:
                getattr(message, field.name).CopyFrom(out_of_range(field.message_type))
            continue
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


async def test_a_foreign_key_gets_nothing_by_console(service: Service, victim: Victim) -> None:
    strangers = await strangers_of(service)
    before = rows_of(service, victim)
    offered = [
        each for each in methods() if f"{each.containing_service.name}/{each.name}" in set(NAMES)
    ]
    shown: set[str] = set()

    walk = list(walk_of(offered, victim, strangers[0]))

    async with aiohttp.ClientSession(service.openai_url.removesuffix("v1")) as http:
        answers = await at_once(
            ask_console(http, method, request, keys[held])
            for (method, request, held), keys in zip(walk, cycle(strangers), strict=False)
        )
        for (method, _, held), (status, body) in zip(walk, answers, strict=True):
            where = f"{method.full_name} with {held}: {body!r}"
            assert status in ((200, 400, 404) if held in scopes_of(method) else (403,)), where
            assert status != 200 or marks_in(body, victim) == [], where
        assert rows_of(service, victim) == before
        own = (await service.new_key(victim.tenant, "billing"))[1]
        requested = [(each, request) for each in offered for request in requests_for(each, victim)]
        answers = await at_once(ask_console(http, *each, own) for each in requested)
        for (method, _), (status, body) in zip(requested, answers, strict=True):
            if status == 200 and marks_in(body, victim):
                shown.add(method.name)

    assert shown >= {
        *("GetMonthReport", "GetUsage", "GetForecast", "GetInvoice", "GetReconciliation"),
        *("ListAdjustments", "ListMonths"),
    }


async def ask_console(
    http: aiohttp.ClientSession, method: MethodDescriptor, request: Any, secret: str
) -> tuple[int, bytes]:
    """Return the console's answer to a call."""
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    path = f"console/api/{method.containing_service.name}/{method.name}"
    async with http.post(
        path, data=json_format.MessageToJson(request), headers=headers
    ) as response:
        return response.status, await response.read()


async def test_without_a_good_key_no_call_is_answered(service: Service, victim: Victim) -> None:
    revoked, secret = await service.new_key(victim.tenant, "inference", "billing", "admin")
    await service.revoke(revoked)
    before = rows_of(service, victim)

    wrong = (None, "", "nonsense", new_secret(victim.tenant.key.prefix), secret)
    requested = [
        (method, requests_for(method, victim)[0], each) for method in methods() for each in wrong
    ]

    async with service.channel() as channel:
        answers = await at_once(call(channel, *each) for each in requested)

    for (method, _, each), answer in zip(requested, answers, strict=True):
        assert isinstance(answer, Refusal), method.full_name
        assert (answer.code, answer.reason) == (
            StatusCode.UNAUTHENTICATED,
            "UNAUTHENTICATED",
        ), (method.full_name, each)

    assert rows_of(service, victim) == before


async def test_their_owner_is_shown_what_others_are_not(service: Service, victim: Victim) -> None:
    """The victim's own keys succeed: otherwise the requests might be empty."""
    own = {
        "inference": victim.tenant.secret,
        "billing": (await service.new_key(victim.tenant, "billing"))[1],
    }
    shown: set[str] = set()
    file_name = f"{victim.things['credit_note_number']}.pdf".encode()
    has_note = False

    requested = [
        (method, request, own[scope])
        for method in methods()
        for scope in scopes_of(method) & own.keys()
        for request in requests_for(method, victim)
    ]

    async with service.channel() as channel:
        answers = await at_once(call(channel, *each) for each in requested)

    for (method, _, _), answer in zip(requested, answers, strict=True):
        if isinstance(answer, bytes) and marks_in(answer, victim):
            shown.add(method.name)
            has_note |= method.name == "ExportMonth" and file_name in answer

    assert has_note, "the document of their credit note"
    assert shown >= SHOWN_TO_THEIR_OWNER, SHOWN_TO_THEIR_OWNER - shown


# Calls that a role makes in its own organization, and that show it objects of that.
SHOWN_TO_ADMINS = {
    *("ListOrganizations", "ListProjects", "ListApiKeys", "ListQuotas", "SetAlertWebhook"),
    *("GetCreditBalance", "CreateProject", "CreateApiKey", "UpdateApiKey", "RotateApiKey"),
    *("RevokeApiKey", "SetQuota", "SuspendProject", "ResumeProject"),
}
REFUSALS = {
    *(StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT),
    *(StatusCode.FAILED_PRECONDITION, StatusCode.ALREADY_EXISTS),
}


def turn(name: str) -> int:
    """Sort reads first and renamings last, because the other calls refer to names."""
    return 2 if name in RENAMINGS else not name.startswith(("Get", "List"))


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_does_what_it_may_in_its_own_organization(service: Service, role: str) -> None:
    """The views of its border have all that these calls need, for reading and for changing."""
    victim = await new_victim(service)
    _, secret = await service.new_key(victim.tenant, role=role)
    may = [each for each in methods() if f"role:{role}" in scopes_of(each)]
    shown: set[str] = set()

    async with service.channel() as channel:
        for method in sorted(may, key=lambda each: turn(each.name)):
            for request in requests_for(method, victim):
                if method.name in OF_KEYS | OF_ADMINS and hasattr(request, "request_id"):
                    request.request_id = ""  # another call has used it
                answer = await call(channel, method, request, secret)
                if isinstance(answer, bytes):
                    shown |= {method.name} if marks_in(answer, victim) else set()
                else:
                    where = f"{method.full_name}: {answer!r}"
                    assert answer.code in REFUSALS or answer.reason == "ROLE_EXCEEDED", where

    expected = (SHOWN_TO_THEIR_OWNER | SHOWN_TO_ADMINS) & {each.name for each in may}
    assert shown >= expected, expected - shown


async def test_no_frame_reaches_a_running_request_of_another_organization(service: Service) -> None:
    """Every kind of frame, with the id of another organization's running request."""
    one, other = await service.tenant(), await service.tenant()
    async with service.stream(one.secret) as stream, service.stream(other.secret) as theirs:
        request_id = await stream.begin(max_output_tokens=300)
        await stream.received(request_id, 1)
        frames = {"cancel": cancel(request_id), "start": start(request_id, max_output_tokens=3)}
        kinds = [field.name for field in pb.ClientFrame.DESCRIPTOR.oneofs_by_name["kind"].fields]
        for kind in set(kinds) - {"start"}:
            frame = frames.get(kind) or pb.ClientFrame(request_id=request_id)
            if kind not in frames:
                getattr(frame, kind).SetInParent()
            # A stream on which the id has ended reports no more of it.
            async with service.stream(other.secret) as fresh:
                await fresh.send(frame)
                assert (await fresh.failed(request_id)).code is StatusCode.NOT_FOUND, kind
        await theirs.send(frames["start"])  # from here on the id is also one of their own
        finished = await theirs.finished(request_id)

        assert finished.usage.delivered_token_count == 3, "their own, under the same id"
        assert (await stream.finished(request_id)).usage.delivered_token_count == 300
    assert service.database.event(one, request_id)["api_key_id"] == one.key.id
    assert service.database.event(other, request_id)["api_key_id"] == other.key.id
