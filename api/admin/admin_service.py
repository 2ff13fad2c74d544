"""`AdminService`: tenants, keys, quotas, prices, plans, credit, webhooks, audit log,
configurations, and running requests and replicas.

Each RPC requires an admin key and is one transaction; client-made ids make retries safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2 as pb
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import alerts_pb2 as alert_pb
from weir.v1 import configuration_pb2
from weir.v1 import live_requests_pb2 as live_pb
from weir.v1 import plans_pb2 as plan_pb
from weir.v1 import prices_pb2 as price_pb
from weir.v1 import replicas_pb2 as replica_pb
from weir.v1.types_pb2 import QuotaStatus

from api.access.auth import Authenticator
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import (
    alert_message,
    effective_quota_statuses,
    find_generation,
    parse_billing_profile,
    quota_status,
    webhook_message,
)
from inference.routing.router import Router
from metering.alerts import webhooks
from metering.alerts.alerts import find_alert
from metering.configuration.configuration import (
    VIOLATION_COUNT_MAX,
    Action,
    Attempts,
    Change,
    Configuration,
    ConfigurationViolation,
    KeySpec,
    OrganizationSpec,
    PriceSpec,
    ProjectSpec,
    QuotaKey,
    QuotaSpec,
    apply_configuration,
    present_state,
    stated_thresholds,
)
from metering.control import live
from metering.control.live import LiveRow, cancel_request
from metering.core import audit
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import AuditEntry, Organization, Project, TokenKind, record_of
from metering.holds.recovery import sweep_expired_holds
from metering.invoicing.documents import check_shown
from metering.invoicing.invoice_document import Issuer
from metering.ledger.ledger import month_bounds
from metering.plans import plan_admin, prepaid, simulation
from metering.plans.plans import Allowance, LineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.pricing import prices
from metering.pricing.prices import CustomerPrice, ModelPrice
from metering.quotas import quota_admin, quota_states
from metering.quotas.quota_admin import THRESHOLDS_MAX
from metering.quotas.quota_rules import QuotaState
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants import admin_requests, api_keys, tenants
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.api_keys import find_api_key, subject_ids
from metering.tenants.authentication import Principal
from metering.tenants.billing_profiles import (
    BillingProfile,
    billing_profile,
    billing_profiles,
    set_billing_profile,
)
from metering.tenants.networks import excludes, normalized
from metering.tenants.tenants import find_organization, organization_names

WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")
# Names in the contract of columns that hold times.
NAMES = {
    "expires_at": "expire_time",
    "override_until": "override_end_time",
    "effective_at": "effective_time",
}
REASON_CHARS_MAX = 200
PAGE_SIZE = 200
END_WAIT_S = 2.0  # a healthy process ends a request within milliseconds
END_POLL_S = 0.005
KINDS = {str(kind): kind for kind in TokenKind}
STEP_FIELDS = ("up_to_token_count", "price_picos", "price_milli")


class Repeatable(Protocol):
    """Request with a client-made id."""

    request_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """Return the encoded request."""


@dataclass(frozen=True, slots=True)
class Acting:
    """Transaction of a caller. actor: name of the caller in the audit log."""

    session: AsyncSession
    principal: Principal

    @property
    def actor(self) -> str:
        return self.principal.key_prefix

    async def earlier(self, request: Repeatable) -> str | None:
        """Return the id that the same request created before, or None for its first call.

        After a None the caller must call `record`. Raises: InvalidRequest.
        """
        if not request.request_id:
            return None
        request_id, rest = wire.parse_request_id(request.request_id), copy.copy(request)
        rest.request_id = ""  # equal ids may differ in spelling
        payload = rest.SerializeToString(deterministic=True)
        return await admin_requests.earlier_subject(
            self.session, request_id, type(request).__name__, payload
        )

    async def record(self, request: Repeatable, subject_id: object) -> None:
        """Record the object that the first call created."""
        if request.request_id:
            await admin_requests.made(
                self.session, wire.parse_request_id(request.request_id), str(subject_id)
            )


InThread = Callable[[Principal, int, Callable[[], Any]], Awaitable[Any]]


async def at_once(principal: Principal, size: int, call: Callable[[], Any]) -> Any:
    """Run the call on the event loop."""
    return call()


class AdminCalls:
    """Base of the classes that each implement some of the RPCs."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def _caller(self, context: Context) -> Principal:
        """Return the caller. Raises: Unauthenticated, KeyInvalid, PermissionDenied."""
        return await self._authenticator.principal(context)

    @contextlib.asynccontextmanager
    async def _acting(self, context: Context, *, alone: bool = False) -> AsyncIterator[Acting]:
        """Open a transaction that commits at the end of the block. alone: block other changes."""
        principal = await self._caller(context)
        async with self._sessions.begin() as session:
            await take_changes_lock(session, alone=alone)
            yield Acting(session, principal)

    @contextlib.asynccontextmanager
    async def _transaction(self, context: Context) -> AsyncIterator[tuple[AsyncSession, str]]:
        async with self._acting(context) as acting:
            yield acting.session, acting.actor


Quotas = tuple[tuple[QuotaKey, QuotaSpec], ...]


