"""RPCs that show and replace the fleet, and the conversion of its versions to messages."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.v1 import fleet_pb2 as pb

from api.access.servicer import AuthenticatedServicer, CallerTransaction, once
from api.admin.configuration_calls import InThread, json_text
from api.core import wire
from api.core.interceptor import Context
from api.fleet.fleet_document import FleetChange, changes_between, document_of
from api.fleet.fleet_file import Fleet, FleetInvalid, parse_document
from api.fleet.running_fleet import NOT_BUILT_BY, RunningFleet
from common.settings import SettingInvalid
from metering.control import fleet_versions
from metering.control.fleet_versions import FleetRecord, digest_of
from metering.core.errors import InvalidValue


class FleetCalls(AuthenticatedServicer):
    """RPCs for the fleet."""

    _fleet: RunningFleet
    _in_thread: InThread

    async def GetFleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        await self._caller(context)
        async with self._sessions() as session:
            record = await fleet_versions.find_version(session, request.number)
        if record is None:
            document = document_of(await self._settings_fleet())
            version = pb.FleetVersion(document=document, digest=digest_of(document))
        else:
            version = version_message(record)
        if request.number:
            return pb.GetFleetResponse(version=version)
        served = await fleet_versions.fleet_processes(self._sessions)
        return pb.GetFleetResponse(
            version=version,
            processes=[wire.message_of(pb.FleetProcess, each) for each in served.processes],
            unresponsive_process_ids=map(str, served.unresponsive_process_ids),
        )

    async def ApplyFleet(
        self, request: pb.ApplyFleetRequest, context: Context
    ) -> pb.ApplyFleetResponse:
        """Check the document without a transaction, since that may take seconds; then add it."""
        caller = await self._caller(context)
        try:
            if request.from_settings:
                if request.document:
                    raise InvalidValue("document", "must be empty with `from_settings`")
                fleet = await self._fleet.settings_fleet()
                await self._fleet.check(fleet, is_own=True)
            else:
                read = functools.partial(parse_document, request.document, base_of(request))
                fleet = await self._in_thread(caller, request.ByteSize(), read)
                await self._fleet.check(fleet)
        except FleetInvalid as invalid:
            found = [wire.message_of(pb.FleetViolation, each) for each in invalid.errors]
            return pb.ApplyFleetResponse(violations=found)
        except NOT_BUILT_BY as error:
            if isinstance(error, InvalidValue):
                raise
            found = [pb.FleetViolation(message=str(error))]
            return pb.ApplyFleetResponse(violations=found)
        add = functools.partial(add_fleet, fleet=fleet)
        if request.dry_run:
            async with self._acting(context) as acting:
                return (await add(self, request, acting, ""))[1]
        return await once(add)(self, request, context)

    async def _settings_fleet(self) -> Fleet:
        try:
            return await self._fleet.settings_fleet()
        except SettingInvalid as error:
            raise InvalidValue("number", f"no version is stored, and: {error}") from error

    async def changes_to(self, fleet: Fleet, present: FleetRecord | None) -> list[FleetChange]:
        """List the changes from a version; without one, from the fleet of the settings."""
        if present is None:
            return await asyncio.to_thread(changes_between, await self._settings_fleet(), fleet)
        return await asyncio.to_thread(changes_from, present.document, fleet)


async def add_fleet(
    calls: FleetCalls,
    request: pb.ApplyFleetRequest,
    acting: CallerTransaction,
    earlier: str,
    *,
    fleet: Fleet,
) -> tuple[object, pb.ApplyFleetResponse]:
    """Add a version with this fleet, unless it changes nothing or is a dry run."""
    session = acting.session
    if earlier:
        added = await fleet_versions.find_version(session, int(earlier))
        return earlier, pb.ApplyFleetResponse(version=version_message(added, with_text=False))
    newest = await fleet_versions.lock_newest(session)
    number = newest.number if newest else 0
    if request.HasField("expected_number") and request.expected_number != number:
        raise InvalidValue(
            "expected_number",
            f"version {number} is in force, not {request.expected_number}: compare with it, then"
            " apply again",
        )
    changes = await calls.changes_to(fleet, newest)
    response = pb.ApplyFleetResponse(changes=map(change_message, changes))
    if request.dry_run or (newest is not None and not changes):
        if newest is not None:
            response.version.CopyFrom(version_message(newest, with_text=False))
        return "" if newest is None else number, response
    added = await fleet_versions.add_version(
        session,
        document=await asyncio.to_thread(document_of, fleet),
        newest=newest,
        reason=request.reason,
        actor=acting.actor,
        changes=logged(changes),
    )
    response.version.CopyFrom(version_message(added, with_text=False))
    return added.number, response


def changes_from(document: str, fleet: Fleet) -> list[FleetChange]:
    return changes_between(parse_document(document, None), fleet)


def base_of(request: pb.ApplyFleetRequest) -> Path | None:
    """Read the path at which relative paths of the document start. Raises: InvalidValue."""
    if not request.base_directory:
        return None
    base = Path(request.base_directory)
    if not base.is_absolute() or "\0" in request.base_directory:
        raise InvalidValue("base_directory", "must be an absolute path, such as /etc/weir")
    return base


def version_message(version: Any, *, with_text: bool = True) -> pb.FleetVersion:
    """Convert a version, or a row of a list of versions."""
    message = wire.message_of(pb.FleetVersion, version, create_time=version.created_at)
    if not with_text:
        message.ClearField("document")
    return message


def change_message(change: FleetChange) -> pb.FleetChange:
    return pb.FleetChange(
        path=change.path,
        before_json=json_text(change.before, ensure_ascii=False),
        after_json=json_text(change.after, ensure_ascii=False),
    )


def logged(changes: Sequence[FleetChange]) -> list[dict[str, Any]]:
    """Convert changes for the audit log."""
    return [{"path": each.path, "before": each.before, "after": each.after} for each in changes]
