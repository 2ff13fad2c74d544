"""The calls of `AdminService` about what runs: look at it, end it, and end what was left behind."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import live_requests_pb2 as pb

from api.access.auth import Authenticator
from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.accounts import find_generation
from api.core.interceptor import Context
from metering.control import live
from metering.control.stop_orders import order_end_of_request
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import Hold, HoldState, Organization, Project
from metering.holds.recovery import sweep_expired_holds
from metering.receipts.signing import Signer
from metering.store.db import Sessions
from metering.tenants import tenants

REASON_CHARS_MAX = 200
PAGE_SIZE = 200
END_WAIT_S = 2.0  # a process that is well ends a request within some milliseconds
END_POLL_S = 0.005

PHASES = {
    "": pb.REQUEST_PHASE_UNSPECIFIED,
    "preparing": pb.REQUEST_PHASE_PREPARING,
    "queued": pb.REQUEST_PHASE_QUEUED,
    "loading": pb.REQUEST_PHASE_LOADING,
    "prefill": pb.REQUEST_PHASE_PREFILL,
    "decode": pb.REQUEST_PHASE_DECODE,
    "ending": pb.REQUEST_PHASE_ENDING,
}


class LiveCalls(AdminCalls, pb_grpc.AdminServiceServicer):
    """See `proto/weir/v1/live_requests.proto`."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions, database_url: str, signer: Signer | None = None) -> None:
        super().__init__(authenticator, sessions)
        self._database_url = database_url
        self._signer = signer

    async def ListLiveRequests(self, request: pb.ListLiveRequestsRequest, context: Context) -> pb.ListLiveRequestsResponse:
        """Lists what runs."""
        await self._caller(context)
        async with self._sessions() as session:
            organization = await tenants.find_organization(session, request.organization) if request.organization else None
        view = await live.live_view(
            self._sessions,
            organization_id=organization.id if organization else None,
            page_size=request.page_size or PAGE_SIZE,
            stuck_only=request.stuck_only,
        )
        return pb.ListLiveRequestsResponse(
            requests=map(live_request_message, view.requests),
            organizations=map(load_message, view.organizations),
            request_count=view.request_count,
            silent_owner_ids=map(str, view.silent_owner_ids),
        )

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:
        """Looks up a request of any project."""
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        async with self._sessions() as session:
            project_id = (await tenants.find_project(session, request.project)).id if request.project else None
            owner = await self._owner(session, request_id, project_id)
            return pb.GetRequestResponse(
                generation=await find_generation(session, owner.project_id, request_id),
                organization_name=owner.organization_name,
                project_name=owner.project_name,
                api_key_prefix=owner.api_key_prefix,
            )

    async def _owner(self, session: AsyncSession, request_id: uuid.UUID, project_id: uuid.UUID | None) -> live.RequestOwner:
        """Whose request it is. Raises: NotFound; InvalidValue if several projects have one of this id."""
        owners = await live.find_request_owners(session, request_id, project_id)
        if not owners:
            raise NotFound("request", str(request_id))
        if len(owners) > 1:
            names = ", ".join(sorted(f"{each.organization_name}/{each.project_name}" for each in owners))
            raise InvalidValue("project", f"several projects have a request of this id, say which: {names}")
        return owners[0]

    async def KillRequest(self, request: pb.KillRequestRequest, context: Context) -> pb.KillRequestResponse:
        """Ends a request wherever it runs."""
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        if len(request.reason) > REASON_CHARS_MAX or not request.reason.isprintable():
            raise InvalidValue("reason", f"give at most {REASON_CHARS_MAX} printable characters")
        place, had_ended = await self._place(request_id, request.project)
        if had_ended:
            return await self._killed(pb.KillRequestResponse.RESULT_HAD_ENDED, request_id, place)
        async with self._transaction(context) as (session, actor):
            await record_kill(session, actor, request_id, place, request.reason)
            await order_end_of_request(session, project_id=place.project_id, request_id=request_id, reason=request.reason)
        ended = await self._wait_for_end(request_id, place)
        result = pb.KillRequestResponse.RESULT_ENDED if ended else pb.KillRequestResponse.RESULT_PENDING
        return await self._killed(result, request_id, place)

    async def EndOverdueHolds(self, request: pb.EndOverdueHoldsRequest, context: Context) -> pb.EndOverdueHoldsResponse:
        """Does what the worker's sweep does."""
        await self._caller(context)
        ended_count = await sweep_expired_holds(self._database_url, signer=self._signer)
        if ended_count:
            async with self._transaction(context) as (session, actor):
                after = {"ended_count": ended_count}
                await record_change(session, actor=actor, action="holds.end_overdue", subject_id="", before=None, after=after)
        return pb.EndOverdueHoldsResponse(ended_count=ended_count)

    async def _place(self, request_id: uuid.UUID, project: str) -> tuple[live.Place, bool]:
        """Where a request is, and whether it had ended. Raises: NotFound; InvalidValue if it runs in several projects."""
        async with self._sessions() as session:
            project_id = (await tenants.find_project(session, project)).id if project else None
            places = await live.find_places(session, request_id, project_id)
        running = [place for place in places if place.is_held] or await live.find_waiting(self._sessions, request_id, project_id)
        found = running or places
        if not found:
            raise NotFound("request", str(request_id))
        if len(found) > 1:
            async with self._sessions() as session:
                names = await project_names(session, [place.project_id for place in found])
            raise InvalidValue("project", f"several projects know a request of this id, say which: {', '.join(names)}")
        return found[0], not running

    async def _wait_for_end(self, request_id: uuid.UUID, place: live.Place) -> bool:
        """Wait until a request has ended; False if its process does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                while await self._runs(request_id, place):  # noqa: ASYNC110  # it runs in another process
                    await asyncio.sleep(END_POLL_S)
                return True
        return False

    async def _runs(self, request_id: uuid.UUID, place: live.Place) -> bool:
        if not place.is_held and await live.find_waiting(self._sessions, request_id, place.project_id):
            return True
        async with self._sessions() as session:  # what waited may have got its hold in the meantime
            return any(found.is_held for found in await live.find_places(session, request_id, place.project_id))

    async def _killed(
        self, result: pb.KillRequestResponse.Result.ValueType, request_id: uuid.UUID, place: live.Place
    ) -> pb.KillRequestResponse:
        answer = pb.KillRequestResponse(result=result)
        with contextlib.suppress(NotFound):
            async with self._sessions() as session:
                answer.generation.CopyFrom(await find_generation(session, place.project_id, request_id))
                if result == pb.KillRequestResponse.RESULT_PENDING and (hold := await held(session, place.project_id, request_id)):
                    answer.expire_time.FromDatetime(hold.expires_at)
        return answer


async def held(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> Hold | None:
    """The hold of a request that runs."""
    query = select(Hold).where(Hold.project_id == project_id, Hold.request_id == request_id, Hold.state == HoldState.HELD)
    found: Hold | None = await session.scalar(query)
    return found


async def record_kill(session: AsyncSession, actor: str, request_id: uuid.UUID, place: live.Place, reason: str) -> None:
    """Write into the audit log who ends what."""
    hold = await held(session, place.project_id, request_id)
    before: dict[str, object] = {"project_id": str(place.project_id), "state": "waiting"}
    if hold is not None:
        before |= {"organization_id": str(hold.organization_id), "api_key_id": str(hold.api_key_id), "model": hold.model}
        before |= {"state": hold.state, "delivered_token_count": hold.delivered_token_count}
    after = before | {"state": "ordered to end", "reason": reason}
    await record_change(session, actor=actor, action="request.kill", subject_id=str(request_id), before=before, after=after)


async def project_names(session: AsyncSession, project_ids: Sequence[uuid.UUID]) -> list[str]:
    """As "organization/project", in order."""
    names = select(Organization.name + "/" + Project.name).select_from(Project).join(Organization)
    return sorted(await session.scalars(names.where(Project.id.in_(project_ids))))


def live_request_message(row: live.LiveRequestRow) -> pb.LiveRequest:
    """One request."""
    return pb.LiveRequest(
        request_id=str(row.request_id),
        organization_id=str(row.organization_id),
        organization_name=row.organization_name,
        project_id=str(row.project_id),
        project_name=row.project_name,
        api_key_id=str(row.api_key_id),
        api_key_prefix=row.api_key_prefix,
        model=row.model,
        phase=PHASES[row.phase],
        age=wire.duration(max(row.age_s, 0.0)),
        input_token_count=row.input_token_count,
        cached_input_token_count=row.cached_input_token_count,
        delivered_token_count=row.delivered_token_count,
        tokens_per_second=row.tokens_per_second,
        leased_token_count=row.leased_token_count,
        admit_time=wire.timestamp(row.admitted_at),
        expire_time=wire.timestamp(row.expires_at),
        owner_id=str(row.owner_id),
        owner_name=row.owner_name,
    )


def load_message(load: live.OrganizationLoad) -> pb.LiveOrganization:
    """All that runs for one organization."""
    return pb.LiveOrganization(
        organization_id=str(load.organization_id),
        name=load.name,
        request_count=load.request_count,
        hold_count=load.hold_count,
        held_token_count=load.held_token_count,
        tokens_per_second=load.tokens_per_second,
    )
