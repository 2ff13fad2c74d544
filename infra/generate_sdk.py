"""Generate the values of both clients, and the Python client's unary calls, from the contract.

Run as `make proto`; `make proto-check` compares. The comments of the contract become docstrings. A
field added to a message, or to a request, needs nothing here: the tables below hold only what the
contract does not say, such as names, arguments by position, and where None stands for nothing.
Values and calls with behaviour of their own are written by hand beside the generated modules.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from infra.generate_proto import contract

CLIENT = Path(__file__).resolve().parent.parent / "sdk" / "python" / "src" / "weir_client"
TYPESCRIPT = CLIENT.parents[2] / "typescript" / "src"
COLUMNS_MAX = 100
SCALARS = {
    FieldDescriptorProto.TYPE_STRING: ("str", '""'),
    FieldDescriptorProto.TYPE_BYTES: ("bytes", 'b""'),
    FieldDescriptorProto.TYPE_BOOL: ("bool", "False"),
    FieldDescriptorProto.TYPE_DOUBLE: ("float", "0.0"),
    FieldDescriptorProto.TYPE_FLOAT: ("float", "0.0"),
}
# Messages and enumerations whose values have another name than in the contract.
NAMES = {
    "AppliedPrice.Source": "PriceSource",
    "ApplyConfigurationResponse": "AppliedConfiguration",
    "AcceptInvitationResponse": "AcceptedInvitation",
    "ApplyFleetResponse": "AppliedFleet",
    "CloseMonthResponse": "ClosedMonth",
    "CloseOrganizationResponse": "ClosedOrganization",
    "CloseProjectResponse": "ClosedProject",
    "ConfigurationChange.Action": "ChangeAction",
    "CreateApiKeyResponse": "CreatedApiKey",
    "DrainReplicaResponse": "DrainedReplica",
    "Generation.State": "GenerationState",
    "GetCreditBalanceResponse": "CreditBalance",
    "EraseEndUserResponse": "ErasedEndUser",
    "ExportAuditEntriesResponse": "AuditPage",
    "GetEndUserResponse": "EndUserLimits",
    "GetFleetResponse": "ServedFleet",
    "GetForecastResponse": "UsageForecast",
    "GetMonthReportResponse": "MonthReport",
    "GetOwnUsageResponse": "UsageReport",
    "GetRequestResponse": "RecordedRequest",
    "GetTrafficResponse": "Traffic",
    "GetUsageResponse": "UsagePage",
    "InviteMemberResponse": "CreatedInvitation",
    "KillRequestResponse": "KilledRequest",
    "KillRequestResponse.Result": "KillResult",
    "ListLiveRequestsResponse": "LiveView",
    "ListPlansResponse": "PlanList",
    "ListPricesResponse": "PriceList",
    "ListReplicasResponse": "ReplicaList",
    "MonthDocumentFormat": "DocumentFormat",
    "PrepaidCreditSummary": "PrepaidCredit",
    "ErasePersonResponse": "ErasedPerson",
    "PreviewQuotaResponse": "QuotaPreview",
    "QuoteResponse": "Quote",
    "RemoveMemberResponse": "RemovedMember",
    "ResendInvitationResponse": "ResentInvitation",
    "RotateApiKeyResponse": "RotatedApiKey",
    "SetAlertWebhookResponse": "CreatedAlertWebhook",
    "UndrainReplicaResponse": "UndrainedReplica",
    "VerifyMonthResponse": "MonthVerification",
}
# Values that calls written by hand return or take; the others are found from the generated calls.
ROOTS = (
    "Alert", "AuditEntry", "EndUser", "FinishReason", "Generation", "GetForecastResponse",
    "GetOwnUsageResponse", "GetUsageResponse", "Invitation", "Invoice", "KeyRestrictions",
    "ListPlansResponse", "Model", "MonthExportFormat", "Plan", "PlanAssignment",
    "ProgressFrame.Stage", "QuoteResponse",
    "ResalePrice", "ResaleStatement", "ResaleStatementFormat", "ReplicaRental", "SimulatedCustomer",
    "Timings", "TokenLogprobs", "UsageGrouping",
)  # fmt: skip
# Values written by hand, and the modules that have them.
WRITTEN = {"Money": "weir_client.money", "Receipt": "weir_client.receipts"}
# The bases that give values their behaviour, in `plain.py`
BASES = {"QuotaStatus": "LimitName", "UsageRow": "TokenSums"}
# The arguments of lists that are read page by page, with their comments; empty: not an argument.
PAGE_ARGUMENTS = {
    "page_size": "Number of items per call to the server, 1 to 1000.",
    "page_token": "",
}
PAGE_SIZE = 100
Comments = Mapping[Any, str]  # by the path of an element in its file
# Fields that are None where the message has nothing, or 0.
OPTIONAL = frozenset({
    "Alert.delivery", "Alert.invoice", "Alert.key", "ApiKey.max_input_tokens",
    "ApiKey.max_output_tokens", "EndUser.month_cost", "EndUser.tightest_quota",
    "FieldChange.after_json", "FieldChange.before_json", "Generation.cost", "Generation.timings",
    "KeyRestrictions.latest_change", "KeyRestrictions.max_input_tokens",
    "KeyRestrictions.max_output_tokens", "KilledRequest.generation", "Model.price", "Month.total",
    "MonthReport.billing_profile", "MonthReport.carried_in", "MonthReport.carried_out",
    "MonthReport.prepaid_credit", "MonthReport.rounding", "MonthReportLine.rounded_amount",
    "ClosureEffects.remaining_credit", "ClosureEffects.unbilled",
    "Organization.billing_profile", "Organization.closure", "Organization.suspension",
    "Project.closure", "Project.suspension",
    "ResalePrice.cached_input_picos_per_token", "ResalePrice.embedding_picos_per_token",
    "ResalePrice.input_picos_per_token", "ResalePrice.output_picos_per_token",
    "ResalePrice.reasoning_picos_per_token", "UsageForecast.expected", "UsageForecast.high",
    "UsageForecast.low", "UsagePage.total",
})  # fmt: skip
# Times and durations that every message has.
ALWAYS = frozenset({
    "Alert.fire_time", "KeyChange.change_time", "LiveRequest.age", "ReplicaDrain.drain_time",
    "UsageForecast.as_of_time",
})  # fmt: skip
# Fields of another type or another default than the contract's.
TYPES = {
    "AppliedPrice.source": ("str", '""'),
    "AppliedPrice.tier": ("str", '""'),
    "ConfigurationChange.quota": ("dict[str, object]", "field(default_factory=dict)"),
    "Model.task": ("ModelTask", "ModelTask.GENERATE"),
    "MonthCharge.kind": ("str", '""'),
    "Plan.configuration": ("Mapping[str, Any]", "field(default_factory=dict)"),
    "Price.tier": ("str", '"interactive"'),
    "PriceVersion.tier": ("str", '""'),
    "QuotaStatus.enforced": ("bool", "True"),
    "UsageRow.cost": ("Money", 'field(default=Money("", 0))'),
}
RENAMED = {"Quote.retry_delay": "retry_after_s"}
# The fields of a value are in the order of their numbers, which a later release cannot change, so
# that values can be constructed by position. These began with other fields before that.
FIRST = {
    "Alert": "alert_id organization_id organization_name currency_code",
    "ApiKey": (
        "api_key_id organization_id project_id name prefix scopes create_time expire_time"
        " revoke_time overlap_end_time models allowed_networks max_input_tokens max_output_tokens"
        " strict_parameters"
    ),
    "ConfigurationChange": "action kind path fields",
    "Invoice": (
        "number organization_id organization_name month issue_time issued_by lines exact_total"
        " carried_in carried_out total credited tax_note credit_notes"
    ),
    "KeyRestrictions": ("prefix scopes models max_input_tokens max_output_tokens allowed_networks"),
    "MonthReport": "organization_id",
    "Plan": "name version configuration",
    "UsageForecast": (
        "organization_name month as_of_time month_to_date expected low high confidence_percent"
        " complete_day_count method warnings"
    ),
    "UsagePage": "rows total has_more",
}
TYPESCRIPT_ROOTS = ("AppliedPrice.Source", "ChargeKind")  # texts in Python
# Messages that the TypeScript client shows as the JSON of the contract.
AS_JSON = ("PlanConfiguration", "QuotaConfiguration")
# TypeScript counts receipts and verifies exported ones, Python reads them too. Pages are read to
# their end.
PAGE_TOKENS = frozenset({"PlanList.next_page_token", "UsagePage.next_page_token"})
TYPESCRIPT_LEFT_OUT = frozenset({"Generation.receipts", *PAGE_TOKENS})
IN_PYTHON_ONLY = frozenset({*AS_JSON})
LEFT_OUT = PAGE_TOKENS
# Fields that the client adds: type, default, options and comment.
ADDED = {
    "Invoice": {"credit_notes": ("tuple[Adjustment, ...]", "()", "", "Its credit notes.")},
    "Plan": {
        "name": ("str", '""', 'metadata={"source": "configuration.name"}', "Name of the plan."),
        "existed": ("bool", "False", "", "True if creating it found an identical version."),
    },
    "PlanAssignment": {"existed": ("bool", "False", "", "True if it was assigned before.")},
    "UsagePage": {"has_more": ("bool", "False", "", "True if another page follows.")},
}
# Enumerations whose values are their names in capitals, or with underscores; others have hyphens.
IN_CAPITALS = frozenset({"FinishReason", "Stage", "GenerationState", "ModelTask"})
WITH_UNDERSCORES = frozenset({
    "UsageGrouping", "MonthExportFormat", "DocumentFormat", "ResaleStatementFormat",
})  # fmt: skip

# Calls and their arguments: `a` is required, `a?` is not, `*a` is required by name, `a=1` has a
# default, `a:b` renames the field `a`. Fields that are not named are optional, by name. A call
# without an entry is written by hand.
CALLS: Mapping[str, Mapping[str, str]] = {
    "AdminService": {
        "CreateOrganization": "name",
        "UpdateOrganization": "organization name",
        "SuspendOrganization": "organization reason",
        "ResumeOrganization": "organization",
        "CloseOrganization": "organization",
        "BindOrganization": "organization region",
        "ListOrganizations": "",
        "SetBillingProfile": "organization billing_profile:profile",
        "SetQueueWeight": "organization queue_weight_milli",
        "CreateProject": "organization name",
        "UpdateProject": "project name",
        "SuspendProject": "project reason",
        "ResumeProject": "project",
        "CloseProject": "project",
        "ExportAuditEntries": "after_entry_id?",
        "ListProjects": "organization",
        "CreateApiKey": "organization project name",
        "RotateApiKey": "api_key",
        "UpdateApiKey": "api_key",
        "RevokeApiKey": "api_key",
        "ListApiKeys": "organization?",
        "SetQuota": "subject subject_ref dimension limit_value",
        "PreviewQuota": "subject subject_ref dimension limit_value",
        "OverrideQuota": "quota_id limit_value expire_time reason",
        "SetPrice": (
            "model *input_picos_per_token *cached_input_picos_per_token *output_picos_per_token"
        ),
        "WithdrawPrice": "organization model",
        "ListPrices": "organization?",
        "GrantCredit": "organization amount_picos *last_month *reason",
        "ListCreditGrants": "organization?",
        "GetCreditBalance": "organization",
        "SetPrepaid": "organization prepaid",
        "ListLiveRequests": "organization? page_size=200",
        "GetRequest": "request_id",
        "KillRequest": "request_id",
        "ExpireOverdueHolds": "",
        "ApplyConfiguration": "configuration",
        "ListReplicas": "model?",
        "DrainReplica": "model replica:name move_after:move_after_s",
        "UndrainReplica": "model replica:name",
        "SetAlertWebhook": "organization url",
        "ListAlertWebhooks": "organization?",
        "DeleteAlertWebhook": "organization",
        "TestAlertWebhook": "organization",
        "EraseEndUser": "organization end_user",
        "CreateTokenIssuer": "organization issuer audience projects",
        "DeleteTokenIssuer": "token_issuer_id:token_issuer",
        "ListTokenIssuers": "organization?",
        "RevokeTokens": "token_issuer_id:token_issuer claim value",
        "GetFleet": "number?",
        "ApplyFleet": "document?",
        "ListFleetVersions": "",
        "ListMembers": "organization",
        "ListInvitations": "organization",
        "ListServiceAccounts": "organization",
        "ListProvisionedGroups": "organization",
        "ListPersons": "",
        "InviteMember": "organization email role",
        "ResendInvitation": "invitation_id",
        "RevokeInvitation": "invitation_id",
        "AcceptInvitation": "display_name?",
        "UpdateMember": "organization member role",
        "RemoveMember": "organization member",
        "CreateServiceAccount": "organization name",
        "UpdateServiceAccount": "organization service_account role",
        "DeleteServiceAccount": "organization service_account",
        "UpdatePerson": "person display_name",
        "DeactivatePerson": "person",
        "ReactivatePerson": "person",
        "CreateSignInLink": "person",
        "ErasePerson": "person",
        "SetGroupRole": "organization group role",
        "GetTraffic": "period?",
        "ListConcerns": "",
    },
    "BillingService": {
        "GetMonthReport": "organization month",
        "GetMonthDocument": "organization month format:document_format",
        "ListMonths": "organization",
        "CloseMonth": "organization month correcting_adjustment_id:corrected_by",
        "VerifyMonth": "organization month",
        "CreateAdjustment": "organization amount reason",
        "CreateCreditNote": "invoice_number amount reason",
        "ApproveAdjustment": "adjustment_id",
        "RejectAdjustment": "adjustment_id",
        "ListAdjustments": "organization",
        "GetEndUser": "end_user",
        "GetForecast": "organization? month?",
        "SetResalePrice": "organization? model?",
        "RentReplicas": "end_user model replica_count?",
        "EndReplicaRental": "rental_id end_time?",
    },
}
# Never sent twice by the client itself: only the first response has the secrets.
ONCE = frozenset({
    "CreateApiKey", "RotateApiKey", "ApplyConfiguration", "InviteMember", "ResendInvitation",
    "AcceptInvitation", "CreateSignInLink",
})  # fmt: skip
# Responses of which one field is the result.
RESULTS = {
    "CreateOrganization": "organization",
    "SetGroupRole": "group",
    "CreateProject": "project",
    "GetMonthDocument": "content",
    "SetPrepaid": "existed",
    "SetPrice": "versions",
    "SetResalePrice": "price",
    "RentReplicas": "rental",
    "EndReplicaRental": "rental",
}
ERRORS = {
    "ALREADY_EXISTS": "AlreadyExists",
    "FAILED_PRECONDITION": "FailedPrecondition",
    "INVALID_ARGUMENT": "InvalidRequest",
    "NOT_FOUND": "NotFound",
    "PERMISSION_DENIED": "PermissionDenied",
    "RESOURCE_EXHAUSTED": "ResourceExhausted",
    "UNAVAILABLE": "Unavailable",
}
HEAD = '''"""{title}

Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
"""

from __future__ import annotations

'''
JS_HEAD = """/**
 * {title}
 *
 * Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
 */
