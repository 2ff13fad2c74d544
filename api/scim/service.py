"""HTTP handler of SCIM 2.0 (RFC 7644): the paths below `/scim/v2/`.

A request acts with its key in the organization of the key, and sees nothing else. A change is one
transaction. Errors have the form of SCIM, with status and headers of the HTTP API.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncSession

from api.access.auth import Authenticator
from api.access.permissions import PROVISION
from api.access.servicer import REPORT_S, sessions_of
from api.core.addresses import FORWARDED_FOR
from api.core.statuses import status_of
from api.observability.observer import HTTP, Observer
from api.openai.error_responses import HttpFault, error_response
from api.openai.listener import Handle, peer_of, read_body, secret_of
from api.scim import schemas
from api.scim.documents import (
    Document,
    ScimFault,
    check_schema,
    document_of,
    field,
    group_patch,
    group_terms,
    invalid,
    operations_of,
    parse_object,
    patched_user,
    user_terms,
)
from api.scim.schemas import ERROR, LIST, PATCH, RESOURCES, RESULTS, RESULTS_MAX, SEARCH
from metering.core.errors import AlreadyExists, InvalidValue, LastOwner
from metering.core.models import ScimGroup, ScimUser
from metering.store.db import Sessions, patience, read_one_moment
from metering.store.refusals import repeated
from metering.tenants import provisioning
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.authentication import Principal
from metering.tenants.provisioning import GroupTerms, UserTerms, terms_of_user
from metering.tenants.scim_filters import FilterInvalid, parse_filter, sort_column, to_sql
from metering.tenants.scim_filters import without_schema as named

ROOT = "/scim/v2"
MEDIA_TYPE = "application/scim+json"
MEDIA_TYPES = frozenset({MEDIA_TYPE, "application/json"})
# 10,000 members with their names. The decoder takes 3 ms per MiB, in which nothing else runs.
BODY_BYTES_MAX = 2**21
INLINE_BYTES = 4096  # longer bodies are read in a thread
VERSION = re.compile(r'(?:W/)?"(\d{1,18})"', re.ASCII)
NUMBER = re.compile(r"[+-]?\d{1,9}", re.ASCII)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Query:
    """Parameters of a request: what to return of resources, and which ones of a list."""

    attributes: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    filter: str = ""
    sort_by: str = ""
    is_descending: bool = False
    start: int = 1
    count: int = RESULTS

    def wants(self, name: str) -> bool:
        """Return whether an attribute in lower case, or a part of it, is to be returned."""
        if self.attributes:
            return any(each.partition(".")[0] == name for each in self.attributes)
        return name not in self.excluded


@dataclass(frozen=True, slots=True)
class Call:
    """Authenticated request. `path` has the parts below the root."""

    request: web.BaseRequest
    principal: Principal
    path: tuple[str, ...]
    base: str
    query: Query

    @property
    def organization_id(self) -> uuid.UUID:
        return self.principal.organization_id

    @property
    def actor(self) -> str:
        return self.principal.key_prefix

    def check_version(self, found: ScimUser | ScimGroup) -> None:
        """Raise ScimFault if the header If-Match names other versions of the resource."""
        wanted = self.request.headers.get("if-match", "*").strip()
        if wanted != "*" and str(found.version) not in VERSION.findall(wanted):
            raise ScimFault(412, "", f"the resource has the version {found.version}: read it again")


class Scim:
    """HTTP handler of the paths under `/scim`; passes all others to the next handler."""

    def __init__(
        self,
        authenticator: Authenticator,
        sessions: Sessions,
        others: Handle,
        *,
        observer: Observer,
        url: str = "",
    ) -> None:
        """`url` is the address of this server as others reach it; empty: as each request says."""
        self._authenticator = authenticator
        self._sessions = sessions
        self._next = others
        self._observer = observer
        self._url = url
        # One body at a time: a computing thread slows the streams of this process
        self._thread = ThreadPoolExecutor(1, "weir-scim")
        self._kinds: Mapping[str, Users | Groups] = {"Users": Users(self), "Groups": Groups(self)}

    def handle(self, request: web.BaseRequest) -> Coroutine[Any, Any, web.StreamResponse]:
        """Handle a request below `/scim`, or pass it to the next handler."""
        is_own = request.path == "/scim" or request.path.startswith("/scim/")
        return self._handle(request) if is_own else self._next(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        closing, headers = False, {}
        try:
            return await self._answer(request)
        except ScimFault as error:
            fault = error
        except HttpFault as error:
            closing, headers = error.closing, dict(error.refusal.headers)
            self._observer.http_failed(error.refusal.code)
            fault = ScimFault(error.refusal.http_status, "", error.refusal.message)
        except ConnectionError:  # the client disconnected while sending its body
            return web.Response(status=400)
        except Exception as error:
            self._observer.call_failed(HTTP, error)
            refusal = error_response(status_of(error))
            headers = dict(refusal.headers)
            fault = ScimFault(*kind_of(error, refusal.http_status), refusal.message)
        body: Document = {"schemas": [ERROR], "status": str(fault.http_status)}
        if fault.kind:
            body["scimType"] = fault.kind
        response = respond(body | {"detail": fault.detail}, fault.http_status, headers)
        if closing:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = self._authenticator.proxies.origin(
            peer_of(request), request.headers.getall(FORWARDED_FOR, ())
        )
        principal = await self._authenticator.principal_of(
            secret_of(request), method=PROVISION, origin=origin
        )
        if not request.path.startswith(f"{ROOT}/"):
            raise ScimFault(404, "", f"the address of the service is {ROOT}/")
        path = tuple(request.path.removeprefix(f"{ROOT}/").rstrip("/").split("/"))
        base = self._url or str(request.url.origin())
        call = Call(request, principal, path, f"{base}{ROOT}", query_of(request.query))
        if path[0] in self._kinds:
            return await self._resource(call, self._kinds[path[0]])
        match request.method, path:
            case "POST", (".search",):
                body = await self.read(request)
                check_schema(body, SEARCH)
                return await self._search(call, query_of_search(body))
            case "GET", ("",):
                return await self._search(call, call.query)
        return described(call)

    async def _search(self, call: Call, query: Query) -> web.Response:
        """List users, then groups. A filter on attributes of one kind selects none of the other."""
        found: list[Document] = []
        total, faults = 0, []
        for kind in self._kinds.values():
            skipped = max(query.start - 1 - total, 0)
            part = replace(query, start=skipped + 1, count=query.count - len(found))
            try:
                count, shown = await kind.page(call, part)
            except ScimFault as fault:
                faults.append(fault)
                continue
            total += count
            found += shown
        if len(faults) == len(self._kinds):
            raise faults[0]
        return listed(found, total, query.start)

    async def _resource(self, call: Call, kind: Users | Groups) -> web.StreamResponse:
        match call.request.method, call.path[1:]:
            case "GET", ():
                return await paged(kind, call, call.query)
            case "POST", (".search",):
                body = await self.read(call.request)
                check_schema(body, SEARCH)
                return await paged(kind, call, query_of_search(body))
            case "POST", ():
                body = await self.read(call.request)
                return await repeated(partial(kind.create, call, body))
            case "GET", (ref,):
                return await kind.read(call, id_of(ref))
            case "PUT", (ref,):
                body = await self.read(call.request)
                return await repeated(partial(kind.replace, call, id_of(ref), body))
            case "PATCH", (ref,):
                body = await self.read(call.request)
                check_schema(body, PATCH)
                return await repeated(partial(kind.patch, call, id_of(ref), body))
            case "DELETE", (ref,):
                return await repeated(partial(kind.delete, call, id_of(ref)))
            case _, () | (_,):
                allowed = "GET, PUT, PATCH, DELETE" if call.path[1:] else "GET, POST"
                raise wrong_method(call.request, allowed)
        raise ScimFault(404, "", "resource not found: check its id")

    # For the kinds of resources

    async def read(self, request: web.BaseRequest) -> Document:
        """Read the body of a request. Raises: ScimFault, HttpFault."""
        if request.content_type not in MEDIA_TYPES:
            raise ScimFault(415, "", f"send the body as {MEDIA_TYPE}")
        body = await read_body(request, BODY_BYTES_MAX)
        return await self.computed(request, lambda: parse_object(body))

    async def computed(self, request: web.BaseRequest, call: Callable[[], Value]) -> Value:
        """Compute something about the body of a request: in a thread if it is long."""
        length = request.content_length
        if length is not None and length <= INLINE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    @contextlib.asynccontextmanager
    async def changing(self, call: Call) -> AsyncIterator[AsyncSession]:
        """Open a transaction of the caller that commits at the end of the block."""
        async with sessions_of(call.principal, self._sessions).begin() as session:
            await take_changes_lock(session, alone=False)
            yield session

    @contextlib.asynccontextmanager
    async def reading(self, call: Call) -> AsyncIterator[AsyncSession]:
        """Open a session of the caller on one snapshot."""
        with patience(REPORT_S + 2):
            async with sessions_of(call.principal, self._sessions)() as session:
                await read_one_moment(session, REPORT_S)
                yield session


class Users:
    """Users over SCIM."""

    def __init__(self, scim: Scim) -> None:
        self._scim = scim

    async def page(self, call: Call, query: Query) -> tuple[int, list[Document]]:
        """Return how many users a query selects, and a page of them. Raises: ScimFault."""
        where, order = selection(query, ScimUser)
        async with self._scim.reading(call) as session:
            total, found = await provisioning.list_users(
                session,
                call.organization_id,
                where=where,
                order=order,
                offset=query.start - 1,
                limit=query.count,
            )
            return total, await self._shown(session, call, query, found)

    async def read(self, call: Call, user_id: uuid.UUID) -> web.Response:
        async with self._scim.reading(call) as session:
            found = await provisioning.find_user(session, call.organization_id, user_id)
            return await self._one(session, call, found)

    async def create(self, call: Call, body: Document) -> web.Response:
        check_schema(body, schemas.USER)
        terms = await self._scim.computed(call.request, lambda: user_terms(body))
        async with self._scim.changing(call) as session:
            made = await provisioning.create_user(session, call.organization_id, terms, call.actor)
            return await self._one(session, call, made, 201)

    async def replace(self, call: Call, user_id: uuid.UUID, body: Document) -> web.Response:
        check_schema(body, schemas.USER)
        terms = await self._scim.computed(call.request, lambda: user_terms(body))

        async def changed(user: ScimUser) -> UserTerms:
            call.check_version(user)
            return terms

        return await self._update(call, user_id, changed)

    async def patch(self, call: Call, user_id: uuid.UUID, body: Document) -> web.Response:
        operations = await self._scim.computed(call.request, lambda: operations_of(body))

        async def changed(user: ScimUser) -> UserTerms:
            call.check_version(user)
            present = terms_of_user(user)
            return await self._scim.computed(
                call.request, lambda: patched_user(present, operations)
            )

        return await self._update(call, user_id, changed)

    async def delete(self, call: Call, user_id: uuid.UUID) -> web.Response:
        async with self._scim.changing(call) as session:
            await provisioning.delete_user(
                session, call.organization_id, user_id, call.check_version, call.actor
            )
        return web.Response(status=204)

    async def _update(self, call: Call, user_id: uuid.UUID, changed: Any) -> web.Response:
        async with self._scim.changing(call) as session:
            user = await provisioning.update_user(
                session, call.organization_id, user_id, changed, call.actor
            )
            return await self._one(session, call, user)

    async def _one(
        self, session: AsyncSession, call: Call, user: ScimUser, http_status: int = 200
    ) -> web.Response:
        [shown] = await self._shown(session, call, call.query, [user])
        return resource(shown, location(call, "Users", user), user.version, http_status)

    async def _shown(
        self, session: AsyncSession, call: Call, query: Query, users: Sequence[ScimUser]
    ) -> list[Document]:
        groups: Mapping[uuid.UUID, str] = {}
        if query.wants("groups") and users:
            groups = await provisioning.groups_json(session, users, f"{call.base}/Groups/")
        return [
            projected(
                {
                    "schemas": [schemas.USER],
                    "id": str(user.id),
                    **document_of(terms_of_user(user)),
                    **raw("groups", groups.get(user.id)),
                    "meta": meta(call, "Users", "User", user),
                },
                query,
            )
            for user in users
        ]


class Groups:
    """Groups over SCIM."""

    def __init__(self, scim: Scim) -> None:
        self._scim = scim

    async def page(self, call: Call, query: Query) -> tuple[int, list[Document]]:
        """Return how many groups a query selects, and a page of them. Raises: ScimFault."""
        where, order = selection(query, ScimGroup)
        async with self._scim.reading(call) as session:
            total, found = await provisioning.list_groups(
                session,
                call.organization_id,
                where=where,
                order=order,
                offset=query.start - 1,
                limit=query.count,
            )
            return total, await self._shown(session, call, query, found)

    async def read(self, call: Call, group_id: uuid.UUID) -> web.Response:
        async with self._scim.reading(call) as session:
            found = await provisioning.find_group(session, call.organization_id, group_id)
            return await self._one(session, call, found)

    async def create(self, call: Call, body: Document) -> web.Response:
        check_schema(body, schemas.GROUP)
        terms = await self._scim.computed(call.request, lambda: group_terms(body))
        async with self._scim.changing(call) as session:
            made = await provisioning.create_group(session, call.organization_id, terms, call.actor)
            return await self._one(session, call, made, 201)

    async def replace(self, call: Call, group_id: uuid.UUID, body: Document) -> web.Response:
        check_schema(body, schemas.GROUP)
        terms = await self._scim.computed(call.request, lambda: group_terms(body))

        async def changed(group: ScimGroup) -> GroupTerms:
            call.check_version(group)
            return terms

        async with self._scim.changing(call) as session:
            group = await provisioning.update_group(
                session, call.organization_id, group_id, changed, call.actor
            )
            return await self._one(session, call, group)

    async def patch(self, call: Call, group_id: uuid.UUID, body: Document) -> web.Response:
        """Patch a group. The response has no body unless attributes are asked for."""
        patch = await self._scim.computed(call.request, lambda: group_patch(operations_of(body)))

        async def changed(group: ScimGroup) -> GroupTerms:
            call.check_version(group)
            return patch.terms_of(group)

        async with self._scim.changing(call) as session:
            group = await provisioning.update_group(
                session, call.organization_id, group_id, changed, call.actor
            )
            if call.query.attributes:
                return await self._one(session, call, group)
        return web.Response(status=204, headers={"etag": etag(group.version)})

    async def delete(self, call: Call, group_id: uuid.UUID) -> web.Response:
        async with self._scim.changing(call) as session:
            await provisioning.delete_group(
                session, call.organization_id, group_id, call.check_version, call.actor
            )
        return web.Response(status=204)

    async def _one(
        self, session: AsyncSession, call: Call, group: ScimGroup, http_status: int = 200
    ) -> web.Response:
        [shown] = await self._shown(session, call, call.query, [group])
        return resource(shown, location(call, "Groups", group), group.version, http_status)

    async def _shown(
        self, session: AsyncSession, call: Call, query: Query, groups: Sequence[ScimGroup]
    ) -> list[Document]:
        """Return documents of groups: fewer than given if they have very many members."""
        members: Mapping[uuid.UUID, str] = {}
        if query.wants("members") and groups:
            members = await provisioning.members_json(session, groups, f"{call.base}/Users/")
            groups = [each for each in groups if each.id in members]
        return [
            projected(
                {
                    "schemas": [schemas.GROUP],
                    "id": str(group.id),
                    **({"externalId": group.external_id} if group.external_id else {}),
                    "displayName": group.display_name,
                    **raw("members", members.get(group.id)),
                    "meta": meta(call, "Groups", "Group", group),
                },
                query,
            )
            for group in groups
        ]


# Requests


def query_of(found: Mapping[str, str]) -> Query:
    """Read the parameters in the address of a request. Raises: ScimFault."""
    values = {name.lower(): value for name, value in found.items()}
    order = values.get("sortorder", "ascending").lower()
    return _checked(
        Query(
            attributes=_names(values.get("attributes", "").split(",")),
            excluded=_names(values.get("excludedattributes", "").split(",")),
            filter=values.get("filter", ""),
            sort_by=values.get("sortby", ""),
            is_descending=order == "descending",
            start=max(_number("startIndex", values.get("startindex"), 1), 1),
            count=min(max(_number("count", values.get("count"), RESULTS), 0), RESULTS_MAX),
        ),
        order,
    )


def query_of_search(body: Document) -> Query:
    """Read the parameters in the body of a search. Raises: ScimFault."""
    names = ("attributes", "excludedAttributes", "filter", "sortBy", "sortOrder")
    values = {}
    for name in (*names, "startIndex", "count"):
        value = field(body, name)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if value is not None:
            if not isinstance(value, str | int):
                raise invalid(f"{name}: has a wrong type", "invalidSyntax")
            values[name] = str(value)
    return query_of(values)


def _checked(query: Query, order: str) -> Query:
    if query.attributes and query.excluded:
        raise invalid("attributes: cannot be combined with excludedAttributes: leave one out")
    if order not in ("ascending", "descending"):
        raise invalid("sortOrder: must be ascending or descending")
    return query


def _names(found: Sequence[str]) -> frozenset[str]:
    return frozenset(named(each.strip()) for each in found if each.strip())


def _number(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if NUMBER.fullmatch(text.strip()) is None:
        raise invalid(f"{name}: must be a number")
    return int(text)


def selection(query: Query, kind: type[ScimUser] | type[ScimGroup]) -> tuple[Any, list[Any]]:
    """Return the condition and the order of a list in SQL. Raises: ScimFault."""
    try:
        where = to_sql(parse_filter(query.filter), kind) if query.filter.strip() else None
    except FilterInvalid as error:
        raise invalid(f"filter: {error}", "invalidFilter") from None
    if not query.sort_by:
        return where, []
    try:
        column = sort_column(query.sort_by, kind)
    except FilterInvalid as error:
        raise invalid(f"sortBy: {error}", "invalidPath") from None
    return where, [column.desc() if query.is_descending else column]


def id_of(ref: str) -> uuid.UUID:
    try:
        return uuid.UUID(ref)
    except ValueError:
        raise ScimFault(404, "", f"resource {ref[:64]!r} not found: ids are UUIDs") from None


def wrong_method(request: web.BaseRequest, allowed: str) -> HttpFault:
    return HttpFault(
        405, f"send {allowed}, not {request.method}", "method_not_allowed", {"allow": allowed}
    )


# Responses


def described(call: Call) -> web.Response:
    """Return what the service says about itself. Raises: ScimFault, HttpFault."""
    name, rest = call.path[0], call.path[1:]
    found: Document | list[Document]
    match name:
        case "ServiceProviderConfig" if not rest:
            found = schemas.service_provider_config(call.base)
        case "Schemas":
            found = schemas.schemas(call.base)
        case "ResourceTypes":
            found = schemas.resource_types(call.base)
        case "Bulk" | "Me":
            raise ScimFault(
                501, "", f"/{name} is not supported: /ServiceProviderConfig says what is"
            )
        case _:
            raise ScimFault(
                404, "", f"there is nothing at this address: use {', '.join(RESOURCES)}"
            )
    if call.request.method != "GET":
        raise wrong_method(call.request, "GET")
    if call.query.filter:
        raise ScimFault(403, "", "this list cannot be filtered: leave the filter out")
    if isinstance(found, dict):
        return respond(found)
    if not rest:
        return listed(found, len(found), 1)
    for each in found:
        if len(rest) == 1 and each["id"].lower() == rest[0].lower():
            return respond(each)
    raise ScimFault(404, "", "resource not found: check its id")


def kind_of(error: Exception, http_status: int) -> tuple[int, str]:
    """Return the status and the `scimType` of an error of the service."""
    match error:
        case AlreadyExists():
            return 409, "uniqueness"
        case LastOwner():
            return 409, ""
        case InvalidValue():
            return http_status, "invalidValue"
    return http_status, ""


def raw(name: str, json: str | None) -> Document:
    return {} if json is None else {name: msgspec.Raw(json.encode())}


def etag(version: int) -> str:
    return f'W/"{version}"'


def location(call: Call, endpoint: str, found: ScimUser | ScimGroup) -> str:
    return f"{call.base}/{endpoint}/{found.id}"


def meta(call: Call, endpoint: str, kind: str, found: ScimUser | ScimGroup) -> Document:
    return schemas.meta(
        kind,
        location(call, endpoint, found),
        created=moment(found.created_at),
        lastModified=moment(found.changed_at),
        version=etag(found.version),
    )


def moment(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def projected(document: Document, query: Query) -> Document:
    """Leave out what the query does not want. `schemas` and `id` stay."""
    if not query.attributes and not query.excluded:
        return document
    return {
        name: part
        for name, value in document.items()
        if (part := _part(name, value, query)) is not None
    }


def _part(name: str, value: Any, query: Query) -> Any:
    key = name.lower()
    if key in ("schemas", "id"):
        return value
    if not query.wants(key):
        return None
    requested = query.attributes or query.excluded
    subs = {each.partition(".")[2] for each in requested if each.startswith(f"{key}.")}
    if not subs or key in requested:
        return value
    value = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    is_wanted = bool(query.attributes)
    elements = value if isinstance(value, list) else [value]
    found = [
        {sub: part for sub, part in each.items() if (sub.lower() in subs) == is_wanted}
        for each in elements
    ]
    return found if isinstance(value, list) else found[0]


async def paged(kind: Users | Groups, call: Call, query: Query) -> web.Response:
    total, found = await kind.page(call, query)
    return listed(found, total, query.start)


def listed(found: Sequence[Document], total: int, start: int) -> web.Response:
    return respond(
        {
            "schemas": [LIST],
            "totalResults": total,
            "startIndex": start,
            "itemsPerPage": len(found),
            "Resources": found,
        }
    )


def resource(body: Document, address: str, version: int, http_status: int) -> web.Response:
    return respond(body, http_status, {"location": address, "etag": etag(version)})


def respond(
    body: Document, http_status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    fixed = {"content-type": f"{MEDIA_TYPE}; charset=utf-8", "cache-control": "no-store"}
    return web.Response(
        status=http_status, body=msgspec.json.encode(body), headers={**fixed, **(headers or {})}
    )
