"""Filters and paths of SCIM (RFC 7644, sections 3.4.2.2 and 3.5.2), parsed and converted to SQL.

The parser reads each character once, and bounds the length, the depth and the number of
comparisons. Attributes and operators are matched without regard to case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    SQLColumnExpression,
    Text,
    and_,
    cast,
    exists,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
)

from metering.core.models import ScimGroup, ScimGroupMember, ScimUser
from metering.tenants.tenants import as_uuid

LENGTH_MAX, COMPARISONS_MAX, DEPTH_MAX = 4096, 100, 20
TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<mark>[()\[\]])
      | (?P<word>[^\s()\[\]"]+)
    )""",
    re.VERBOSE,
)
ATTRIBUTE = re.compile(r"(?:urn:[\w.:-]+:)?[A-Za-z$][\w$-]*(?:\.[A-Za-z$][\w$-]*)?", re.ASCII)
OPERATORS = frozenset({"eq", "ne", "co", "sw", "ew", "gt", "ge", "lt", "le"})
CORE = "urn:ietf:params:scim:schemas:core:2.0:"
OF_CORE = tuple(f"{CORE}{each}:".lower() for each in ("User", "Group"))
Value = str | float | int | bool | None


class FilterInvalid(ValueError):
    """The text is not a filter or path that can be evaluated; the message says why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of an attribute, in lower case and without its schema. `pr` has no value."""

    attribute: str
    operator: str
    value: Value = None


@dataclass(frozen=True, slots=True)
class Within:
    """Condition on one element of a multi-valued attribute: `emails[type eq "work"]`."""

    attribute: str
    condition: Filter


@dataclass(frozen=True, slots=True)
class Logical:
    """`and` or `or` of two or more conditions, or `not` of one."""

    operator: str
    operands: tuple[Filter, ...]


Filter = Comparison | Within | Logical


@dataclass(frozen=True, slots=True)
class Path:
    """Target of an operation: attribute, condition on its elements, and sub-attribute."""

    attribute: str
    condition: Filter | None = None
    sub: str = ""


def parse_filter(text: str) -> Filter:
    """Parse a filter. Raises: FilterInvalid."""
    reader = _Reader(text)
    found = reader.disjunction()
    reader.end()
    return found


def parse_path(text: str) -> Path:
    """Parse the path of an operation. Raises: FilterInvalid."""
    reader = _Reader(text)
    attribute, _, sub = reader.attribute().partition(".")
    condition = None
    if reader.take("["):
        condition = reader.disjunction()
        reader.need("]")
        if reader.peek.startswith("."):
            sub = reader.attribute(after_dot=True)
    reader.end()
    return Path(attribute, condition, sub)


def without_schema(name: str) -> str:
    """Return an attribute's name in lower case, without the URN of a core schema."""
    name = name.lower()
    return next((name[len(urn) :] for urn in OF_CORE if name.startswith(urn)), name)


class _Reader:
    """Recursive descent over the tokens of a text."""

    def __init__(self, text: str) -> None:
        if len(text) > LENGTH_MAX:
            raise FilterInvalid(f"must have at most {LENGTH_MAX} characters")
        self._tokens: list[str] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            if (found := TOKEN.match(text, position)) is None:
                raise FilterInvalid(f"has an unfinished text after character {position}")
            self._tokens.append(found[0].strip())
            position = found.end()
        self._tokens.reverse()
        self._depth = self._comparisons = 0

    @property
    def peek(self) -> str:
        return self._tokens[-1] if self._tokens else ""

    def take(self, *words: str) -> bool:
        if self.peek.lower() not in words:
            return False
        self._tokens.pop()
        return True

    def need(self, word: str) -> None:
        if not self.take(word):
            raise FilterInvalid(f"needs {word!r} {self._position}")

    def end(self) -> None:
        if self._tokens:
            raise FilterInvalid(f"has {self.peek[:50]!r} where it should end")

    @property
    def _position(self) -> str:
        return f"before {self.peek[:50]!r}" if self._tokens else "at its end"

    def attribute(self, *, after_dot: bool = False) -> str:
        name = self._tokens.pop() if self._tokens else ""
        name = name.removeprefix(".") if after_dot else name
        if ATTRIBUTE.fullmatch(name) is None:
            raise FilterInvalid(f"{name[:50]!r} is not the name of an attribute")
        return without_schema(name)

    def disjunction(self) -> Filter:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FilterInvalid(f"must be nested at most {DEPTH_MAX} deep")
        found = [self._conjunction()]
        while self.take("or"):
            found.append(self._conjunction())
        self._depth -= 1
        return found[0] if len(found) == 1 else Logical("or", tuple(found))

    def _conjunction(self) -> Filter:
        found = [self._condition()]
        while self.take("and"):
            found.append(self._condition())
        return found[0] if len(found) == 1 else Logical("and", tuple(found))

    def _condition(self) -> Filter:
        if self.take("not"):
            self.need("(")
            return Logical("not", (self._grouped(),))
        if self.take("("):
            return self._grouped()
        attribute = self.attribute()
        if self.take("["):
            condition = self.disjunction()
            self.need("]")
            return Within(attribute, condition)
        return self._comparison(attribute)

    def _grouped(self) -> Filter:
        found = self.disjunction()
        self.need(")")
        return found

    def _comparison(self, attribute: str) -> Comparison:
        self._comparisons += 1
        if self._comparisons > COMPARISONS_MAX:
            raise FilterInvalid(f"must have at most {COMPARISONS_MAX} comparisons")
        if self.take("pr"):
            return Comparison(attribute, "pr")
        operator = self.peek.lower()
        if operator not in OPERATORS:
            raise FilterInvalid(
                f"needs pr or one of {', '.join(sorted(OPERATORS))} {self._position}"
            )
        self._tokens.pop()
        text = self._tokens.pop() if self._tokens else ""
        try:
            value = json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
        except ValueError:
            value = []
        if isinstance(value, list | dict):
            raise FilterInvalid(f"{text[:50]!r} is not a value: put texts in double quotes")
        return Comparison(attribute, operator, value)