"""


@dataclass(slots=True)
class Element:
    """Message or enumeration of the contract with its comments: its own, and those of its parts."""

    proto: Any
    name: str  # without the package
    module: str  # of its generated code
    comment: str
    comments: list[str]

    @property
    def value(self) -> str:
        """Name of its value in the client."""
        return NAMES.get(self.name, self.name.rpartition(".")[2])


class Contract:
    """Elements of the contract by name."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.elements: dict[str, Element] = {}
        self.services: dict[str, Element] = {}
        for file in files.file:
            comments = {
                tuple(each.path): each.leading_comments for each in file.source_code_info.location
            }
            module = Path(file.name).stem + "_pb2"
            for index, message in enumerate(file.message_type):
                self._message(message, (4, index), "", module, comments)
            for index, enum in enumerate(file.enum_type):
                self._enum(enum, (5, index), "", module, comments)
            for index, service in enumerate(file.service):
                of_methods = [
                    comments.get((6, index, 2, number), "") for number in range(len(service.method))
                ]
                self.services[service.name] = Element(
                    service, service.name, module, comments.get((6, index), ""), of_methods
                )

    def _message(
        self, proto: Any, path: tuple[int, ...], outer: str, module: str, comments: Comments
    ) -> None:
        name = outer + proto.name
        of_fields = [comments.get((*path, 2, each), "") for each in range(len(proto.field))]
        self.elements[name] = Element(proto, name, module, comments.get(path, ""), of_fields)
        for index, nested in enumerate(proto.nested_type):
            self._message(nested, (*path, 3, index), f"{name}.", module, comments)
        for index, enum in enumerate(proto.enum_type):
            self._enum(enum, (*path, 4, index), f"{name}.", module, comments)

    def _enum(
        self, proto: Any, path: tuple[int, ...], outer: str, module: str, comments: Comments
    ) -> None:
        of_values = [comments.get((*path, 2, each), "") for each in range(len(proto.value))]
        self.elements[outer + proto.name] = Element(
            proto, outer + proto.name, module, comments.get(path, ""), of_values
        )

    def of(self, type_name: str) -> Element | None:
        """Find the element of a field's type; None for types of other packages."""
        return self.elements.get(type_name.removeprefix(".weir.v1."))

    def text(self, comment: str) -> str:
        """Join a comment to one paragraph, with references to other fields resolved."""

        def referred(match: re.Match[str]) -> str:
            found = self.elements.get(match[1])
            names = [] if found is None else [each.name for each in found.proto.field]
            if found is None or match[2] not in names:
                return match[0]
            rest = match[3].lstrip(":. ")
            shown = self.text(found.comments[names.index(match[2])])
            return f"{shown} {rest[:1].upper()}{rest[1:]}".rstrip()

        joined = " ".join(comment.split())
        joined = re.sub(r"^See `(\w+)\.(\w+)`([.:].*)", referred, joined)
        for status, name in ERRORS.items():
            joined = joined.replace(status, name)
        return joined.replace("\\", "\\\\")


