"""Documents and patches of SCIM, read into terms of users and groups (RFC 7644, section 3.5).

Attributes are matched without regard to case. Beside what the RFC says, the forms are read that
Entra ID and Okta send: booleans as texts, operators with a capital letter, values for several
attributes without a path, with dots or conditions in their names, and a removal of members by a
list of them. Parsing is linear, and long bodies are parsed in a thread.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.scim.attributes import Attribute
from api.scim.schemas import (
    COMMON,
    EXTERNAL_ID,
    NOT_KEPT,
    OF_NAME_NOT_KEPT,
    USER_ATTRIBUTES,
)
from metering.core.models import ScimGroup
from metering.tenants.provisioning import GroupTerms, MemberChange, UserTerms
from metering.tenants.scim_filters import (
    Comparison,
    Filter,
    FilterInvalid,
    Logical,
    Path,
    matches,
    parse_path,
    without_schema,
)

TEXT_CHARS_MAX = 1000
ELEMENTS_MAX = 20  # of `emails`
OPERATIONS_MAX = 1000
PATHS_CHARS_MAX = 100_000  # of all operations together: 0.2 s of parsing, in which one key waits
OPERATORS = frozenset({"add", "remove", "replace"})
Document = dict[str, Any]


class ScimFault(Exception):
    """Refusal of a request in the form of SCIM. `kind` is its `scimType`, empty for none."""

    def __init__(self, http_status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.http_status = http_status
        self.kind = kind
        self.detail = detail


def invalid(detail: str, kind: str = "invalidValue") -> ScimFault:
    return ScimFault(400, kind, detail)


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation of a patch. `value` is None for a removal of everything at the path."""

    operator: str
    path: str
    value: Any


def parse_object(body: bytes) -> Document:
    """Parse a body. Raises: ScimFault."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid("the body is not a JSON object", "invalidSyntax")
    return found


def field(body: Mapping[str, Any], name: str) -> Any:
    """Return the value of an attribute, whatever the case of its name."""
    if name in body:
        return body[name]
    return next((value for key, value in body.items() if key.lower() == name.lower()), None)


def check_schema(body: Mapping[str, Any], urn: str) -> None:
    schemas = field(body, "schemas")
    if not isinstance(schemas, list) or urn not in schemas:
        raise invalid(f"schemas: must have {urn}", "invalidSyntax")


def operations_of(body: Mapping[str, Any]) -> list[Operation]:
    """Read the operations of a patch. Raises: ScimFault."""
    found = field(body, "Operations")
    if not isinstance(found, list) or not 1 <= len(found) <= OPERATIONS_MAX:
        raise invalid(f"Operations: must be a list of 1 to {OPERATIONS_MAX}", "invalidSyntax")
    operations = [_operation(each, f"Operations[{at}]") for at, each in enumerate(found)]
    if sum(map(_path_chars, operations)) > PATHS_CHARS_MAX:
        raise invalid(
            f"Operations: their paths must have at most {PATHS_CHARS_MAX:,} characters together:"
            " send several requests"
        )
    return operations


def _path_chars(operation: Operation) -> int:
    """Return the length of an operation's paths, which are the names in a value without a path."""
    if operation.path or not isinstance(operation.value, dict):
        return len(operation.path)
    return sum(
        sum(len(name) + len(key) for key in value) if isinstance(value, dict) else len(name)
        for name, value in operation.value.items()
    )


def _operation(found: Any, location: str) -> Operation:
    if not isinstance(found, dict):
        raise invalid(f"{location}: must be an object", "invalidSyntax")
    operator, path, value = (field(found, name) for name in ("op", "path", "value"))
    if not isinstance(operator, str) or operator.lower() not in OPERATORS:
        raise invalid(f"{location}.op: must be add, remove or replace", "invalidSyntax")
    if path is not None and not isinstance(path, str):
        raise invalid(f"{location}.path: must be a text", "invalidPath")
    operator = operator.lower()
    if operator == "remove" and not path:
        raise invalid(f"{location}.path: is needed to remove something", "noTarget")
    if operator != "remove" and value is None and not path:
        raise invalid(f"{location}.value: is needed", "invalidSyntax")
    return Operation(operator, path or "", value)