# In memory, for the elements of one attribute


def matches(condition: Filter, element: Mapping[str, Any]) -> bool:
    """Return whether an element fulfils a condition. Raises: FilterInvalid."""
    match condition:
        case Logical("and", operands):
            return all(matches(each, element) for each in operands)
        case Logical("or", operands):
            return any(matches(each, element) for each in operands)
        case Logical(_, (operand,)):
            return not matches(operand, element)
        case Comparison(attribute, operator, value):
            found = next(
                (each for name, each in element.items() if name.lower() == attribute), None
            )
            return _compares(found, operator, value)
    raise FilterInvalid("a condition on elements cannot have another one in it")


def _compares(found: Any, operator: str, value: Value) -> bool:
    if operator == "pr":
        return found is not None
    if isinstance(found, str) and isinstance(value, str):
        found, value = found.casefold(), value.casefold()
    match operator:
        case "eq":
            return bool(found == value)
        case "ne":
            return bool(found != value)
    if not isinstance(found, str) or not isinstance(value, str):
        raise FilterInvalid(f"{operator} compares texts")
    texts = {
        "co": value in found,
        "sw": found.startswith(value),
        "ew": found.endswith(value),
        "gt": found > value,
        "ge": found >= value,
        "lt": found < value,
        "le": found <= value,
    }
    return texts[operator]


# In SQL


@dataclass(frozen=True, slots=True)
class Column:
    """Attribute in SQL. Values are converted by `kind` before they are compared."""

    expression: SQLColumnExpression[Any]
    kind: str = "text"  # text, exact, key (case folded), boolean, time or id


def _json(*path: str) -> Column:
    return Column(ScimUser.attributes[path].astext)


COLUMNS: Mapping[type, Mapping[str, Column]] = {
    ScimUser: {
        "id": Column(ScimUser.id, "id"),
        "externalid": Column(ScimUser.external_id, "exact"),
        "username": Column(ScimUser.user_name_key, "key"),
        "displayname": _json("displayName"),
        "name.formatted": _json("name", "formatted"),
        "name.familyname": _json("name", "familyName"),
        "name.givenname": _json("name", "givenName"),
        "active": Column(ScimUser.is_active, "boolean"),
        "meta.created": Column(ScimUser.created_at, "time"),
        "meta.lastmodified": Column(ScimUser.changed_at, "time"),
    },
    ScimGroup: {
        "id": Column(ScimGroup.id, "id"),
        "externalid": Column(ScimGroup.external_id, "exact"),
        "displayname": Column(ScimGroup.name_key, "key"),
        "meta.created": Column(ScimGroup.created_at, "time"),
        "meta.lastmodified": Column(ScimGroup.changed_at, "time"),
    },
}
# Elements of multi-valued attributes, and the sub-attribute that is meant without one
ELEMENTS = {(ScimUser, "emails"), (ScimUser, "groups"), (ScimGroup, "members")}


def to_sql(condition: Filter, kind: type[ScimUser] | type[ScimGroup]) -> ColumnElement[bool]:
    """Convert a filter to a condition on users or groups. Raises: FilterInvalid."""
    match condition:
        case Logical(operator, operands):
            parts = [to_sql(each, kind) for each in operands]
            joined = {"and": and_, "or": or_}.get(operator)
            return joined(*parts) if joined else not_(func.coalesce(parts[0], false()))
        case Within(attribute, inner):
            return _any_element(kind, attribute, inner)
        case Comparison(attribute, operator, value):
            if (column := COLUMNS[kind].get(attribute)) is not None:
                return _compared(column, operator, value)
            name, _, sub = attribute.partition(".")
            if (kind, name) in ELEMENTS:
                is_present = operator == "pr" and not sub
                inner = Comparison(sub or "value", operator, value)
                return _any_element(kind, name, None if is_present else inner)
            if attribute == "name" and operator == "pr" and kind is ScimUser:
                return ScimUser.attributes["name"].is_not(None)
    known = ", ".join((*COLUMNS[kind], *(name for of, name in ELEMENTS if of is kind)))
    raise FilterInvalid(f"cannot compare {attribute[:50]!r}: filter by {known}")