def paragraphs(text: str, indent: str, first: str = "", last: str = "") -> Iterator[str]:
    """Wrap a text to lines; `first` and `last` are put around it."""
    yield from textwrap.wrap(
        first + text + last,
        COLUMNS_MAX,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def docstring(text: str, indent: str) -> Iterator[str]:
    yield from paragraphs(text, indent, '"""', '"""')


def type_of(found: Contract, owner: str, each: Any) -> tuple[str, str]:
    """Choose the type of a field of a value, and its default; empty for none."""
    name = f"{owner}.{each.name}"
    if name in TYPES:
        return TYPES[name]
    is_list = each.label == FieldDescriptorProto.LABEL_REPEATED
    inner, default = SCALARS.get(each.type, ("int", "0"))
    if each.type in (FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_ENUM):
        if each.type_name.endswith(("Timestamp", "Duration")):
            inner = "datetime" if each.type_name.endswith("Timestamp") else "float"
            return (inner, "") if name in ALWAYS else (f"{inner} | None", "None")
        element = found.of(each.type_name)
        assert element is not None
        if is_map(element):
            return "Mapping[str, str]", "field(default_factory=dict)"
        inner, default = element.value, ""
        if each.type == FieldDescriptorProto.TYPE_ENUM:
            default = f"{inner}.UNSPECIFIED"
    if is_list:
        return f"tuple[{inner}, ...]", "()"
    if name in OPTIONAL or each.proto3_optional:
        return f"{inner} | None", "None"
    return inner, default


def is_map(element: Element) -> bool:
    """Return True for the entries of a mapping, which are messages in the contract."""
    return bool(getattr(element.proto.options, "map_entry", False))


def value_class(found: Contract, element: Element) -> Iterator[str]:
    """Write the dataclass of a message. Fields before one without a default have none either."""
    yield "@dataclass(frozen=True, slots=True)"
    yield f"class {element.value}({BASES.get(element.value, 'Value')}):"
    yield from docstring(found.text(element.comment), "    ")
    yield ""
    fields: dict[str, tuple[str, str, str, str]] = {}
    numbered = zip(element.proto.field, element.comments, strict=True)
    for each, comment in sorted(numbered, key=lambda pair: pair[0].number):
        name = f"{element.value}.{each.name}"
        if name in LEFT_OUT:
            continue
        kind, default = type_of(found, element.value, each)
        attribute = RENAMED.get(name, each.name)
        if each.type_name.endswith(".Duration") and name not in RENAMED:
            attribute += "_s"
        options = ""
        if each.name == "secret":
            options = "repr=False"  # kept out of logs
        if name in RENAMED:
            options = f'metadata={{"source": "{each.name}"}}'
        fields[attribute] = kind, default, options, found.text(comment)
    for attribute, added in ADDED.get(element.value, {}).items():
        fields[attribute] = added
    order = list(dict.fromkeys([*FIRST.get(element.value, "").split(), *fields]))
    required = max((n for n, name in enumerate(order) if not fields[name][1]), default=-1)
    for number, name in enumerate(order):
        kind, default, options, comment = fields[name]
        if number <= required:
            default, options = "", options and f"field({options})"
        elif options:
            default, options = "", f"field(default={default}, {options})"
        suffix = default or options
        yield f"    {name}: {kind}" + (f" = {suffix}" if suffix else "")
        yield from docstring(comment, "    ")
    yield ""


def enum_class(found: Contract, element: Element) -> Iterator[str]:
    """Write an enumeration. Those of requests only have no UNSPECIFIED."""
    name = element.value
    yield f"class {name}(StrEnum):"
    yield from docstring(found.text(element.comment), "    ")
    yield ""
    prefix = element.proto.value[0].name.removesuffix("UNSPECIFIED")
    for each, comment in zip(element.proto.value, element.comments, strict=True):
        member = each.name.removeprefix(prefix).replace("_PICOS", "")
        if name in WITH_UNDERSCORES and each.number == 0:
            continue
        yield f'    {member} = "{enum_word(name, member)}"'
        text = found.text(comment) if each.number else "Not set, or not known to this client."
        yield from docstring(text, "    ")
    yield ""


def enum_word(name: str, member: str) -> str:
    """Spell a member of an enumeration, in both clients as on the command line."""
    if name in IN_CAPITALS:
        return member
    word = member.replace("_PICOS", "").lower()
    return word if name in WITH_UNDERSCORES else word.replace("_", "-")


def needed(found: Contract, roots: Iterable[str]) -> list[Element]:
    """Collect the roots and all elements in their fields, each after those that it needs."""
    order: dict[str, Element] = {}

    def visit(element: Element) -> None:
        if element.name in order or element.value in WRITTEN:
            return
        if is_map(element):
            return
        for each in getattr(element.proto, "field", ()):
            inner = found.of(each.type_name)
            if inner is not None and f"{element.value}.{each.name}" not in TYPES:
                visit(inner)
            elif TYPES.get(f"{element.value}.{each.name}", ("",))[0] == "ModelTask":
                visit(found.elements["ModelTask"])
        order[element.name] = element

    for root in roots:
        visit(found.elements[root])
    return list(order.values())


def names_module(values: str) -> str:
    """Write the names of the values, with which the package imports them on first use."""
    names = re.findall(r"^class (\w+)", values, re.MULTILINE)
    head = HEAD.format(title="Names of the values of the contract, separated by spaces.")
    return f'{head}\nVALUES = """\n{textwrap.fill(" ".join(sorted(names)), 100)}\n"""\n'


def values_module(found: Contract, roots: Iterable[str]) -> str:
    lines = [
        HEAD.format(title="Values of the contract: plain immutable data without gRPC."),
        "from collections.abc import Mapping",
        "from dataclasses import dataclass, field",
        "from datetime import datetime",
        "from enum import StrEnum",
        "from typing import Any",
        "",
        "from weir_client.money import Money",
        f"from weir_client.plain import {', '.join(sorted({*BASES.values(), 'Value'}))}",
        "from weir_client.receipts import Receipt",
        "",
    ]
    for element in needed(found, roots):
        write = value_class if hasattr(element.proto, "field") else enum_class
        lines += write(found, element)
    return "\n".join(lines) + "\n"


# Calls


@dataclass(frozen=True, slots=True)
class Argument:
    """Argument of a call: field, name, type, default (empty: required), and kind."""

    field: str
    name: str
    type: str
    default: str
    positional: bool
    comment: str


def arguments_of(found: Contract, method: Any, form: str) -> list[Argument]:
    """Read the arguments of a call from its request and its entry in `CALLS`."""
    request = found.of(method.input_type)
    assert request is not None
    named: dict[str, tuple[str, bool, bool, str]] = {}
    for word in form.split():
        by_name = word.startswith("*") or "=" in word
        text, _, default = word.removeprefix("*").partition("=")
        optional = text.endswith("?")
        original, _, name = text.removesuffix("?").partition(":")
        if name in ("corrected_by", "move_after_s"):
            by_name, optional = True, True
        named[original] = (name or original, not by_name, optional, default)
    found_arguments = []
    for each, comment in zip(request.proto.field, request.comments, strict=True):
        if has_pages(found, method) and each.name in PAGE_ARGUMENTS:
            comment = PAGE_ARGUMENTS[each.name]
            if not comment:
                continue
        name, positional, optional, stated = named.get(each.name, (each.name, False, True, ""))
        kind, default = argument_type(found, method, each, name)
        if each.name == "page_size" and has_pages(found, method):
            stated = str(PAGE_SIZE)
        if each.name in named and not optional and not stated:
            default = ""
            kind = kind.removesuffix(" | None")
        found_arguments.append(
            Argument(each.name, name, kind, stated or default, positional, found.text(comment))
        )
    order = list(named)
    return sorted(
        found_arguments,
        key=lambda each: (
            not each.positional,
            order.index(each.field) if each.positional else 0,
        ),
    )


def argument_type(found: Contract, method: Any, each: Any, name: str) -> tuple[str, str]:
    """Choose the type of an argument, and its default."""
    if each.name == "request_id" and method.name not in ("GetRequest", "KillRequest"):
        return "str | None", "None"
    if each.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"Sequence[{SCALARS[each.type][0]}]", "()"
    if each.type == FieldDescriptorProto.TYPE_ENUM:
        element = found.of(each.type_name)
        assert element is not None
        return element.value, f"{element.value}.UNSPECIFIED"
    if each.type == FieldDescriptorProto.TYPE_MESSAGE:
        known = {
            "Timestamp": "datetime",
            "Duration": "float" if name.endswith("_s") else "timedelta",
            "AlertThresholds": "Sequence[int]",
            "Configuration": "Mapping[str, Any]",
        }
        last = each.type_name.rpartition(".")[2]
        return f"{known.get(last, last)} | None", "None"
    kind, default = SCALARS.get(each.type, ("int", "0"))
    if each.proto3_optional or f"ApiKey.{each.name}" in OPTIONAL:
        return f"{kind} | None", "None"
    return kind, default


def result_of(found: Contract, method: Any) -> tuple[str, str, str]:
    """Choose the type of a call's result, the value to read, and the field that has it."""
    response = found.of(method.output_type)
    assert response is not None
    if response.name in NAMES:
        return response.value, response.value, ""
    fields = {each.name: each for each in response.proto.field if each.name != "next_page_token"}
    [name] = [RESULTS[method.name]] if method.name in RESULTS else fields
    each = fields[name]
    kind, _ = type_of(found, response.name, each)
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return f"list[{item}]", item, name
    return kind, kind if each.type == FieldDescriptorProto.TYPE_MESSAGE else "None", name


def call(found: Contract, method: Any, comment: str, form: str) -> Iterator[str]:
    """Write one asyncio call."""
    arguments = arguments_of(found, method, form)
    kind, value, result = result_of(found, method)
    shown = ["self"]
    for each in arguments:
        if not each.positional and "*" not in shown:
            shown.append("*")
        shown.append(f"{each.name}: {each.type}" + (f" = {each.default}" if each.default else ""))
    pages = has_pages(found, method)
    if pages:
        kind = f"AsyncIterator[{kind}]"
    yield f"    async def {pages_name(method) if pages else snake(method.name)}("
    yield f"        {', '.join(shown)}"
    yield f"    ) -> {kind}:"
    yield from paragraphs(found.text(comment), " " * 8, '"""')
    if arguments:
        yield ""
    for each in arguments:
        yield from textwrap.wrap(
            f"`{each.name}`: {each.comment}",
            COLUMNS_MAX,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
    yield '        """'
    request = found.of(method.input_type)
    assert request is not None
    sent = ", ".join(f"{each.field}={sent_value(method, each)}" for each in arguments)
    yield f"        request = wire.request({request.module}.{request.name}, {sent})"
    if pages:
        yield f"        async for page in self._pages(self._stub.{method.name}, request):"
        yield f"            yield [wire.read({value}, each) for each in page.{result}]"
        yield ""
        yield f"    {snake(method.name)} = items_of({pages_name(method)})"
        yield ""
        return
    once = ", idempotent=False" if method.name in ONCE else ""
    yield f"        response = await self._call(self._stub.{method.name}, request{once})"
    if value == "None":
        yield f"        return response.{result}"
    elif kind.startswith("list["):
        yield f"        return [wire.read({value}, each) for each in response.{result}]"
    else:
        yield f"        return wire.read({value}, response{'.' if result else ''}{result})"
    yield ""


def has_pages(found: Contract, method: Any) -> bool:
    """Return True if the call lists page by page, so that the client yields items."""
    response = found.of(method.output_type)
    assert response is not None
    return any(each.name == "next_page_token" for each in response.proto.field)


def pages_name(method: Any) -> str:
    return f"_{snake(method.name)}_pages"


def sent_value(method: Any, argument: Argument) -> str:
    if argument.field == "request_id" and argument.default == "None" and method.name not in ONCE:
        return f"{argument.name} or str(uuid.uuid4())"
    return argument.name


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def calls_module(found: Contract) -> str:
    """Write the asyncio calls of each service, and their blocking twins."""
    body: list[str] = []
    modules: set[str] = set()
    for service, forms in CALLS.items():
        element = found.services[service]
        stem = service.removesuffix("Service")
        grpc_module = f"{snake(service)}_pb2_grpc"
        modules |= {grpc_module}
        body += [
            f"class Async{stem}Calls(UnaryClient):",
            f'    """Calls of `{service}` that need no code of their own."""',
            "",
            "    @property",
            f"    def _stub(self) -> {grpc_module}.{service}AsyncStub:",
            f"        return {grpc_module}.{service}Stub(self._opened().channel)",
            "",
        ]
        methods = {each.name: each for each in element.proto.method}
        texts = dict(zip(methods, element.comments, strict=True))
        for name, form in forms.items():
            request = found.of(methods[name].input_type)
            assert request is not None
            modules.add(request.module)
            body += call(found, methods[name], texts[name], form)
        body += [
            f"class Blocking{stem}Calls(BlockingUnaryClient):",
            f'    """Blocking twins of `Async{stem}Calls`."""',
            "",
            *(
                f"    {snake(n)} = blocking_items(Async{stem}Calls.{pages_name(methods[n])})"
                if has_pages(found, methods[n])
                else f"    {snake(n)} = blocking(Async{stem}Calls.{snake(n)})"
                for n in forms
            ),
            "",
        ]
    text = "\n".join(body)
    used = sorted(
        {
            each.value
            for each in found.elements.values()
            if each.value not in WRITTEN and re.search(rf"\b{each.value}\b(?!\()", strip(text))
        }
    )
    lines = [
        HEAD.format(title="Unary calls of the administrators' clients."),
        "import uuid",
        "from collections.abc import AsyncIterator, Mapping, Sequence",
        "from datetime import datetime, timedelta",
        "from typing import Any",
        "",
        f"from weir.v1 import {', '.join(sorted(modules))}",
        "",
        "from weir_client import wire",
        "from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items",
        f"from weir_client.generated_values import {', '.join(used)}",
        "from weir_client.money import Money",
        "from weir_client.unary import UnaryClient, items_of",
        "",
    ]
    return "\n".join(lines) + text


def strip(text: str) -> str:
    """Remove docstrings and attributes, so that only uses of names are left."""
    return re.sub(r"\.\w+", "", re.sub(r'""".*?"""', "", text, flags=re.S))


def roots_of_calls(found: Contract) -> Iterator[str]:
    """Yield the elements that the calls return or take."""
    for service, forms in CALLS.items():
        for method in found.services[service].proto.method:
            if method.name not in forms:
                continue
            request, response = found.of(method.input_type), found.of(method.output_type)
            assert request is not None
            assert response is not None
            if response.name in NAMES:
                yield response.name
            parts = [] if response.name in NAMES else list(response.proto.field)
            for each in (*parts, *request.proto.field):
                inner = found.of(each.type_name)
                if inner is not None and inner.name not in ("AlertThresholds", "Configuration"):
                    yield inner.name


# TypeScript


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(each[:1].upper() + each[1:] for each in rest)


def js_doc(text: str, indent: str) -> Iterator[str]:
    """Write a comment, on one line if it fits."""
    if len(indent + text) + len("/**  */") <= COLUMNS_MAX:
        yield f"{indent}/** {text} */"
    else:
        yield f"{indent}/**"
        yield from paragraphs(text, f"{indent} * ")
        yield f"{indent} */"


def typescript_enum(found: Contract, element: Element) -> Iterator[str]:
    """Write an enumeration as a union of its words, those of the Python client."""
    text = found.text(element.comment)
    prefix = element.proto.value[0].name.removesuffix("UNSPECIFIED")
    words = [
        enum_word(element.value, each.name.removeprefix(prefix))
        for each in element.proto.value
        if each.number or element.value not in WITH_UNDERSCORES
    ]
    if element.value == "QuotaDimension":
        yield from js_doc(f'{text} "unspecified": newer than this client.', "")
        yield "export const QUOTA_DIMENSIONS = ["
        yield from (f'  "{each}",' for each in words)
        yield "] as const;"
        yield ""
        yield from js_doc(text, "")
        yield "export type QuotaDimension = (typeof QUOTA_DIMENSIONS)[number];"
    else:
        newer = "" if element.value in WITH_UNDERSCORES else f" {words[0]}: newer than this client."
        yield from js_doc(text + newer, "")
        yield f"export type {element.value} ="
        yield from (f'  | "{each}"' for each in words[:-1])
        yield f'  | "{words[-1]}";'
    yield ""


def typescript_field(found: Contract, owner: str, each: Any) -> tuple[str, str, str]:
    """Choose the name and the type of a field, and the expression that reads it from `value`."""
    name = f"{owner}.{each.name}"
    source = f"value.{camel(each.name)}"
    is_list = each.label == FieldDescriptorProto.LABEL_REPEATED
    shown = RENAMED.get(name, each.name).removesuffix("_s")
    if each.type_name.endswith(".ServiceTier"):
        batch = f'{source} === ServiceTier.BATCH ? "batch" : "interactive"'
        return camel(shown), '"interactive" | "batch"', batch
    if each.type == FieldDescriptorProto.TYPE_ENUM:
        element = found.of(each.type_name)
        assert element is not None
        if element.value == "QuotaDimension":
            return camel(shown), element.value, f"dimension({source})"
        message = element.name.replace(".", "_")
        read = "name" if element.value in IN_CAPITALS else "word"
        return camel(shown), element.value, f"{read}<{element.value}>({message}Message, {source})"
    if each.type == FieldDescriptorProto.TYPE_MESSAGE:
        if each.type_name.endswith(".Timestamp"):
            return camel(shown), "Date | undefined", f"date({source})"
        if each.type_name.endswith(".Duration"):
            return camel(f"{shown}_ms"), "number | undefined", f"durationMs({source})"
        element = found.of(each.type_name)
        assert element is not None
        if element.name in AS_JSON:
            read = f"{source} && toJson({element.name}Schema, {source})"
            return camel(shown), "JsonValue | undefined", read
        if is_map(element):
            return camel(shown), "Readonly<Record<string, string>>", source
        read = element.value[:1].lower() + element.value[1:]
        if is_list:
            return (
                camel(shown),
                f"readonly {element.value}[]",
                f"{source}.map((each) => {read}(each))",
            )
        if name in OPTIONAL or each.proto3_optional:
            return camel(shown), f"{element.value} | undefined", f"{source} && {read}({source})"
        return camel(shown), element.value, f"{read}({source})"
    kind, _ = SCALARS.get(each.type, ("int", ""))
    is_wide = each.type in (FieldDescriptorProto.TYPE_INT64, FieldDescriptorProto.TYPE_UINT64)
    is_exact = is_wide and each.name.endswith(("_value", "_picos", "_picos_per_token", "alert_at"))
    shape = {"str": "string", "bool": "boolean", "bytes": "Uint8Array"}.get(
        kind, "bigint" if is_exact else "number"
    )
    is_count = is_wide and not is_exact
    if is_list:
        return camel(shown), f"readonly {shape}[]", f"{source}.map(count)" if is_count else source
    read = f"count({source})" if is_count else source
    if name in OPTIONAL:
        return camel(shown), f"{shape} | undefined", f"{read} || undefined"
    if each.proto3_optional and read == source:
        return camel(shown), f"{shape} | undefined", read
    return camel(shown), shape, read


def typescript_modules(found: Contract) -> dict[str, str]:
    """Write the values of the TypeScript client, and their conversion from messages."""
    values: list[str] = []
    reads: list[str] = []
    imports: dict[str, set[str]] = {}
    names = []
    for element in needed(found, [*ROOTS, *TYPESCRIPT_ROOTS, *roots_of_calls(found)]):
        if element.name in IN_PYTHON_ONLY:
            continue
        symbol = element.name.replace(".", "_")
        if not hasattr(element.proto, "field"):
            values += typescript_enum(found, element)
            continue
        names.append(element.value)
        used = imports.setdefault(gen_path(element), set())
        used |= {f"type {symbol} as {symbol}Message", f"{symbol}Schema"}
        values += js_doc(found.text(element.comment), "")
        values.append(f"export interface {element.value} {{")
        first = len(values)
        lines = []
        for each, comment in zip(element.proto.field, element.comments, strict=True):
            if f"{element.value}.{each.name}" in TYPESCRIPT_LEFT_OUT:
                continue
            name, kind, read = typescript_field(found, element.value, each)
            if "name<" in read or "word<" in read or "toJson(" in read:
                other = found.of(each.type_name)
                assert other is not None
                path, symbol_of = gen_path(other), other.name.replace(".", "_")
                suffix = "Schema" if "toJson(" in read else f" as {symbol_of}Message"
                imports.setdefault(path, set()).add(symbol_of + suffix)
            values += js_doc(found.text(comment), "  ")
            values.append(f"  readonly {name}: {kind};")
            lines.append(f"    {name}: {read},")
        values += ["}", ""]
        exact = any("bigint" in each for each in values[first:])
        function = element.value[:1].lower() + element.value[1:]
        reads += [
            f"export function {function}(",
            f"  value: {symbol}Message = create({symbol}Schema),",
            f"): {element.value} {{",
            "  return jsonable({" if exact else "  return {",
            *lines,
            "  });" if exact else "  };",
            "}",
            "",
        ]
    imports["./gen/weir/v1/inference_service_pb.js"].add("ServiceTier")
    unions = set(re.findall(r"(?:name|word)<(\w+)>", "\n".join(reads)))
    head = [
        'import { create, toJson } from "@bufbuild/protobuf";',
        'import { count, date, dimension, durationMs, money, name, word } from "./conversion.js";',
    ]
    for path, symbols in sorted(imports.items()):
        head += imported(symbols, path)
    head += imported({f"type {each}" for each in {*names, *unions}}, "./generated_values.js")
    head += ['import { jsonable } from "./money.js";', ""]
    return {
        "generated_values.ts": "\n".join(
            [
                JS_HEAD.format(title="Values of the contract: plain data without gRPC."),
                'import type { JsonValue } from "@bufbuild/protobuf";',
                'import type { Money } from "./money.js";',
                "",
                *values,
            ]
        ),
        "generated_calls.ts": typescript_calls(found),
        "generated_wire.ts": "\n".join(
            [JS_HEAD.format(title="Conversion of messages to values."), *head, *reads]
        ),
    }


def gen_path(element: Element) -> str:
    """Return the module with the generated code of an element."""
    return f"./gen/weir/v1/{element.module.removesuffix('_pb2')}_pb.js"


def typescript_argument(found: Contract, each: Any, name: str) -> tuple[str, str, str]:
    """Choose name and type of an argument, and the init of its field from `{}`."""
    is_list = each.label == FieldDescriptorProto.LABEL_REPEATED
    shown = camel(name.removesuffix("_s"))
    last = each.type_name.rpartition(".")[2]
    if each.type == FieldDescriptorProto.TYPE_ENUM:
        element = found.of(each.type_name)
        assert element is not None
        numbers = f"{element.name.replace('.', '_')}Message"
        return shown, element.value, f'{{}} && numberOf("#", {numbers}, {{}})'
    messages = {
        "Timestamp": ("Date", "{} && timestampFromDate({})"),
        "Duration": ("number", 'duration("#", {})'),
        "AlertThresholds": ("readonly number[]", "{} && { values: {}.map(BigInt) }"),
        "Configuration": ("JsonObject", "fromJson(ConfigurationSchema, {})"),
        "Money": ("Money", "{} && moneyInit({})"),
        "BillingProfile": (
            "Partial<BillingProfile>",
            "{} && { ...{}, emails: [...({}.emails ?? [])] }",
        ),
    }
    if each.type == FieldDescriptorProto.TYPE_MESSAGE:
        kind, init = messages[last]
        return (f"{shown}Ms" if last == "Duration" else shown), kind, init
    kind, _ = SCALARS.get(each.type, ("int", ""))
    shape = {"str": "string", "bool": "boolean"}.get(kind, "number | bigint")
    if is_list:
        return shown, f"readonly {shape}[]", "{} && [...{}]"
    if each.type in (FieldDescriptorProto.TYPE_INT64, FieldDescriptorProto.TYPE_UINT64):
        return shown, shape, 'whole("#", {})'
    return shown, shape.removesuffix(" | bigint"), "{}"


def typescript_call(found: Contract, service: str, method: Any, comment: str, form: str) -> str:
    """Write one call, preceded by its options."""
    request = found.of(method.input_type)
    assert request is not None
    fields = {each.name: each for each in request.proto.field}
    shown, documented, inits = [], [], []
    options: list[str] = []
    is_required = False
    for each in arguments_of(found, method, form):
        name, kind, init = typescript_argument(found, fields[each.field], each.name)
        access = name if each.positional and not each.default else f"options.{name}"
        if access == name:
            shown.append(f"{name}: {kind}")
            documented.append(f"@param {name} {each.comment}")
        else:
            optional = "?" if each.default else ""
            is_required |= not optional
            options += js_doc(each.comment, "  ")
            options.append(f"  readonly {name}{optional}: {kind}{' | undefined' * bool(optional)};")
        if each.field == "request_id" and each.default and method.name not in ONCE:
            init = "{} ?? randomUUID()"
        if not each.default:
            init = init.removeprefix("{} && ")  # it is always there
        if each.field == "page_size" and has_pages(found, method):
            init = f"{{}} ?? {PAGE_SIZE}"
        init = init.replace("{}", access).replace("#", name)
        line = f"      {camel(each.field)}: {init},"
        if len(line) > COLUMNS_MAX:
            line = line.replace(": ", f":\n{' ' * 8}", 1).replace(" && ", f" &&\n{' ' * 8}", 1)
        inits.append(line)
    kind, value, result = result_of(found, method)
    kind = re.sub(r"list\[(\w+)\]", r"\1[]", kind).replace("bool", "boolean")
    if kind == "int":
        kind, value = "number", "Count"
    kind = kind.replace("bytes", "Uint8Array").replace("str", "string")
    pages = has_pages(found, method)
    read = value[:1].lower() + value[1:]
    answer = f"response.{camel(result)}" if result else "response"
    if value != "None":
        answer = f"{answer}.map((each) => wire.{read}(each))" if "[]" in kind else (
            f"wire.{read}({answer})"
        )  # fmt: skip
    name = camel(snake(method.name))
    kind_of_options = "CallOptionsOf"
    lines = []
    if options:
        kind_of_options = f"{method.name}Options"
        lines += [*js_doc(f"Options of `{name}`.", "")]
        lines += [f"export interface {kind_of_options} extends CallOptionsOf {{", *options, "}", ""]
    default = "" if is_required else " = {}"
    parameters = [*shown, f"options: {kind_of_options}{default}"]
    once = ", false" if method.name in ONCE else ""
    body = ["  /**", *paragraphs(found.text(comment), "   * ")]
    if documented:
        body.append("   *")
    for text in documented:
        body += paragraphs(text, "   * ")
    if pages:
        body += [
            "   */",
            f"  async *{name}(",
            *(f"    {each}," for each in parameters),
            f"  ): AsyncGenerator<{kind.removesuffix('[]')}, void, void> {{",
            f"    const method = {service}.method.{name};",
            '    for (let pageToken = ""; ; ) {',
            "      const init = defined({",
            *(f"  {each}" for each in inits),
            "        pageToken,",
            "      });",
            "      const page = await this.connection.call(method, init, options);",
            f"      for (const each of page.{camel(result)}) yield wire.{read}(each);",
            '      if (page.nextPageToken === "") return;',
            "      pageToken = page.nextPageToken;",
            "    }",
            "  }",
            "",
        ]
        return "\n".join(lines) + "\0" + "\n".join(body)
    body += [
        "   */",
        f"  async {name}(",
        *(f"    {each}," for each in parameters),
        f"  ): Promise<{kind}> {{",
        "    const init = defined({",
        *inits,
        "    });",
        f"    const method = {service}.method.{name};",
        f"    const response = await this.connection.call(method, init, options{once});",
        f"    return {answer};",
        "  }",
        "",
    ]
    return "\n".join(lines) + "\0" + "\n".join(body)


def typescript_calls(found: Contract) -> str:
    """Write the unary calls of the administrators' clients."""
    options, classes = [], []
    imports: dict[str, set[str]] = {}
    for service, forms in CALLS.items():
        element = found.services[service]
        imports[gen_path(element)] = {service}
        methods = {each.name: each for each in element.proto.method}
        texts = dict(zip(methods, element.comments, strict=True))
        classes += [
            f"/** Calls of `{service}` that need no code of their own. */",
            f"export class {service.removesuffix('Service')}Calls extends UnaryClient {{",
        ]
        for name, form in forms.items():
            first, call_text = typescript_call(
                found, service, methods[name], texts[name], form
            ).split("\0")
            options += [first] if first else []
            classes.append(call_text)
        classes += ["}", ""]
    text = "\n".join([*options, *classes])
    values = set()
    for each in found.elements.values():
        symbol = each.name.replace(".", "_")
        if f"{symbol}Message," in text:
            imports.setdefault(gen_path(each), set()).add(f"{symbol} as {symbol}Message")
        if f"({symbol}Schema," in text:
            imports.setdefault(gen_path(each), set()).add(f"{symbol}Schema")
        if each.value not in WRITTEN and re.search(rf"[:<] ?{each.value}\b", text):
            values.add(f"type {each.value}")
    head = [
        JS_HEAD.format(title="Unary calls of the administrators' clients."),
        'import { randomUUID } from "node:crypto";',
        'import { fromJson, type JsonObject } from "@bufbuild/protobuf";',
        'import { timestampFromDate } from "@bufbuild/protobuf/wkt";',
        'import type { CallOptionsOf } from "./connection.js";',
        'import { defined, duration, numberOf, whole } from "./conversion.js";',
    ]
    for path, symbols in sorted(imports.items()):
        head += imported(symbols, path)
    head += imported(values, "./generated_values.js")
    head += [
        'import type { Money } from "./money.js";',
        'import { UnaryClient } from "./unary.js";',
    ]
    head += ['import * as wire from "./wire.js";', 'import { moneyInit } from "./wire.js";', ""]
    return "\n".join([*head, text])


def imported(symbols: Iterable[str], path: str) -> list[str]:
    """Write the import of some names of a TypeScript module."""
    return ["import {", *(f"  {each}," for each in sorted(symbols)), f'}} from "{path}";']


def modules() -> dict[Path, bytes]:
    """Generate the modules and return their contents by path."""
    found = Contract(contract())
    values = values_module(found, [*ROOTS, *roots_of_calls(found)])
    texts = {
        CLIENT / "generated_values.py": values,
        CLIENT / "generated_names.py": names_module(values),
        CLIENT / "generated_calls.py": calls_module(found),
    }
    python = {path: formatted(path, text) for path, text in texts.items()}
    scripts = typescript_modules(found)
    return python | {TYPESCRIPT / name: text.encode() for name, text in scripts.items()}


def formatted(path: Path, text: str) -> bytes:
    """Bring a module into the repository's format."""
    ruff = [sys.executable, "-m", "ruff"]
    stdin = ["--stdin-filename", str(path), "-"]
    clean = subprocess.run(
        [*ruff, "check", "--quiet", "--fix-only", "--select", "I,F401", *stdin],
        input=text.encode(), capture_output=True, check=True,
    ).stdout  # fmt: skip
    return subprocess.run(
        [*ruff, "format", "--quiet", *stdin], input=clean, capture_output=True, check=True
    ).stdout


def main() -> int:
    """Generate the modules, or compare them with the committed ones. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = {
        path: text
        for path, text in modules().items()
        if not path.exists() or path.read_bytes() != text
    }
    if check and stale:
        print("generated code is out of date, run `make proto`:", file=sys.stderr)
    for path, text in stale.items():
        print(f"  {path}")
        if not check:
            path.write_bytes(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
