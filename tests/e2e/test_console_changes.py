"""Changes made in the console leave the same rows and audit entries as those made over gRPC."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from sqlalchemy import insert

from api.console.console import NAMES
from metering.core.models import PriceVersion
from metering.invoicing.adjustments import create_adjustment
from metering.pricing.prices import get_price
from metering.tenants.api_keys import find_api_key
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.tenants import find_organization
from tests.metering.usage import Consumed, Customer, add_usage
from tests.service import MODEL, PATIENCE_S, Service, Tenant, bearer

Body = dict[str, Any]
Send = Callable[[str, Body], Awaitable[Body]]

# Tables that change without a call: uses of keys, and reports of processes about themselves; and
# the last number of a document, which each call raises.
MOVING = {"api_key_uses", "live_reports", "document_series"}
# Fields of rows that number them.
OF_SEQUENCES = {
    *("id", "transaction_id", "event_id", "account_id", "price_version_id"),
    *("ordinal", "credit_note_ordinal", "ledger_transaction_id", "plan_version_id"),
    "statement_id",
}
LEARNED = (
    "apiKeyId",
    "quotaId",
    "projectId",
    "invitationId",
    "adjustmentId",
    "invoiceNumber",
)  # fields of answers that later requests refer to

ORGANIZATION = {"organization": "{name}"}
RENAMED = {"organization": "{name}x"}
PROJECT = {"project": "{projectId}"}
KEY = {"apiKey": "{apiKeyId}"}
QUOTA = {"quotaId": "{quotaId}"}
LIMIT = {"subject": "QUOTA_SUBJECT_ORGANIZATION", "dimension": "QUOTA_DIMENSION_TOKENS_PER_DAY"}
REPLICA = {"model": MODEL, "replica": f"{MODEL}#0", "reason": "test"}
INVITED = ORGANIZATION | {"email": "new-{name}@example.com", "role": "viewer"}
MEMBER = ORGANIZATION | {"member": "{email}"}
PERSON = {"person": "{email}"}
ACCOUNT = ORGANIZATION | {"serviceAccount": "ci"}
PRICE = ORGANIZATION | {
    "model": "{name}",
    "inputPicosPerToken": "3",
    "cachedInputPicosPerToken": "2",
    "outputPicosPerToken": "9007199254741",
    "batchMultiplierMilli": "1000",
}
LAST_MONTH = ORGANIZATION | {"month": "{lastMonth}"}
ADJUSTMENT = {"adjustmentId": "{adjustmentId}"}
GOOD_WILL = {"amount": {"units": "-1", "picos": "-500000000000"}, "reason": "good will"}
RESTRICTED = {"maxOutputTokens": "9", "allowedNetworks": ["127.0.0.0/8"], "models": [MODEL]}
# Each change of the console once, except the end of a request, in an order in which all succeed.
STEPS: list[tuple[str, Body]] = [
    ("AdminService/CreateOrganization", {"name": "{name}", "currencyCode": "EUR"}),
    (
        "AdminService/SetBillingProfile",
        ORGANIZATION | {"billingProfile": {"legalName": "Ann", "taxId": "1"}},
    ),
    ("AdminService/SetQueueWeight", ORGANIZATION | {"queueWeightMilli": "2000"}),
    ("AdminService/CreateProject", ORGANIZATION | {"name": "main"}),
    (
        "AdminService/CreateApiKey",
        ORGANIZATION | RESTRICTED | {"project": "main", "name": "ci", "role": "viewer"},
    ),
    ("AdminService/UpdateApiKey", KEY | {"name": "build", "allModels": True, "role": "developer"}),
    ("AdminService/RotateApiKey", KEY | {"overlap": "3600s"}),
    ("AdminService/RevokeApiKey", KEY),
    ("AdminService/SetQuota", LIMIT | {"subjectRef": "{name}", "limitValue": "7"}),
    (
        "AdminService/OverrideQuota",
        QUOTA | {"limitValue": "9", "expireTime": "{tomorrow}", "reason": "launch"},
    ),
    ("AdminService/DeleteQuota", QUOTA),
    (
        "AdminService/SetQuota",
        LIMIT | {"subjectRef": "{name}", "limitValue": "7", "endUser": "ann"},
    ),
    ("AdminService/EraseEndUser", ORGANIZATION | {"endUser": "ann"}),
    ("AdminService/PreviewQuota", LIMIT | {"subjectRef": "{name}", "limitValue": "7"}),
    ("AdminService/SetPrice", PRICE),
    ("AdminService/SimulatePrices", LAST_MONTH | {"prices": [PRICE]}),
    ("AdminService/WithdrawPrice", ORGANIZATION | {"model": "{name}"}),
    ("AdminService/CreatePlan", {"plan": {"name": "{name}", "currencyCode": "EUR"}}),
    ("AdminService/AssignPlan", ORGANIZATION | {"plan": "{name}"}),
    (
        "AdminService/GrantCredit",
        ORGANIZATION | {"amountPicos": "5", "lastMonth": "2999-12", "reason": "test"},
    ),
    ("AdminService/SetPrepaid", ORGANIZATION | {"prepaid": True}),
    ("AdminService/SetPrepaid", ORGANIZATION | {"prepaid": False}),
    ("AdminService/SetAlertWebhook", ORGANIZATION | {"url": "https://example.com/alerts"}),
    ("AdminService/TestAlertWebhook", ORGANIZATION),
    ("AdminService/DeleteAlertWebhook", ORGANIZATION),
    ("AdminService/InviteMember", INVITED),
    ("AdminService/ResendInvitation", {"invitationId": "{invitationId}"}),
    ("AdminService/RevokeInvitation", {"invitationId": "{invitationId}"}),
    ("AdminService/UpdateMember", MEMBER | {"role": "finance"}),
    ("AdminService/DeactivatePerson", PERSON),
    ("AdminService/ReactivatePerson", PERSON),
    ("AdminService/CreateSignInLink", PERSON),
    ("AdminService/RemoveMember", MEMBER | {"revokeKeys": True}),
    ("AdminService/CreateServiceAccount", ORGANIZATION | {"name": "ci", "role": "viewer"}),
    ("AdminService/UpdateServiceAccount", ACCOUNT | {"role": "finance"}),
    ("AdminService/DeleteServiceAccount", ACCOUNT),
    ("InferenceService/CreateClientToken", {"call": "chat/completions", "model": MODEL}),
    ("BillingService/CreateAdjustment", ORGANIZATION | GOOD_WILL),
    ("BillingService/RejectAdjustment", ADJUSTMENT),
    ("BillingService/CloseMonth", LAST_MONTH),
    (
        "BillingService/CreateCreditNote",
        {"invoiceNumber": "{invoiceNumber}", "amount": {"units": "1"}, "reason": "an outage"},
    ),
    ("BillingService/ApproveAdjustment", ADJUSTMENT),
    ("AdminService/SuspendProject", PROJECT | {"reason": "test"}),
    ("AdminService/ResumeProject", PROJECT),
    ("AdminService/UpdateProject", PROJECT | {"name": "other"}),
    ("AdminService/CloseProject", PROJECT | {"reason": "test", "confirmName": "other"}),
    ("AdminService/SuspendOrganization", ORGANIZATION | {"reason": "test"}),
    ("AdminService/ResumeOrganization", ORGANIZATION),
    ("AdminService/UpdateOrganization", ORGANIZATION | {"name": "{name}x"}),
    ("AdminService/BindOrganization", RENAMED),
    (
        "AdminService/CloseOrganization",
        RENAMED
        | {"reason": "test", "confirmName": "{name}x", "remainingCredit": "REMAINING_CREDIT_KEEP"},
    ),
    ("AdminService/DrainReplica", REPLICA),
    ("AdminService/UndrainReplica", REPLICA),
]
# Calls that look like changes.
HARMLESS = {"AdminService/PreviewQuota", "AdminService/SimulatePrices"}
# The first changes nothing but the list of alerts, the second grants nothing that its key has not,
# and the third finds no region to change: the fleet of the tests has none.
UNAUDITED = HARMLESS | {
    "AdminService/TestAlertWebhook",
    "InferenceService/CreateClientToken",
    "AdminService/BindOrganization",
}
READS = ("List", "Get", "Export", "Verify")


def test_the_table_has_every_change_of_the_console() -> None:
    changes = {name for name in NAMES if not name.partition("/")[2].startswith(READS)}

    assert changes - {name for name, _ in STEPS} == {"AdminService/KillRequest"}


def over_console(service: Service, http: aiohttp.ClientSession, secret: str) -> Send:
    async def send(name: str, body: Body) -> Body:
        headers = {"authorization": f"Bearer {secret}"}
        url = f"{service.openai_url.removesuffix('/v1')}/console/api/{name}"
        async with http.post(url, json=body, headers=headers) as response:
            answer: Body = await response.json()
            assert response.status == 200, (name, answer)
            return answer

    return send


def over_grpc(channel: grpc.aio.Channel, secret: str) -> Send:
    async def send(name: str, body: Body) -> Body:
        service, _, method = name.partition("/")
        described = Default().FindServiceByName(f"weir.v1.{service}").methods_by_name[method]
        request = json_format.ParseDict(body, GetMessageClass(described.input_type)())
        call: Any = channel.unary_unary(
            f"/weir.v1.{name}", request_serializer=type(request).SerializeToString
        )
        answered = bytes(await call(request, metadata=bearer(secret)))
        answer = GetMessageClass(described.output_type).FromString(answered)
        return json_format.MessageToDict(answer)

    return send


def rows(service: Service) -> dict[str, list[str]]:
    """Return all rows of all tables as JSON, by table."""
    tables = (
        "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition AND"
        " relnamespace = 'public'::regnamespace"
    )
    found = {}
    for table in (row["relname"] for row in service.database.rows(tables)):
        if table not in MOVING:
            query = f'SELECT to_jsonb(t)::text AS row FROM "{table}" t'
            found[table] = [row["row"] for row in service.database.rows(query)]
    return found


def changed(
    before: dict[str, list[str]], after: dict[str, list[str]], names: dict[str, str]
) -> list[str]:
    """Return the rows that a call added, changed or removed, without what no two calls share."""
    lines = []
    for table, now in after.items():
        old = set(before[table])
        for sign, those in (("+", set(now) - old), ("-", old - set(now))):
            lines += [f"{sign} {table} {steady(each, names)}" for each in those]
    return sorted(lines)


def steady(row: str, names: dict[str, str]) -> str:
    """Replace ids, times, secrets and the given names in a row."""
    for name, shown in names.items():
        row = row.replace(name, shown)
    row = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", row)
    row = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(Z|[+-][\d:]+)?", "TIME", row)
    row = re.sub(r"(wk|wl|wi|wct)_[\w-]+|\\+x[0-9a-f]{8,}|wh_[\w-]+", "SECRET", row)
    row = re.sub(r"\b(INV|CN)-\d{6}\b|\(price \d+\)", "NUMBER", row)
    row = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", row)
    row = re.sub(r'"\d+(\.\d+)?s"', '"DURATION"', row)
    row = re.sub(r'"(subject_id|version)": "\d+"', '"NUMBER": ""', row)
    return json.dumps(json.loads(row, object_hook=without_sequences))


def without_sequences(fields: Body) -> Body:
    return {key: value for key, value in fields.items() if key not in OF_SEQUENCES}


async def test_a_change_in_the_console_leaves_the_rows_and_audit_of_the_command(
    service: Service,
) -> None:
    admin = await service.tenant(scopes=("admin", "inference"))
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with service.channel() as channel, aiohttp.ClientSession(timeout=timeout) as http:
        senders = (over_console(service, http, admin.secret), over_grpc(channel, admin.secret))
        by_console, by_grpc = [
            [each async for each in left_by(service, send, admin)] for send in senders
        ]

    for console, command in zip(by_console, by_grpc, strict=True):
        assert console == command
        assert not (console.name in HARMLESS and console.lines), console.name
        audited = [line for line in console.lines if line.startswith("+ audit_log")]
        assert bool(audited) == (console.name not in UNAUDITED), console.name
        assert all('"actor": "ADMIN"' in line for line in audited), console.name


@dataclass(frozen=True, slots=True)
class Left:
    """Rows that a change added or removed, and its answer."""

    name: str
    lines: list[str]
    answer: str


async def left_by(service: Service, send: Send, admin: Tenant) -> AsyncIterator[Left]:
    """Make every change for a new customer, and yield what each leaves."""
    values = {
        "name": (customer := f"c{uuid.uuid4().hex[:16]}"),
        "email": f"ann@{customer}.example.com",
        "tomorrow": (datetime.now(UTC) + timedelta(days=1)).isoformat(),
        "lastMonth": f"{last_month():%Y-%m}",
    }
    names = {values["name"]: "NAME", admin.key.prefix: "ADMIN"}
    for name, request in STEPS:
        text = json.dumps(request)
        for field, value in values.items():
            text = text.replace(f"{{{field}}}", value)
        body = json.loads(text)
        match name:
            case "AdminService/UpdateMember":
                await join(service, values["name"], values["email"])
            case "BillingService/CloseMonth":
                await use(service, values["name"], values["apiKeyId"])
            case "BillingService/ApproveAdjustment":
                body["adjustmentId"] = await propose(service, values["name"])
        before = rows(service)
        answer = await send(name, body)
        for part in filter(lambda each: isinstance(each, dict), answer.values()):
            values |= {field: part[field] for field in LEARNED if field in part}
        yield Left(
            name,
            changed(before, rows(service), names),
            steady(json.dumps({"answer": answer}), names),
        )


async def join(service: Service, organization: str, email: str) -> None:
    """Make a person a member."""
    async with service.session() as session:
        _, token = await invite(
            session, organization=organization, email=email, role="viewer", actor="test"
        )
        await accept_invitation(session, token=token)


def last_month() -> datetime:
    """Return a moment of the month before this one."""
    return datetime.now(UTC).replace(day=1) - timedelta(days=3)


async def use(service: Service, organization: str, api_key_id: str) -> None:
    """Add usage of 3 EUR to the last month."""
    async with service.session() as session:
        owner = await find_organization(session, organization)
        key = await find_api_key(session, api_key_id)
        values = {"model": organization, "currency_code": "EUR", "input_picos_per_token": 10**12}
        others = {"cached_input_picos_per_token": 0, "output_picos_per_token": 0}
        made = insert(PriceVersion).values(**values, **others, effective_at=last_month())
        version = (await session.scalars(made.returning(PriceVersion.id))).one()
        customer = Customer(owner.id, organization, key, "")
        used = [Consumed(3, settled_at=last_month())]
        await add_usage(session, customer, await get_price(session, version), used)


async def propose(service: Service, organization: str) -> str:
    """Propose an adjustment as another person."""
    async with service.session() as session:
        proposal = await create_adjustment(
            session,
            organization=organization,
            amount_picos=-(10**12),
            currency_code="EUR",
            reason="proposed by another",
            actor="another",
        )
    return str(proposal.id)