class Parsing:
    """Parser of a configuration. Invalid values are recorded and replaced by valid ones."""

    def __init__(self) -> None:
        self.violations: list[ConfigurationViolation] = []

    def configuration(self, message: configuration_pb2.Configuration) -> Configuration:
        organizations = (
            self.organization(f"organizations[{n}]", each)
            for n, each in enumerate(message.organizations)
        )
        prices = (price_spec(f"prices[{n}]", each) for n, each in enumerate(message.prices))
        return Configuration(tuple(organizations), tuple(prices))

    def organization(
        self, path: str, message: configuration_pb2.OrganizationConfiguration
    ) -> OrganizationSpec:
        projects = (
            self.project(f"{path}.projects[{n}]", each) for n, each in enumerate(message.projects)
        )
        quotas = self.quotas(path, message.quotas)
        profile = (
            parse_billing_profile(message.billing_profile)
            if message.HasField("billing_profile")
            else None
        )
        return OrganizationSpec(
            message.name,
            message.currency_code,
            quotas,
            tuple(projects),
            message.prune_quotas,
            profile,
        )

    def project(self, path: str, message: configuration_pb2.ProjectConfiguration) -> ProjectSpec:
        keys = (self.key(f"{path}.keys[{n}]", each) for n, each in enumerate(message.keys))
        quotas = self.quotas(path, message.quotas)
        return ProjectSpec(
            message.name, quotas, tuple(keys), message.prune_quotas, message.prune_keys
        )

    def key(self, path: str, message: configuration_pb2.ApiKeyConfiguration) -> KeySpec:
        return record_of(
            KeySpec,
            message,
            scopes=tuple(sorted(set(message.scopes))) or ("inference",),
            models=tuple(sorted(set(message.models))),
            allowed_networks=normalized(message.allowed_networks),
            max_input_tokens=message.max_input_tokens or None,
            max_output_tokens=message.max_output_tokens or None,
            expires_at=wire.given_time(message, "expire_time", f"{path}.expire_time"),
            quotas=self.quotas(path, message.quotas),
        )

    def quotas(self, path: str, messages: Iterable[configuration_pb2.QuotaConfiguration]) -> Quotas:
        return tuple(self.quota(f"{path}.quotas[{n}]", each) for n, each in enumerate(messages))

    def quota(
        self, path: str, message: configuration_pb2.QuotaConfiguration
    ) -> tuple[QuotaKey, QuotaSpec]:
        dimension = wire.DIMENSIONS_BY_NUMBER.get(message.dimension)
        if dimension is None:
            self.violations.append(
                ConfigurationViolation(
                    f"{path}.dimension", "is required: name the dimension of the quota"
                )
            )
        said = {field.name for field, _ in message.ListFields()}
        given = [
            message.HasField("override_limit_value"),
            message.HasField("override_end_time"),
            bool(message.override_reason),
        ]
        if any(given) and not all(given):
            self.violations.append(
                ConfigurationViolation(
                    f"{path}.override_limit_value",
                    "a temporary override has a limit, an end and a reason: set all three or none",
                )
            )
        place = QuotaKey(
            dimension or next(iter(wire.DIMENSIONS)), message.model, message.for_new_keys
        )
        values = {name: getattr(message, name) for name in ("enforced", *WEIGHTS) if name in said}
        if message.HasField("alert_at"):
            values["alert_at"] = stated_thresholds(
                place.dimension, message.alert_at.values[: THRESHOLDS_MAX + 1]
            )
        if all(given):
            values |= {
                "override_limit_value": message.override_limit_value,
                "override_reason": message.override_reason,
            }
            values["override_until"] = wire.parse_timestamp(
                message.override_end_time, f"{path}.override_end_time"
            )
        return place, QuotaSpec(limit_value=message.limit_value, **values)


def price_spec(path: str, message: configuration_pb2.PriceConfiguration) -> PriceSpec:
    return record_of(
        PriceSpec,
        message,
        currency_code=message.currency_code or ("" if message.organization else "USD"),
        embedding_picos_per_token=wire.given(message, "embedding_picos_per_token"),
        reasoning_picos_per_token=wire.given(message, "reasoning_picos_per_token"),
        batch_multiplier_milli=wire.given(message, "batch_multiplier_milli"),
        effective_at=wire.given_time(message, "effective_time", f"{path}.effective_time"),
    )


def configuration_message(configuration: Configuration) -> configuration_pb2.Configuration:
    return configuration_pb2.Configuration(
        organizations=[
            wire.message_of(
                configuration_pb2.OrganizationConfiguration,
                organization,
                quotas=map(quota_message, organization.quotas),
                projects=map(project_configuration, organization.projects),
            )
            for organization in configuration.organizations
        ],
        prices=[
            wire.message_of(configuration_pb2.PriceConfiguration, price, effective_time=None)
            for price in configuration.prices
        ],
    )


def project_configuration(project: ProjectSpec) -> configuration_pb2.ProjectConfiguration:
    keys = (
        wire.message_of(
            configuration_pb2.ApiKeyConfiguration,
            key,
            expire_time=key.expires_at,
            quotas=map(quota_message, key.quotas),
            prune_quotas=None,
        )
        for key in project.keys
    )
    return configuration_pb2.ProjectConfiguration(
        name=project.name, quotas=map(quota_message, project.quotas), keys=keys
    )


def quota_message(quota: tuple[QuotaKey, QuotaSpec]) -> configuration_pb2.QuotaConfiguration:
    """Return the message of a quota, with default values unset."""
    place, spec = quota
    message = place_message(place)
    defaults = QuotaSpec(limit_value=spec.limit_value)
    message.limit_value = spec.limit_value
    for name in ("enforced", *WEIGHTS):
        if getattr(spec, name) != getattr(defaults, name):
            setattr(message, name, getattr(spec, name))
    if spec.alert_at is not None:
        message.alert_at.SetInParent()
        message.alert_at.values.extend(spec.alert_at)
    if spec.override_until is not None:
        message.override_limit_value = spec.override_limit_value or 0
        message.override_end_time.FromDatetime(spec.override_until)
        message.override_reason = spec.override_reason or ""
    return message


def place_message(place: QuotaKey) -> configuration_pb2.QuotaConfiguration:
    dimension = wire.DIMENSIONS[place.dimension]
    return configuration_pb2.QuotaConfiguration(
        dimension=dimension, model=place.model, for_new_keys=place.for_new_keys
    )


def answer_of(work: Attempts, *, secrets: bool) -> configuration_pb2.ApplyConfigurationResponse:
    return configuration_pb2.ApplyConfigurationResponse(
        changes=[change_message(change, secrets=secrets) for change in work.changes],
        kept=[change_message(change, secrets=False) for change in work.kept],
    )


def change_message(change: Change, *, secrets: bool) -> configuration_pb2.ConfigurationChange:
    """Return the message of a change. secrets: whether to include those of new keys."""
    is_unmade = change.kind == "key" and change.action is Action.CREATE and not secrets
    return wire.message_of(
        configuration_pb2.ConfigurationChange,
        change,
        quota=None if change.quota is None else place_message(change.quota),
        fields=[
            configuration_pb2.FieldChange(
                field=NAMES.get(each.name, each.name),
                before_json=json_text(each.before, ensure_ascii=False),
                after_json=json_text(each.after, ensure_ascii=False),
            )
            for each in change.fields
        ],
        api_key_prefix="" if is_unmade else change.key_prefix,
        secret=change.secret if secrets else "",
    )


def json_text(value: object, **form: Any) -> str:
    """Return a value as JSON; empty for None."""
    return "" if value is None else json.dumps(value, **form)