def targets(operation: Operation) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and values of an operation: several if it has no path."""
    if operation.path:
        yield _parsed_path(operation.path), operation.value
        return
    if not isinstance(operation.value, dict):
        raise invalid("value: must be an object without a path", "invalidSyntax")
    for name, value in operation.value.items():
        if name.lower().startswith("urn:") and isinstance(value, dict):
            for key, part in value.items():
                yield _parsed_path(f"{name}:{key}"), part
        else:
            yield _parsed_path(name), value


def _parsed_path(text: str) -> Path:
    try:
        return parse_path(text)
    except FilterInvalid as error:
        raise invalid(f"path: {text[:100]!r} {error}", "invalidPath") from None


# Values


def texted(value: Any, location: str) -> str | None:
    """Validate a text; None and an empty one mean that there is none."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and len(value) <= 2:
        value = field(value, "value")
    if value in (None, ""):
        return None
    if not isinstance(value, str) or not value.isprintable() or len(value) > TEXT_CHARS_MAX:
        raise invalid(f"{location}: must be a text of up to {TEXT_CHARS_MAX} printable characters")
    return value


def truth(value: Any, location: str) -> bool | None:
    """Validate a boolean, which Entra ID sends as a text."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{location}: must be true or false")
    return value


def valued(attribute: Attribute, value: Any, location: str) -> Any:
    """Validate the value of an attribute, without what is read-only. None: it has none."""
    if attribute.is_multiple:
        elements = value if isinstance(value, list) else [] if value is None else [value]
        if len(elements) > ELEMENTS_MAX:
            raise invalid(f"{location}: must have at most {ELEMENTS_MAX} elements")
        found = [_complex(attribute, each, f"{location}[{at}]") for at, each in enumerate(elements)]
        return with_one_primary([each for each in found if each]) or None
    if attribute.type == "complex":
        return None if value is None else _complex(attribute, value, location) or None
    return (truth if attribute.type == "boolean" else texted)(value, location)


def _complex(attribute: Attribute, value: Any, location: str) -> Document:
    if not isinstance(value, dict):
        raise invalid(f"{location}: must be an object")
    found = {}
    for name, part in value.items():
        if (sub := attribute.find(name)) is None:
            if not (attribute.name == "name" and name.lower() in OF_NAME_NOT_KEPT):
                raise invalid(f"{location}.{name[:50]}: is not known", "invalidSyntax")
        elif (parsed := valued(sub, part, f"{location}.{sub.name}")) is not None:
            found[sub.name] = parsed
    return found


def with_one_primary(elements: list[Document], latest: int | None = None) -> list[Document]:
    """Leave only one element primary: the latest, or else the first."""
    marked = [at for at, each in enumerate(elements) if each.get("primary")]
    chosen = latest if latest in marked else next(iter(marked), None)
    for at in marked:
        if at != chosen:
            del elements[at]["primary"]
    return elements


# Users


def user_terms(body: Document) -> UserTerms:
    """Read a whole user. Raises: ScimFault."""
    document: Document = {}
    for name, value in body.items():
        if (attribute := _attribute_of_user(name)) is None or attribute.mutability == "readOnly":
            continue
        parsed = valued(attribute, value, attribute.name)
        if parsed is not None:
            document[attribute.name] = parsed
    return terms_of_document(document)


def _attribute_of_user(name: str, kind: str = "invalidSyntax") -> Attribute | None:
    """Return the attribute with a name; None for one that is not kept. Raises: ScimFault."""
    name = without_schema(name)
    if name == "externalid":
        return EXTERNAL_ID
    if (found := USER_ATTRIBUTES.find(name)) is not None:
        return found
    if name in NOT_KEPT or name in COMMON or name.startswith("urn:"):
        return None
    raise invalid(f"{name[:50]}: is not an attribute of users", kind)


def document_of(terms: UserTerms) -> Document:
    """Return a user as its document of SCIM, without what the service adds."""
    document = {"userName": terms.user_name, **terms.attributes, "active": terms.is_active}
    return document | ({"externalId": terms.external_id} if terms.external_id else {})


def terms_of_document(document: Document) -> UserTerms:
    user_name = document.get("userName")
    if user_name is None:
        raise invalid("userName: is needed")
    return UserTerms(
        user_name,
        document.get("externalId"),
        document.get("active", True),
        {name: document[name] for name in ("displayName", "name", "emails") if name in document},
    )


def patched_user(terms: UserTerms, operations: Sequence[Operation]) -> UserTerms:
    """Apply a patch to a user. Raises: ScimFault."""
    document = copy.deepcopy(document_of(terms))
    for operation in operations:
        for path, value in targets(operation):
            attribute = _attribute_of_user(path.attribute, "invalidPath")
            if attribute is None:
                if path.attribute in ("id", "meta", "schemas"):
                    raise invalid(f"{path.attribute}: cannot be changed", "mutability")
                continue
            if attribute.mutability == "readOnly":
                raise invalid(f"{attribute.name}: cannot be changed", "mutability")
            _apply(document, attribute, path, operation.operator, value)
    return terms_of_document(document)


def _apply(document: Document, attribute: Attribute, path: Path, operator: str, value: Any) -> None:
    name = attribute.name
    if path.condition is not None and not attribute.is_multiple:
        raise invalid(f"{name}: has one value, so a path to it has no condition", "invalidPath")
    sub = None
    if path.sub and (sub := attribute.find(path.sub)) is None:
        if name == "name" and path.sub in OF_NAME_NOT_KEPT:
            return
        raise invalid(f"{name}.{path.sub[:50]}: is not known", "invalidPath")
    found: Any
    if attribute.is_multiple:
        found = _changed_elements(document.get(name, []), attribute, path, sub, operator, value)
    elif sub is not None:
        part = None if operator == "remove" else valued(sub, value, f"{name}.{sub.name}")
        found = {**document.get(name, {}), sub.name: part}
        found = {key: each for key, each in found.items() if each is not None}
    elif operator == "remove":
        found = None
    else:
        found = valued(attribute, value, name)
        if attribute.type == "complex" and found is not None:
            found = document.get(name, {}) | found
    if found in (None, [], {}):
        if attribute.is_required:
            raise invalid(f"{name}: cannot be removed", "mutability")
        document.pop(name, None)
    else:
        document[name] = found


def _changed_elements(
    elements: list[Document],
    attribute: Attribute,
    path: Path,
    sub: Attribute | None,
    operator: str,
    value: Any,
) -> list[Document]:
    """Apply an operation to the elements of a multi-valued attribute."""
    name = attribute.name
    if path.condition is None and sub is None:
        given = valued(attribute, value, name) or []
        if operator == "replace":
            return list(given)
        if operator == "remove":
            return [] if value is None else [each for each in elements if each not in given]
        joined = elements + [each for each in given if each not in elements]
        if len(joined) > ELEMENTS_MAX:
            raise invalid(f"{name}: must have at most {ELEMENTS_MAX} elements")
        return with_one_primary(joined, len(joined) - 1)
    chosen = [
        at
        for at, each in enumerate(elements)
        if path.condition is None or _fulfils(path.condition, each)
    ]
    if operator == "remove":
        if sub is None:
            return [each for at, each in enumerate(elements) if at not in chosen]
        for at in chosen:
            elements[at].pop(sub.name, None)
        return [each for each in elements if each]
    if not chosen:
        if operator == "replace" or path.condition is None:
            raise invalid(f"{name}: no element fulfils the condition of the path", "noTarget")
        elements.append(_element_of(path.condition, attribute))  # as Entra ID expects it
        chosen = [len(elements) - 1]
    for at in chosen:
        if sub is not None:
            parsed = valued(sub, value, f"{name}.{sub.name}")
            elements[at] |= {} if parsed is None else {sub.name: parsed}
        else:
            changed = _complex(attribute, value, name)
            elements[at] = elements[at] | changed if operator == "add" else changed
    return with_one_primary([each for each in elements if each], chosen[-1])


def _fulfils(condition: Filter, element: Document) -> bool:
    try:
        return matches(condition, element)
    except FilterInvalid as error:
        raise invalid(f"path: {error}", "invalidFilter") from None


def _element_of(condition: Filter, attribute: Attribute) -> Document:
    """Return the element that a condition with `eq` describes."""
    match condition:
        case Comparison(name, "eq", value) if (sub := attribute.find(name)) is not None:
            parsed = valued(sub, value, f"{attribute.name}.{sub.name}")
            return {} if parsed is None else {sub.name: parsed}
        case Logical("and", operands):
            found: Document = {}
            for each in operands:
                found |= _element_of(each, attribute)
            return found
    raise invalid(f"{attribute.name}: no element fulfils the condition of the path", "noTarget")


# Groups


def group_terms(body: Document) -> GroupTerms:
    """Read a whole group, whose members replace all others. Raises: ScimFault."""
    name = external_id = None
    members: frozenset[str] = frozenset()
    for key, value in body.items():
        match without_schema(key):
            case "displayname":
                name = texted(value, "displayName")
            case "externalid":
                external_id = texted(value, "externalId")
            case "members":
                members = member_ids(value)
            case other if other not in COMMON and not other.startswith("urn:"):
                raise invalid(f"{key[:50]}: is not an attribute of groups", "invalidSyntax")
    return GroupTerms(checked_group(name), external_id, [MemberChange("replace", members)])


def checked_group(name: str | None) -> str:
    if name is None or len(name) > 255 or not name.strip():
        raise invalid("displayName: must have 1 to 255 characters")
    return name.strip()


def member_ids(value: Any, location: str = "members") -> frozenset[str]:
    """Read the ids of members. Raises: ScimFault."""
    elements = value if isinstance(value, list) else [] if value is None else [value]
    found = set()
    for at, each in enumerate(elements):
        member = each.get("value") if isinstance(each, dict) else None
        member = field(each, "value") if member is None and isinstance(each, dict) else member
        if not isinstance(member, str):
            raise invalid(f"{location}[{at}].value: must be the id of a user")
        found.add(checked_id(member, f"{location}[{at}].value"))
    return frozenset(found)


def checked_id(text: str, location: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise invalid(f"{location}: user {text[:64]!r} not found: create it first") from None


@dataclass(frozen=True, slots=True)
class GroupPatch:
    """Patch of a group. Without `has_external_id` that stays as it is, and so does no name."""

    display_name: str | None
    has_external_id: bool
    external_id: str | None
    changes: Sequence[MemberChange]

    def terms_of(self, group: ScimGroup) -> GroupTerms:
        return GroupTerms(
            self.display_name or group.display_name,
            self.external_id if self.has_external_id else group.external_id,
            self.changes,
        )


def group_patch(operations: Sequence[Operation]) -> GroupPatch:
    """Read a patch of a group. Raises: ScimFault."""
    name = external_id = None
    has_external_id = False
    changes: list[MemberChange] = []
    for operation in operations:
        is_removal = operation.operator == "remove"
        for path, value in targets(operation):
            match path.attribute:
                case "displayname":
                    if is_removal:
                        raise invalid("displayName: cannot be removed", "mutability")
                    name = checked_group(texted(value, "displayName"))
                case "externalid":
                    has_external_id = True
                    external_id = None if is_removal else texted(value, "externalId")
                case "members":
                    changes.append(member_change(operation.operator, path, value))
                case "id" | "meta" | "schemas":
                    if operation.path:
                        raise invalid(f"{path.attribute}: cannot be changed", "mutability")
                case other if not other.startswith("urn:"):
                    raise invalid(f"{other[:50]}: is not an attribute of groups", "invalidPath")
    return GroupPatch(name, has_external_id, external_id, changes)


def member_change(operator: str, path: Path, value: Any) -> MemberChange:
    """Read an operation on the members of a group. Raises: ScimFault."""
    if path.sub:
        raise invalid(f"members.{path.sub[:50]}: cannot be changed", "mutability")
    if path.condition is not None:
        if operator != "remove":
            raise invalid("members: a condition on members can only remove them", "invalidPath")
        return MemberChange("remove", frozenset(_ids_in(path.condition)))
    if operator == "remove" and value is None:
        return MemberChange("replace", frozenset())
    return MemberChange(operator, member_ids(value))


def _ids_in(condition: Filter) -> Iterator[str]:
    match condition:
        case Comparison("value", "eq", str(value)):
            yield checked_id(value, "path")
        case Logical("or", operands):
            for each in operands:
                yield from _ids_in(each)
        case _:
            raise invalid(
                'members: use a condition such as members[value eq "ID"]', "invalidFilter"
            )
