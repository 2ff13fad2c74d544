"""Running requests and overdue holds: list, look up, end."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import live_requests_pb2 as live_pb

from api.access.servicer import AuthenticatedServicer
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import find_generation
from metering.control import live
from metering.control.live import LiveRow, cancel_request
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, NotFound
from metering.holds.recovery import sweep_expired_holds
from metering.receipts.signing import Signer
from metering.tenants import tenants

REASON_CHARS_MAX = 200
PAGE_SIZE = 200
END_WAIT_S = 2.0  # a healthy process ends a request within milliseconds
END_POLL_S = 0.005


class LiveCalls(AuthenticatedServicer):
    """Calls on running requests."""

    _database_url: str
    _signer: Signer | None

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

    async def _place(self, request_id: uuid.UUID, project: str) -> tuple[live.Place, bool]:
        """Return the place of a request and whether it has ended.

        Raises: NotFound; InvalidValue if it runs in several projects.
        """
        async with self._sessions() as session:
            project_id = (await tenants.find_project(session, project)).id if project else None
            places = await live.find_places(session, request_id, project_id)
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

    async def _wait_for_end(self, request_id: uuid.UUID, place: live.Place) -> bool:
        """Wait until a request has ended; return False if it has not within `END_WAIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                # It may run in another process, so there is no event to wait for.
                while await self._runs(request_id, place):  # noqa: ASYNC110
                    await asyncio.sleep(END_POLL_S)
                return True
        return False

    async def _runs(self, request_id: uuid.UUID, place: live.Place) -> bool:
        if not place.is_held and await live.find_waiting(
            self._sessions, request_id, place.project_id
        ):
            return True
        async with self._sessions() as session:  # a waiting request may have a hold by now
            return any(
                held.is_held
                for held in await live.find_places(session, request_id, place.project_id)
            )

    async def _killed(
        self,
        result: live_pb.KillRequestResponse.Result.ValueType,
        request_id: uuid.UUID,
        place: live.Place,
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


async def record_kill(
    session: AsyncSession, actor: str, request_id: uuid.UUID, place: live.Place, reason: str
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