class AdminServicer(AdminCalls, pb_grpc.AdminServiceServicer):
    """Implementation of `proto/weir/v1/admin_service.proto`."""

    def __init__(
        self,
        router: Router,
        authenticator: Authenticator,
        sessions: Sessions,
        database_url: str,
        signer: Signer | None,
        issuer: Issuer,
        *,
        in_thread: InThread = at_once,
        private_webhooks: bool = False,
    ) -> None:
        """signer: signs receipts of overdue requests; may be None. issuer: has the fonts in which
        billing profiles are printed.

        in_thread: runs work on a configuration, see `Process.in_thread`. private_webhooks: see
        `alerts/webhooks.py`.
        """
        super().__init__(authenticator, sessions)
        self._router = router
        self._database_url = database_url
        self._signer = signer
        self._issuer = issuer
        self._in_thread = in_thread
        self._private_webhooks = private_webhooks

    async def ApplyConfiguration(
        self, request: configuration_pb2.ApplyConfigurationRequest, context: Context
    ) -> configuration_pb2.ApplyConfigurationResponse:
        """Apply a configuration; a dry run rolls it back at the end."""
        async with self._acting(context, alone=True) as acting:
            parsing, size = Parsing(), request.ByteSize()
            requested = await self._in_thread(
                acting.principal, size, partial(parsing.configuration, request.configuration)
            )
            work = await apply_configuration(
                acting.session,
                requested,
                actor=acting.actor,
                own_key_id=acting.principal.api_key_id,
                own_address=acting.principal.address,
                models=[model.name for model in self._router.models()],
                check_profile=partial(check_shown, issuer=self._issuer),
                dry_run=request.dry_run or bool(parsing.violations),
            )
            if violations := [*parsing.violations, *work.violations]:
                await acting.session.rollback()
                messages = [
                    configuration_pb2.ConfigurationViolation(
                        field=each.path, description=each.message
                    )
                    for each in violations[:VIOLATION_COUNT_MAX]
                ]
                if rest := violations[VIOLATION_COUNT_MAX:]:
                    more = f"and {len(rest)} more"
                    messages.append(configuration_pb2.ConfigurationViolation(description=more))
                return configuration_pb2.ApplyConfigurationResponse(violations=messages)
            if request.dry_run:
                await acting.session.rollback()
            answer: configuration_pb2.ApplyConfigurationResponse = await self._in_thread(
                acting.principal, size, partial(answer_of, work, secrets=not request.dry_run)
            )
            return answer

    async def ExportConfiguration(
        self, request: configuration_pb2.ExportConfigurationRequest, context: Context
    ) -> configuration_pb2.ExportConfigurationResponse:
        async with self._acting(context, alone=True) as acting:
            present = await present_state(acting.session, organization=request.organization or None)
            exported = await self._in_thread(
                acting.principal, 0, partial(configuration_message, present)
            )
            return configuration_pb2.ExportConfigurationResponse(configuration=exported)

    async def ListLiveRequests(
        self, request: live_pb.ListLiveRequestsRequest, context: Context
    ) -> live_pb.ListLiveRequestsResponse:
        await self._caller(context)
        async with self._sessions() as session:
            organization = (
                await tenants.find_organization(session, request.organization)
                if request.organization
                else None
            )
        view = await live.live_view(
            self._sessions,
            organization_id=organization.id if organization else None,
            page_size=request.page_size or PAGE_SIZE,
            stuck_only=request.stuck_only,
        )
        return live_pb.ListLiveRequestsResponse(
            requests=map(live_request_message, view.requests),
            organizations=[
                wire.message_of(live_pb.LiveOrganization, each) for each in view.organizations
            ],
            request_count=view.request_count,
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def GetRequest(
        self, request: live_pb.GetRequestRequest, context: Context
    ) -> live_pb.GetRequestResponse:
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        async with self._sessions() as session:
            project_id = (
                (await tenants.find_project(session, request.project)).id
                if request.project
                else None
            )
            owner = await self._owner(session, request_id, project_id)
            return live_pb.GetRequestResponse(
                generation=await find_generation(session, owner.project_id, request_id),
                organization_name=owner.organization_name,
                project_name=owner.project_name,
                api_key_prefix=owner.api_key_prefix,
            )

    async def _owner(
        self, session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None
    ) -> LiveRow:
        """Return the owner of a request. Raises: NotFound; InvalidValue if the id is ambiguous."""
        owners = await live.find_request_owners(session, request_id, project_id)
        if not owners:
            raise NotFound("request", str(request_id))
        if len(owners) > 1:
            names = ", ".join(
                sorted(f"{each.organization_name}/{each.project_name}" for each in owners)
            )
            raise InvalidValue(
                "project", f"several projects have a request with this id, name one: {names}"
            )
        owner: LiveRow = owners[0]
        return owner

    async def KillRequest(
        self, request: live_pb.KillRequestRequest, context: Context
    ) -> live_pb.KillRequestResponse:
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        check_reason(request.reason)
        place, had_ended = await self._place(request_id, request.project)
        if had_ended:
            return await self._killed(
                live_pb.KillRequestResponse.RESULT_ALREADY_ENDED, request_id, place
            )
        async with self._transaction(context) as (session, actor):
            await record_kill(session, actor, request_id, place, request.reason)
            await cancel_request(
                session, project_id=place.project_id, request_id=request_id, reason=request.reason
            )
        ended = await self._wait_for_end(request_id, place)
        result = (
            live_pb.KillRequestResponse.RESULT_ENDED
            if ended
            else live_pb.KillRequestResponse.RESULT_PENDING
        )
        return await self._killed(result, request_id, place)

    async def ExpireOverdueHolds(
        self, request: live_pb.ExpireOverdueHoldsRequest, context: Context
    ) -> live_pb.ExpireOverdueHoldsResponse:
        """Expire overdue holds, as the worker's sweep does."""
        await self._caller(context)
        expired_count = await sweep_expired_holds(self._database_url, signer=self._signer)
        if expired_count:
            async with self._transaction(context) as (session, actor):
                after = {"expired_count": expired_count}
                await record_change(
                    session,
                    actor=actor,
                    action="holds.expire_overdue",
                    subject_id="",
                    before=None,
                    after=after,
                )
        return live_pb.ExpireOverdueHoldsResponse(expired_count=expired_count)

    async def _place(self, request_id: uuid.UUID, project: str) -> tuple[live.ProjectRequest, bool]:
        """Return the place of a request and whether it has ended.

        Raises: NotFound; InvalidValue if it runs in several projects.
        """
        async with self._sessions() as session:
            project_id = (await tenants.find_project(session, project)).id if project else None
            places = await live.find_project_requests(session, request_id, project_id)
        running = [place for place in places if place.is_held] or await live.find_waiting(
            self._sessions, request_id, project_id
        )
        matches = running or places
        if not matches:
            raise NotFound("request", str(request_id))
        if len(matches) > 1:
            async with self._sessions() as session:
                names = await tenants.project_names(
                    session, [place.project_id for place in matches]
                )
            raise InvalidValue(
                "project",
                f"several projects have a request with this id, name one: {', '.join(names)}",
            )
        return matches[0], not running

    async def _wait_for_end(self, request_id: uuid.UUID, place: live.ProjectRequest) -> bool:
        """Wait until a request has ended; return False if it has not within `END_WAIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                # It may run in another process, so there is no event to wait for.
                while await self._runs(request_id, place):  # noqa: ASYNC110
                    await asyncio.sleep(END_POLL_S)
                return True
        return False

    async def _runs(self, request_id: uuid.UUID, place: live.ProjectRequest) -> bool:
        if not place.is_held and await live.find_waiting(
            self._sessions, request_id, place.project_id
        ):
            return True
        async with self._sessions() as session:  # a waiting request may have a hold by now
            return any(
                held.is_held
                for held in await live.find_project_requests(session, request_id, place.project_id)
            )

    async def _killed(
        self,
        result: live_pb.KillRequestResponse.Result.ValueType,
        request_id: uuid.UUID,
        place: live.ProjectRequest,
    ) -> live_pb.KillRequestResponse:
        answer = live_pb.KillRequestResponse(result=result)
        with contextlib.suppress(NotFound):
            async with self._sessions() as session:
                answer.generation.CopyFrom(
                    await find_generation(session, place.project_id, request_id)
                )
                if result == live_pb.KillRequestResponse.RESULT_PENDING and (
                    hold := await live.find_running_hold(session, place.project_id, request_id)
                ):
                    answer.expire_time.FromDatetime(hold.expires_at)
        return answer

    async def ListReplicas(
        self, request: replica_pb.ListReplicasRequest, context: Context
    ) -> replica_pb.ListReplicasResponse:
        await self._caller(context)
        view = await live.replica_view(self._sessions)
        async with self._sessions() as session:
            drains = await live.list_drains(session)
        rows = [
            row
            for row in view.replicas
            if not request.model or live.is_of(row.model, request.model)
        ]
        drains = [
            drain for drain in drains if not request.model or live.is_of(drain.model, request.model)
        ]
        if request.model and not (rows or drains or self._own(request.model)):
            raise NotFound("model with replicas", request.model)
        return replica_pb.ListReplicasResponse(
            replicas=map(replica_message, rows),
            drains=map(drain_message, drains),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def DrainReplica(
        self, request: replica_pb.DrainReplicaRequest, context: Context
    ) -> replica_pb.DrainReplicaResponse:
        await self._caller(context)
        check_reason(request.reason)
        move_after = wire.given_duration(request, "move_after")
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            order = await live.drain_replica(
                session,
                model=model,
                replica=request.replica,
                reason=request.reason,
                move_after=move_after,
                actor=actor,
            )
            drain = drain_message(order)
        view = await live.replica_view(self._sessions)
        return replica_pb.DrainReplicaResponse(
            drain=drain,
            replicas=map(replica_message, view.named(model, request.replica)),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def UndrainReplica(
        self, request: replica_pb.UndrainReplicaRequest, context: Context
    ) -> replica_pb.UndrainReplicaResponse:
        await self._caller(context)
        check_reason(request.reason)
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            undrained = await live.end_drain(
                session, model=model, replica=request.replica, reason=request.reason, actor=actor
            )
        view = await live.replica_view(self._sessions)
        return replica_pb.UndrainReplicaResponse(
            undrained=undrained,
            replicas=map(replica_message, view.named(model, request.replica)),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def _served_name(self, model: str, replica: str) -> str:
        """Return the served name of a replica known to processes or drains.

        Raises: NotFound, InvalidValue.
        """
        view = await live.replica_view(self._sessions)
        async with self._sessions() as session:
            known = {(drain.model, drain.replica) for drain in await live.list_drains(session)}
        known |= {(row.model, row.replica) for row in view.replicas}
        of_model = sorted(
            {entry for entry in known if live.is_of(entry[0], model)} | self._own(model)
        )
        if not of_model:
            raise NotFound("model with replicas", model)
        served = [served for served, name in of_model if name == replica]
        if not served:
            raise NotFound("replica", replica)
        if len(served) > 1:
            raise InvalidValue(
                "model",
                f"several versions have a replica with this name, name one: {', '.join(served)}",
            )
        return served[0]

    def _own(self, model: str) -> set[tuple[str, str]]:
        """Return this process's replicas of a model, which may not be in its report yet."""
        return {
            (served, report.name)
            for served, report in self._router.reports()
            if live.is_of(served, model)
        }

    async def SimulatePrices(
        self, request: plan_pb.SimulatePricesRequest, context: Context
    ) -> plan_pb.SimulatePricesResponse:
        await self._caller(context)
        async with self._sessions() as session:
            matches = await simulation.simulate(
                session,
                month=request.month,
                prices=[proposed_price(each) for each in request.prices],
                plans=[
                    proposed_plan(f"plans[{index}]", each)
                    for index, each in enumerate(request.plans)
                ],
                organization=request.organization,
            )
        picos = (
            {
                "old_amount": each.old_picos,
                "new_amount": each.new_picos,
                "difference": each.new_picos - each.old_picos,
            }
            for each in matches
        )
        customers = [
            wire.message_of(plan_pb.SimulatedCustomer, each, **sums)
            for each, sums in zip(matches, picos, strict=True)
        ]
        return plan_pb.SimulatePricesResponse(customers=customers)

    async def CreatePlan(
        self, request: plan_pb.CreatePlanRequest, context: Context
    ) -> plan_pb.CreatePlanResponse:
        async with self._acting(context) as acting:
            plan, existed = await plan_admin.create_plan(
                acting.session,
                name=request.plan.name,
                currency_code=request.plan.currency_code or "USD",
                rules=rules_of("plan", request.plan),
                actor=acting.actor,
            )
            return plan_pb.CreatePlanResponse(plan=plan_message(plan), existed=existed)

    async def ListPlans(
        self, request: plan_pb.ListPlansRequest, context: Context
    ) -> plan_pb.ListPlansResponse:
        async with self._transaction(context) as (session, _):
            assigned = await plan_admin.list_assignments(session, organization=request.organization)
            assignments = [
                each
                for each in assigned
                if not request.name or (each.plan and each.plan.name == request.name)
            ]
            names = await organization_names(
                session, {each.organization_id for each in assignments}
            )
            return plan_pb.ListPlansResponse(
                plans=map(plan_message, await plan_admin.list_plans(session, name=request.name)),
                assignments=[assignment_message(each, names) for each in assignments],
            )

    async def AssignPlan(
        self, request: plan_pb.AssignPlanRequest, context: Context
    ) -> plan_pb.AssignPlanResponse:
        async with self._acting(context) as acting:
            assignment, existed = await plan_admin.assign_plan(
                acting.session,
                organization=request.organization,
                plan=request.plan,
                version=request.version,
                first_month=parse_month(request.first_month, "first_month"),
                actor=acting.actor,
            )
            names = await organization_names(acting.session, {assignment.organization_id})
            return plan_pb.AssignPlanResponse(
                assignment=assignment_message(assignment, names), existed=existed
            )

    async def GrantCredit(
        self, request: plan_pb.GrantCreditRequest, context: Context
    ) -> plan_pb.GrantCreditResponse:
        """Grant credit; a prepaid organization may use it at once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is None:
                last_month = parse_month(request.last_month, "last_month")
                if last_month is None:
                    raise InvalidValue(
                        "last_month", "is required: the last month of the credit, as YYYY-MM"
                    )
                grant = await prepaid.grant_credit(
                    acting.session,
                    organization=request.organization,
                    amount_picos=request.amount_picos,
                    first_month=parse_month(request.first_month, "first_month"),
                    last_month=last_month,
                    reason=request.reason,
                    actor=acting.actor,
                )
                await prepaid.refresh(
                    acting.session,
                    grant.organization_id,
                    actor=acting.actor,
                    granted_picos=grant.amount_picos,
                )
                await acting.record(request, grant.id)
            else:
                grant = await prepaid.find_grant(acting.session, uuid.UUID(earlier))
            names = await organization_names(acting.session, {grant.organization_id})
            return plan_pb.GrantCreditResponse(grant=grant_message(grant, names))

    async def ListCreditGrants(
        self, request: plan_pb.ListCreditGrantsRequest, context: Context
    ) -> plan_pb.ListCreditGrantsResponse:
        async with self._transaction(context) as (session, _):
            matches = await prepaid.list_grants(session, organization=request.organization)
            names = await organization_names(session, {each.organization_id for each in matches})
            return plan_pb.ListCreditGrantsResponse(
                grants=[grant_message(each, names) for each in matches]
            )

    async def GetCreditBalance(
        self, request: plan_pb.GetCreditBalanceRequest, context: Context
    ) -> plan_pb.GetCreditBalanceResponse:
        async with self._transaction(context) as (session, _):
            balance = await prepaid.credit_balance(session, organization=request.organization)
            currency_code = balance.organization.currency_code
            names = {
                "organization_id": balance.organization.id,
                "organization_name": balance.organization.name,
            }
            return wire.message_of(
                plan_pb.GetCreditBalanceResponse, balance, currency_code, **names
            )

    async def SetPrepaid(
        self, request: plan_pb.SetPrepaidRequest, context: Context
    ) -> plan_pb.SetPrepaidResponse:
        """Set whether an organization is prepaid."""
        async with self._acting(context) as acting:
            _, existed = await prepaid.set_prepaid(
                acting.session,
                organization=request.organization,
                prepaid=request.prepaid,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=acting.actor,
            )
            return plan_pb.SetPrepaidResponse(existed=existed)

    async def SetPrice(self, request: pb.SetPriceRequest, context: Context) -> pb.SetPriceResponse:
        """Add a price version, and one for the batch tier if its price differs."""
        effective_at = wire.given_time(request, "effective_time")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price = await prices.set_price(
                    acting.session,
                    model=request.model,
                    currency_code=request.currency_code,
                    input_picos_per_token=request.input_picos_per_token,
                    cached_input_picos_per_token=request.cached_input_picos_per_token,
                    output_picos_per_token=request.output_picos_per_token,
                    embedding_picos_per_token=wire.given(request, "embedding_picos_per_token"),
                    reasoning_picos_per_token=wire.given(request, "reasoning_picos_per_token"),
                    organization=request.organization,
                    batch_multiplier_milli=wire.given(request, "batch_multiplier_milli"),
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.record(request, price.prices.version)
            written = await prices.versions_of_change(acting.session, price)
            names = await owner_names(acting.session, written)
            return pb.SetPriceResponse(
                version=price.prices.version,
                versions=[version_message(each, names) for each in written],
            )

    async def WithdrawPrice(
        self, request: price_pb.WithdrawPriceRequest, context: Context
    ) -> price_pb.WithdrawPriceResponse:
        effective_at = wire.given_time(request, "effective_time")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                price = await prices.get_price(acting.session, int(earlier))
            else:
                price, *_ = await prices.withdraw_price(
                    acting.session,
                    model=request.model,
                    organization=request.organization,
                    effective_at=effective_at,
                    actor=acting.actor,
                )
                await acting.record(request, price.prices.version)
            written = await prices.versions_of_change(acting.session, price)
            names = await owner_names(acting.session, written)
            return price_pb.WithdrawPriceResponse(
                versions=[version_message(each, names) for each in written]
            )

    async def ListPrices(
        self, request: price_pb.ListPricesRequest, context: Context
    ) -> price_pb.ListPricesResponse:
        """Return the prices that apply to an organization, with their sources and times."""
        at = wire.given_time(request, "time")
        async with self._transaction(context) as (session, _):
            owner = (
                await find_organization(session, request.organization)
                if request.organization
                else None
            )
            owner_id = None if owner is None else owner.id
            currency_code = request.currency_code or (owner.currency_code if owner else None)
            model = request.model or None
            matches = await prices.versions_in_force(
                session, model=model, currency_code=currency_code, organization_id=owner_id, at=at
            )
            history: list[ModelPrice] = []
            if request.history:
                history = await prices.price_history(
                    session, model=model, currency_code=currency_code, organization_id=owner_id
                )
            names = {} if owner is None else {owner.id: owner.name}
            return price_pb.ListPricesResponse(
                prices=[
                    applied_message(each, names)
                    for each in prices.customer_prices(matches, owner_id)
                ],
                versions=[version_message(each, names) for each in history],
            )

    async def CreateOrganization(
        self, request: pb.CreateOrganizationRequest, context: Context
    ) -> pb.CreateOrganizationResponse:
        async with self._acting(context) as acting:
            existed = True
            if (earlier := await acting.earlier(request)) is not None:
                organization = await tenants.find_organization(acting.session, earlier)
            else:
                fields = {
                    "name": request.name,
                    "currency_code": request.currency_code or "USD",
                    "actor": acting.actor,
                }
                if request.allow_existing:
                    organization, existed = await admin_requests.ensure_organization(
                        acting.session, **fields
                    )
                else:
                    organization, existed = (
                        await tenants.create_organization(acting.session, **fields),
                        False,
                    )
                await acting.record(request, organization.id)
            profile = await billing_profile(acting.session, organization.id)
            return pb.CreateOrganizationResponse(
                organization=organization_message(organization, profile), existed=existed
            )

    async def ListOrganizations(
        self, request: pb.ListOrganizationsRequest, context: Context
    ) -> pb.ListOrganizationsResponse:
        async with self._transaction(context) as (session, _):
            organizations = await tenants.list_organizations(session)
            profiles = await billing_profiles(session)
            return pb.ListOrganizationsResponse(
                organizations=[
                    organization_message(each, profiles.get(each.id)) for each in organizations
                ]
            )

    async def SetBillingProfile(
        self, request: pb.SetBillingProfileRequest, context: Context
    ) -> pb.SetBillingProfileResponse:
        async with self._transaction(context) as (session, actor):
            organization = await tenants.find_organization(session, request.organization)
            given = parse_billing_profile(request.billing_profile)
            profile = await set_billing_profile(
                session, organization=str(organization.id), profile=given, actor=actor
            )
            await check_shown(profile, self._issuer)
            return pb.SetBillingProfileResponse(
                organization=organization_message(organization, profile)
            )

    async def CreateProject(
        self, request: pb.CreateProjectRequest, context: Context
    ) -> pb.CreateProjectResponse:
        async with self._acting(context) as acting:
            existed = True
            if (earlier := await acting.earlier(request)) is not None:
                project = await tenants.find_project(acting.session, earlier)
            else:
                fields = {
                    "organization": request.organization,
                    "name": request.name,
                    "actor": acting.actor,
                }
                if request.allow_existing:
                    project, existed = await admin_requests.ensure_project(acting.session, **fields)
                else:
                    project, existed = await tenants.create_project(acting.session, **fields), False
                await acting.record(request, project.id)
            return pb.CreateProjectResponse(project=project_message(project), existed=existed)

    async def ListProjects(
        self, request: pb.ListProjectsRequest, context: Context
    ) -> pb.ListProjectsResponse:
        async with self._transaction(context) as (session, _):
            projects = await tenants.list_projects(session, organization=request.organization)
            return pb.ListProjectsResponse(projects=map(project_message, projects))

    async def CreateApiKey(
        self, request: pb.CreateApiKeyRequest, context: Context
    ) -> pb.CreateApiKeyResponse:
        lifetime = wire.given_duration(request, "lifetime")
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                key = await api_keys.find_api_key(acting.session, earlier)
                return pb.CreateApiKeyResponse(api_key=key_message(key), existed=True)
            fields: dict[str, Any] = {
                "organization": request.organization,
                "project": request.project,
                "name": request.name,
                "scopes": tuple(request.scopes) or ("inference",),
                "models": self._known_models(request.models),
                "allowed_networks": tuple(request.allowed_networks),
                "max_input_tokens": request.max_input_tokens,
                "max_output_tokens": request.max_output_tokens,
                "strict_parameters": request.strict_parameters,
                "lifetime": lifetime,
                "actor": acting.actor,
            }
            existed = False
            if request.allow_existing:
                key, secret, existed = await admin_requests.ensure_api_key(acting.session, **fields)
            else:
                key, secret = await api_keys.create_api_key(acting.session, **fields)
            await acting.record(request, key.id)
            return pb.CreateApiKeyResponse(api_key=key_message(key), secret=secret, existed=existed)

    async def RotateApiKey(
        self, request: pb.RotateApiKeyRequest, context: Context
    ) -> pb.RotateApiKeyResponse:
        """Replace the secret of a key and return the new one, once."""
        overlap = wire.given_duration(request, "overlap")
        overlap = api_keys.OVERLAP if overlap is None else overlap
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                key = await api_keys.find_api_key(acting.session, earlier)
                return pb.RotateApiKeyResponse(
                    api_key=key_message(key), overlap_end_time=wire.timestamp(key.overlap_ends_at)
                )
            key, secret, ends_at = await api_keys.rotate_api_key(
                acting.session, api_key=request.api_key, overlap=overlap, actor=acting.actor
            )
            await acting.record(request, key.id)
            return pb.RotateApiKeyResponse(
                api_key=key_message(key), secret=secret, overlap_end_time=wire.timestamp(ends_at)
            )

    async def UpdateApiKey(
        self, request: pb.UpdateApiKeyRequest, context: Context
    ) -> pb.UpdateApiKeyResponse:
        async with self._acting(context) as acting:
            key = await api_keys.update_api_key(
                acting.session,
                api_key=request.api_key,
                name=wire.given(request, "name"),
                scopes=tuple(request.scopes),
                models=self._known_models(request.models),
                all_models=request.all_models,
                allowed_networks=tuple(request.allowed_networks),
                all_networks=request.all_networks,
                max_input_tokens=wire.given(request, "max_input_tokens"),
                max_output_tokens=wire.given(request, "max_output_tokens"),
                strict_parameters=wire.given(request, "strict_parameters"),
                expires_at=wire.given_time(request, "expire_time"),
                never_expires=request.never_expires,
                actor=acting.actor,
            )
            if key.id == acting.principal.api_key_id and excludes(
                key.allowed_networks, acting.principal.address
            ):
                raise InvalidValue(
                    "allowed_networks",
                    f"must include {acting.principal.address}, from which this key makes this call:"
                    " add a network with that address, or use another key",
                )
            return pb.UpdateApiKeyResponse(api_key=key_message(key))

    async def RevokeApiKey(
        self, request: pb.RevokeApiKeyRequest, context: Context
    ) -> pb.RevokeApiKeyResponse:
        async with self._transaction(context) as (session, actor):
            key = await api_keys.revoke_api_key(session, api_key=request.api_key, actor=actor)
            return pb.RevokeApiKeyResponse(api_key=key_message(key))

    async def ListApiKeys(
        self, request: pb.ListApiKeysRequest, context: Context
    ) -> pb.ListApiKeysResponse:
        async with self._transaction(context) as (session, _):
            keys = await api_keys.list_api_keys(
                session,
                organization=request.organization or None,
                api_key=request.api_key or None,
                unused_for=wire.given_duration(request, "unused_for"),
            )
            return pb.ListApiKeysResponse(api_keys=map(key_message, keys))

    def _known_models(self, models: Sequence[str]) -> tuple[str, ...]:
        """Return the models to which a key is limited. Raises: ModelUnknown."""
        for model in models:
            self._router.check_canonical_name(model)
        return tuple(models)

    async def SetAlertWebhook(
        self, request: alert_pb.SetAlertWebhookRequest, context: Context
    ) -> alert_pb.SetAlertWebhookResponse:
        """Create a webhook and return its secret, once."""
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                existing = await webhooks.list_webhooks(acting.session, organization=earlier)
                return alert_pb.SetAlertWebhookResponse(
                    webhook=webhook_message(existing[0]) if existing else None
                )
            state, secret = await webhooks.set_webhook(
                acting.session,
                organization=request.organization,
                url=request.url,
                private=self._private_webhooks,
                actor=acting.actor,
            )
            await acting.record(request, state.organization.id)
            return alert_pb.SetAlertWebhookResponse(webhook=webhook_message(state), secret=secret)

    async def ListAlertWebhooks(
        self, request: alert_pb.ListAlertWebhooksRequest, context: Context
    ) -> alert_pb.ListAlertWebhooksResponse:
        async with self._transaction(context) as (session, _):
            matches = await webhooks.list_webhooks(session, organization=request.organization)
            return alert_pb.ListAlertWebhooksResponse(webhooks=map(webhook_message, matches))

    async def DeleteAlertWebhook(
        self, request: alert_pb.DeleteAlertWebhookRequest, context: Context
    ) -> alert_pb.DeleteAlertWebhookResponse:
        async with self._transaction(context) as (session, actor):
            removal = webhooks.remove_webhook(
                session, organization=request.organization, actor=actor
            )
            return alert_pb.DeleteAlertWebhookResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    async def TestAlertWebhook(
        self, request: alert_pb.TestAlertWebhookRequest, context: Context
    ) -> alert_pb.TestAlertWebhookResponse:
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                alert_id = uuid.UUID(earlier)
            else:
                alert_id = await webhooks.try_webhook(
                    acting.session, organization=request.organization
                )
                await acting.record(request, alert_id)
            return alert_pb.TestAlertWebhookResponse(
                alert=alert_message(await find_alert(acting.session, alert_id))
            )

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        subject, dimension = (
            wire.SUBJECTS_BY_NUMBER.get(request.subject),
            wire.DIMENSIONS_BY_NUMBER.get(request.dimension),
        )
        async with self._transaction(context) as (session, actor):
            if subject is None:
                raise InvalidValue("subject", "must be an organization, a project or an API key")
            if dimension is None:
                raise InvalidValue("dimension", "is required: name the dimension of the quota")
            if request.model:
                self._router.check_canonical_name(request.model)
            state = await quota_admin.set_quota(
                session,
                subject=subject,
                subject_ref=request.subject_ref,
                model=request.model,
                dimension=dimension,
                limit_value=request.limit_value,
                weights=tuple(wire.given(request, name) for name in WEIGHTS),
                enforced=wire.given(request, "enforced"),
                for_new_keys=request.for_new_keys,
                alert_at=request.alert_at.values if request.HasField("alert_at") else None,
                actor=actor,
            )
            return pb.SetQuotaResponse(quota=await self._status(session, state))

    async def _status(self, session: AsyncSession, state: QuotaState) -> QuotaStatus:
        """Return a quota, and whether a stricter one at a higher level makes it ineffective."""
        status = quota_status(state)
        narrowed_by = None if state.for_new_keys else await quota_states.narrowed_by(session, state)
        status.narrowed_by_quota_id = "" if narrowed_by is None else str(narrowed_by)
        return status

    async def OverrideQuota(
        self, request: pb.OverrideQuotaRequest, context: Context
    ) -> pb.OverrideQuotaResponse:
        """Set or end a temporary override of a limit."""
        until = wire.given_time(request, "expire_time")
        async with self._transaction(context) as (session, actor):
            state = await quota_admin.override_quota(
                session,
                quota_id=request.quota_id,
                limit_value=request.limit_value,
                until=until,
                reason=request.reason,
                actor=actor,
            )
            return pb.OverrideQuotaResponse(quota=await self._status(session, state))

    async def DeleteQuota(
        self, request: pb.DeleteQuotaRequest, context: Context
    ) -> pb.DeleteQuotaResponse:
        async with self._transaction(context) as (session, actor):
            removal = quota_admin.delete_quota(session, quota_id=request.quota_id, actor=actor)
            return pb.DeleteQuotaResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    async def ListQuotas(
        self, request: pb.ListQuotasRequest, context: Context
    ) -> pb.ListQuotasResponse:
        async with self._transaction(context) as (session, _):
            if not request.api_key:
                states = await quota_states.list_quotas(
                    session, organization=request.organization or None
                )
                return pb.ListQuotasResponse(quotas=map(quota_status, states))
            if request.organization:
                raise InvalidValue(
                    "organization",
                    "must be empty with api_key, which lists all limits of the key",
                )
            if request.model:
                self._router.check_canonical_name(request.model)
            key = await find_api_key(session, request.api_key)
            ids = (key.organization_id, key.project_id, key.id)
            states = await quota_states.quotas_for(
                session, subject_ids=ids, model=request.model or None
            )
            return pb.ListQuotasResponse(quotas=effective_quota_statuses(states))

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Context
    ) -> pb.ListAuditEntriesResponse:
        start_at = wire.given_time(request, "start_time")
        end_at = wire.given_time(request, "end_time")
        async with self._transaction(context) as (session, _):
            entries = await audit.list_audit_entries(
                session,
                page_size=request.page_size or 100,
                before_entry_id=request.before_entry_id,
                subject_ids=(
                    await subject_ids(session, request.subject) if request.subject else None
                ),
                actor=request.actor,
                action_prefix=request.action_prefix,
                start_at=start_at,
                end_at=end_at,
            )
            return pb.ListAuditEntriesResponse(entries=map(audit_message, entries))


async def record_kill(
    session: AsyncSession,
    actor: str,
    request_id: uuid.UUID,
    place: live.ProjectRequest,
    reason: str,
) -> None:
    hold = await live.find_running_hold(session, place.project_id, request_id)
    before: dict[str, object] = {"project_id": str(place.project_id), "state": "waiting"}
    if hold is not None:
        before |= {
            "organization_id": str(hold.organization_id),
            "api_key_id": str(hold.api_key_id),
            "model": hold.model,
        }
        before |= {"state": hold.state, "delivered_token_count": hold.delivered_token_count}
    after = before | {"state": "ordered to end", "reason": reason}
    await record_change(
        session,
        actor=actor,
        action="request.kill",
        subject_id=str(request_id),
        before=before,
        after=after,
    )


def live_request_message(row: LiveRow) -> live_pb.LiveRequest:
    times = {"admit_time": row.admitted_at, "expire_time": row.expires_at}
    return wire.message_of(
        live_pb.LiveRequest, row, age=wire.duration(max(row.age_s, 0.0)), **times
    )


def check_reason(reason: str) -> None:
    """Check the length and characters of a reason. Raises: InvalidValue."""
    if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"must be at most {REASON_CHARS_MAX} printable characters")


def replica_message(row: LiveRow) -> replica_pb.Replica:
    return wire.message_of(replica_pb.Replica, row, drained=row.is_drained)


def drain_message(order: LiveRow) -> replica_pb.ReplicaDrain:
    move_after = None if order.move_after_ms is None else wire.duration(order.move_after_ms / 1000)
    return wire.message_of(
        replica_pb.ReplicaDrain, order, drain_time=order.drained_at, move_after=move_after
    )


Names = Mapping[uuid.UUID, str]


def parse_month(text: str, field: str) -> date | None:
    """Return the first day of a month `YYYY-MM`; None for an empty text.

    Raises: InvalidValue naming the field.
    """
    try:
        return month_bounds(text)[0].date() if text else None
    except InvalidValue as wrong:
        raise InvalidValue(field, wrong.remedy) from None


def rules_of(path: str, message: plan_pb.PlanConfiguration) -> PlanRules:
    """Return the rules of a plan. Raises: InvalidValue naming the field in `path`."""
    try:
        return PlanRules(
            tuple(
                Allowance(selector_of(each.selector), each.token_count)
                for each in message.allowances
            ),
            tuple(
                TieredPrice(
                    LineKind(each.kind) if each.kind in set(LineKind) else LineKind.COMMITMENT,
                    selector_of(each.selector),
                    tuple(
                        PriceStep(*(wire.given(step, name) for name in STEP_FIELDS))
                        for step in each.steps
                    ),
                )
                for each in message.tiered_prices
            ),
            message.commitment_picos,
        )
    except InvalidValue as wrong:
        raise InvalidValue(f"{path}.{wrong.field}", wrong.remedy) from None


def selector_of(message: plan_pb.TokenSelector) -> Selector:
    """Return the selector of tokens. Raises: InvalidValue."""
    if message.token_kind and message.token_kind not in KINDS:
        raise InvalidValue(
            "token_kind", f"must be one of {', '.join(KINDS)}, got {message.token_kind[:64]!r}"
        )
    return Selector(
        message.model,
        KINDS.get(message.token_kind),
        wire.TIERS[message.tier] if message.tier else None,
    )


def plan_message(plan: plan_admin.Plan) -> plan_pb.Plan:
    terms = {"name": plan.name, "currency_code": plan.currency_code, "organizations": ()}
    configuration = wire.message_of(plan_pb.PlanConfiguration, plan.rules, **terms)
    return plan_pb.Plan(
        configuration=configuration,
        version=plan.version,
        create_time=wire.timestamp(plan.created_at),
    )


def assignment_message(assignment: plan_admin.Assignment, names: Names) -> plan_pb.PlanAssignment:
    plan = assignment.plan
    return wire.message_of(
        plan_pb.PlanAssignment,
        assignment,
        organization_name=names[assignment.organization_id],
        first_month=f"{assignment.first_month:%Y-%m}",
        plan=plan and plan.name,
        version=plan and plan.version,
    )


def grant_message(grant: prepaid.Grant, names: Names) -> plan_pb.CreditGrant:
    return wire.message_of(
        plan_pb.CreditGrant,
        grant,
        grant_id=grant.id,
        organization_name=names[grant.organization_id],
        first_month=f"{grant.first_month:%Y-%m}",
        last_month=f"{grant.last_month:%Y-%m}",
    )


def proposed_price(message: configuration_pb2.PriceConfiguration) -> simulation.ProposedPrice:
    rates = {name: getattr(message, name) for name in prices.RATES}
    if not message.HasField("reasoning_picos_per_token"):
        rates["reasoning_picos_per_token"] = message.output_picos_per_token
    multiplier = wire.given(message, "batch_multiplier_milli")
    return record_of(
        simulation.ProposedPrice,
        message,
        rates=tuple(rates.values()),
        batch_multiplier_milli=multiplier,
    )


def proposed_plan(path: str, message: plan_pb.PlanConfiguration) -> simulation.ProposedPlan:
    """Return a plan for a simulation. Raises: InvalidValue."""
    rules = rules_of(path, message)
    return simulation.ProposedPlan(
        message.name, message.currency_code or "USD", rules, frozenset(message.organizations)
    )


async def owner_names(
    session: AsyncSession, versions: Collection[ModelPrice]
) -> dict[uuid.UUID, str]:
    """Return the names of the organizations that the price versions belong to."""
    return await organization_names(
        session, (each.organization_id for each in versions if each.organization_id is not None)
    )


def version_message(version: ModelPrice, names: Names) -> price_pb.PriceVersion:
    owner = version.organization_id
    return wire.message_of(
        price_pb.PriceVersion,
        version.prices,
        model=version.model,
        tier=version.tier,
        organization_id=owner,
        organization_name=owner and names[owner],
        multiplier_milli=version.multiplier_milli,
        effective_time=version.effective_at,
        withdrawn=version.withdrawn,
    )


def applied_message(applied: CustomerPrice, names: Names) -> price_pb.AppliedPrice:
    is_own = applied.price.organization_id is not None
    return price_pb.AppliedPrice(
        model=applied.price.model,
        tier=wire.TIER_NUMBERS[applied.tier],
        source=(
            price_pb.AppliedPrice.SOURCE_ORGANIZATION
            if is_own
            else price_pb.AppliedPrice.SOURCE_LIST
        ),
        version=version_message(applied.price, names),
    )


def organization_message(
    organization: Organization, profile: BillingProfile | None
) -> pb.Organization:
    return wire.message_of(
        pb.Organization, organization, organization_id=organization.id, billing_profile=profile
    )


def project_message(project: Project) -> pb.Project:
    return wire.message_of(pb.Project, project, project_id=project.id)


def key_message(key: api_keys.KeyRecord) -> pb.ApiKey:
    return wire.message_of(
        pb.ApiKey,
        key,
        api_key_id=key.id,
        scopes=sorted(key.scopes),
        models=sorted(key.models),
        expire_time=key.expires_at,
        overlap_end_time=key.overlap_ends_at,
        last_use_time=key.last_used_at,
        use_tracked_since_time=key.uses_tracked_since,
        max_input_tokens=key.bounds.max_input_tokens,
        max_output_tokens=key.bounds.max_output_tokens,
    )


async def removed(removal: Awaitable[object], *, allow_missing: bool) -> bool:
    """Await a removal; return whether there was an object to remove.

    Raises: NotFound unless `allow_missing`.
    """
    try:
        await removal
    except NotFound:
        if not allow_missing:
            raise
        return False
    return True


def audit_message(entry: AuditEntry) -> pb.AuditEntry:
    before, after = (json_text(each, sort_keys=True) for each in (entry.before, entry.after))
    return wire.message_of(
        pb.AuditEntry, entry, entry_id=entry.id, before_json=before, after_json=after
    )