def sort_column(attribute: str, kind: type[ScimUser] | type[ScimGroup]) -> SQLColumnExpression[Any]:
    """Return the SQL to sort by an attribute. Raises: FilterInvalid."""
    if (column := COLUMNS[kind].get(without_schema(attribute))) is None:
        raise FilterInvalid(f"cannot sort by {attribute[:50]!r}: use {', '.join(COLUMNS[kind])}")
    is_text = column.kind == "text"
    return func.lower(column.expression) if is_text else column.expression


def _any_element(
    kind: type[ScimUser] | type[ScimGroup], attribute: str, condition: Filter | None
) -> ColumnElement[bool]:
    if (kind, attribute) not in ELEMENTS:
        raise FilterInvalid(f"{attribute[:50]!r} has no elements to filter by")
    if attribute == "emails":
        emails = func.jsonb_array_elements(ScimUser.attributes["emails"]).table_valued("value")
        element = cast(emails.c.value, ScimUser.attributes.type)
        columns = {
            "value": Column(element["value"].astext),
            "type": Column(element["type"].astext),
            "display": Column(element["display"].astext),
            "primary": Column(cast(element["primary"].astext, Boolean), "boolean"),
        }
        found = select(literal(1)).select_from(emails)
    elif attribute == "members":
        columns = {"value": Column(ScimGroupMember.user_id, "id")}
        found = select(literal(1)).where(ScimGroupMember.group_id == ScimGroup.id)
        found = found.correlate(ScimGroup)
    else:
        columns = {"value": Column(ScimGroupMember.group_id, "id")}
        found = select(literal(1)).where(ScimGroupMember.user_id == ScimUser.id)
        found = found.correlate(ScimUser)
    return exists(found.where(true() if condition is None else _of_element(condition, columns)))


def _of_element(condition: Filter, columns: Mapping[str, Column]) -> ColumnElement[bool]:
    match condition:
        case Logical(operator, operands):
            parts = [_of_element(each, columns) for each in operands]
            joined = {"and": and_, "or": or_}.get(operator)
            return joined(*parts) if joined else not_(func.coalesce(parts[0], false()))
        case Comparison(attribute, operator, value) if attribute in columns:
            return _compared(columns[attribute], operator, value)
    raise FilterInvalid(f"a condition on elements can have {', '.join(columns)}")


def _compared(column: Column, operator: str, value: Value) -> ColumnElement[bool]:
    left: SQLColumnExpression[Any] = column.expression
    if operator == "pr":
        return left.is_not(None)
    if value is None:
        if operator not in ("eq", "ne"):
            raise FilterInvalid("null can be compared with eq and ne only")
        return left.is_(None) if operator == "eq" else left.is_not(None)
    right: Any = value
    if column.kind == "boolean":
        if not isinstance(value, bool) or operator not in ("eq", "ne"):
            raise FilterInvalid("this attribute can be compared with true and false, by eq and ne")
        return left.is_(value) if operator == "eq" else left.is_distinct_from(value)
    if not isinstance(value, str):
        raise FilterInvalid("this attribute is compared with a text in double quotes")
    if "\0" in value:
        return false()
    match column.kind:
        case "id":
            right = as_uuid(value)
            if operator == "eq":
                return false() if right is None else left == right
            left, right = cast(left, Text), value.lower()
        case "time":
            right = _moment(value)
            if operator in ("co", "sw", "ew"):
                raise FilterInvalid(f"{operator} compares texts, not times")
        case "key":
            right = value.casefold()
        case "text":
            left, right = func.lower(left), func.lower(value)
    compared: ColumnElement[bool]
    match operator:
        case "eq":
            compared = left == right
        case "ne":
            compared = left.is_distinct_from(right)
        # Functions of PostgreSQL, because LIKE would need escapes
        case "co":
            compared = func.strpos(left, right) > 0
        case "sw":
            compared = func.starts_with(left, right)
        case "ew":
            compared = func.right(left, func.length(right)) == right
        case "gt":
            compared = left > right
        case "ge":
            compared = left >= right
        case "lt":
            compared = left < right
        case _:
            compared = left <= right
    return compared


def _moment(value: str) -> datetime:
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None:
        raise FilterInvalid(f"{value[:50]!r} is not a time such as 2026-11-28T13:00:00Z")
    return found
