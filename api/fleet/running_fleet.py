"""Fleet that a process serves, and its change to another one while requests run.

A change is prepared beside what runs, then installed in one turn of the event loop, so a request is
routed by the fleet before it or by the fleet after it. Replicas that both have go on as they are. A
version whose engine settings differ gets new engines, which are loaded before the old ones lose
their requests if memory allows. Backends that left take no new requests, end those that they have,
and are closed. A fleet that this process cannot build or start is reported, tried again, and
changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from api.core.settings import Settings, bundled_encoders, bundled_models
from api.fleet.fleet import FleetBuilder, Part, Serving, fleet_of_settings
from api.fleet.fleet_document import document_of
from api.fleet.fleet_file import Fleet, FleetInvalid, parse_document
from api.fleet.launching import Launching
from api.fleet.target_names import INTERVAL_S, TargetNames
from common.incidents import Retries
from common.settings import SettingInvalid
from inference.engine import Backend, EngineState
from inference.errors import CheckpointInvalid, EngineError
from inference.routing.router import Router
from inference.text.tokenizer import Tokenizer
from inference.workers.process import WorkerOpener
from metering.control.fleet_versions import SYSTEM, StoredFleet, add_version, lock_newest
from metering.core.errors import DatabaseUnavailable
from metering.store.db import Sessions

RETRY_S = 30.0  # before a fleet that could not be served is tried again
UNUSED_POLL_S = 0.1  # seconds between checks of whether a backend that left has requests
KEYS_FOLDER = "keys"  # of WEIR_HOME: files with keys that a document may name
NOT_BUILT_BY = (SettingInvalid, CheckpointInvalid, EngineError, OSError, ValueError)

log = structlog.get_logger(__name__)


class Requests(Protocol):
    """Requests of this process, which use the backends."""

    def fleet_changed(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        """Follow the router, which has another fleet; tokenizers are by served name."""

    def uses(self, backend: Backend) -> bool:
        """Return whether a running request has been routed to a backend."""

    def forget(self, backend: Backend) -> None:
        """Remove what belongs to a backend that left and is not used any more."""


class Superseded(Exception):
    """A newer version of the fleet was stored while this one was being prepared."""


class RunningFleet:
    """Models and engines of this process, which follow the stored versions of the fleet."""

    _tasks: asyncio.TaskGroup
    _requests: Requests
    _sessions: Sessions
    _launching: Launching

    def __init__(
        self, settings: Settings, opener: WorkerOpener, stored: StoredFleet | None = None
    ) -> None:
        """Build the stored fleet, or without one that of the settings. Starts no engine.

        Raises: SettingInvalid, CheckpointInvalid.
        """
        self._settings = settings
        self._builder = FleetBuilder(settings, opener)
        self._number, self._fault = 0, ""
        self._newest = stored  # the last version that is known
        self._is_none_stored = False
        self._changed = asyncio.Event()
        self.names = TargetNames()
        self._preparing: Collection[Part] = ()  # new parts, before they are installed
        self._leaving: set[Part] = set()
        self._changing = asyncio.Lock()  # held while the fleet or an address changes
        self._is_closing = False
        self._retries = Retries("fleet")
        if stored is None:
            fleet, is_plain = fleet_of_settings(settings)
            self.serving = self._builder.build(fleet, is_plain=is_plain)
        else:
            self.serving = self._builder.build(parsed(stored))
            self._number = stored.number
            self._compare_settings(stored)
        self._builder.use(self.serving)
        serving = self.serving
        self.router = Router(serving.engines, serving.encoders, serving.catalog)

    @property
    def state(self) -> tuple[int, str]:
        """Implement `metering.control.control_channel.Fleet.state`."""
        return self._number, self._fault

    def follow(self, stored: StoredFleet | None) -> None:
        """Implement `metering.control.control_channel.Fleet.follow`."""
        if stored is None:
            self._is_none_stored = True
        elif stored.number > self._number:
            self._newest, self._fault = stored, ""  # a fault was that of an older version
        else:
            return
        self._changed.set()

    def begin(
        self,
        tasks: asyncio.TaskGroup,
        requests: Requests,
        sessions: Sessions,
        launching: Launching,
    ) -> None:
        """Serve all engines as tasks, and load the models that do not start on demand."""
        self._tasks, self._requests, self._sessions = tasks, requests, sessions
        self._launching = launching
        self.names.begin(tasks)
        launching.become(self.serving.launched, self.serving.fleet.pools)
        for part in self.serving.parts.values():
            self._serve(part)
            if not part.backend.condition().starts_on_demand:
                self._start(part)

    async def run(self) -> None:
        """Follow the stored versions until cancelled."""
        while True:
            retry_s = RETRY_S if self._fault else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await self._changed.wait()
            self._changed.clear()
            if self._is_none_stored:
                await self._store_file()
            async with self._changing:
                if self._newest is not None and self._newest.number > self._number:
                    await self._change_to(self._newest)

    async def follow_names(self) -> None:
        """Follow the addresses of the targets' names until cancelled."""
        while True:
            async with self._changing:
                if await self.names.poll(self.serving.fleet):
                    await self._change_addresses()
            await self.names.wait(INTERVAL_S)

    async def settings_fleet(self) -> Fleet:
        """Read the fleet of this process's settings. Raises: SettingInvalid."""
        fleet, _ = await asyncio.to_thread(fleet_of_settings, self._settings)
        return fleet

    async def check(self, fleet: Fleet, *, is_own: bool = False) -> None:
        """Check whether this process could serve a fleet, without starting anything.

        `is_own` says that it is the fleet of the settings, which may name any key file.

        Raises: SettingInvalid, CheckpointInvalid, and other errors of `NOT_BUILT_BY`.
        """
        known = {path for path in key_files(self.serving.fleet) if path is not None}
        known |= set(self._settings.remote.key_files.values())
        if not is_own:
            check_key_files(fleet, known, self._settings.home.absolute() / KEYS_FOLDER)
            check_launchers(fleet, self.serving.fleet)
        await self._built(fleet)

    async def close(self) -> None:
        """Close all engines, those that are about to leave included."""
        self._is_closing = True
        self.names.close()
        for part in (*self.serving.parts.values(), *self._preparing, *self._leaving):
            await part.backend.close()

    async def _store_file(self) -> None:
        """Store the file of the settings as the first version, unless there is one by now."""
        self._is_none_stored = False
        if not self._settings.models.fleet_file:
            return
        document = document_of(self.serving.fleet)
        try:
            async with self._sessions.begin() as session:
                if await lock_newest(session) is None:
                    reason = f"first version, from {Path(self._settings.models.fleet_file).name}"
                    await add_version(
                        session, document=document, newest=None, reason=reason, actor=SYSTEM
                    )
        except DatabaseUnavailable as away:
            log.warning("fleet_not_stored", cause=str(away))
            self._is_none_stored = True
            self._fault = self._fault or "the file of WEIR_FLEET is not stored yet"

    async def _change_to(self, stored: StoredFleet) -> None:
        """Serve a stored version; otherwise report why not, and serve what was served before."""
        fresh: list[Part] = []
        try:
            fleet = await asyncio.to_thread(parsed, stored)
            await self.names.poll(fleet)
            serving = await self._built(fleet)
            fresh = [each for name, each in serving.parts.items() if self._is_new(name, each)]
            if self._is_closing:
                return
            self._preparing = fresh
            replacing = [part for part in fresh if part.terms.served in self.serving.parts]
            loaded = await self._load(replacing)
        except Superseded:
            await self._discard(fresh)
        except NOT_BUILT_BY as error:
            await self._discard(fresh)
            self._report(stored, str(error))
        except Exception as error:
            await self._discard(fresh)
            self._report(stored, f"unexpected error, incident {self._retries.failed(error)}")
        else:
            if not self._is_closing:
                self._install(stored.number, serving, fresh, loaded)
                self._preparing = ()

    async def _built(self, fleet: Fleet, *, is_plain: bool = False) -> Serving:
        """Build what a fleet needs beside what runs."""
        build = partial(self._builder.build, is_plain=is_plain)
        return await asyncio.to_thread(build, fleet, self.serving, self.names.addresses)

    async def _change_addresses(self) -> None:
        """Serve the same fleet with the present addresses of its targets."""
        is_plain = any(part.terms.is_plain for part in self.serving.parts.values())
        try:
            serving = await self._built(self.serving.fleet, is_plain=is_plain)
        except NOT_BUILT_BY as error:
            log.error("target_addresses_not_served", cause=str(error))
            return
        if not self._is_closing:
            self._install(self._number, serving, ())

    def _report(self, stored: StoredFleet, fault: str) -> None:
        if fault != self._fault:
            log.error("fleet_not_served", version=stored.number, served=self._number, cause=fault)
        self._fault = fault

    def _is_new(self, served: str, part: Part) -> bool:
        present = self.serving.parts.get(served)
        return present is None or present.backend is not part.backend

    async def _load(self, replacing: Collection[Part]) -> Collection[Part]:
        """Load new engines beside those that they replace, if memory allows; return their parts.

        Without the memory, they wait for it when the old ones have left. Raises the first error of
        a start, or Superseded.
        """
        waited_for = [
            part
            for part in replacing
            if part.terms.warm_count
            and part.terms.launched is None  # its servers start when the present ones have ended
            and self.serving.parts[part.terms.served].backend.healthy()
        ]
        needed = [
            managed
            for part in waited_for
            for managed, is_pinned in part.terms.managed()
            if is_pinned
        ]
        if not waited_for or not self._builder.budget.fit_now(needed):
            return ()
        for part in waited_for:
            self._serve(part)
        try:
            async with asyncio.TaskGroup() as tasks:
                newer = tasks.create_task(self._until_superseded(), name="newer fleet")
                loading = [
                    tasks.create_task(part.backend.start(), name=f"start {part.terms.served}")
                    for part in waited_for
                ]
                await asyncio.wait(loading)
                newer.cancel()
        except BaseExceptionGroup as errors:
            first = errors
            while isinstance(first, BaseExceptionGroup):
                [first, *_] = first.exceptions
            raise first from None
        return waited_for

    async def _until_superseded(self) -> None:
        await self._changed.wait()
        raise Superseded

    async def _discard(self, fresh: Collection[Part]) -> None:
        """Close engines that were prepared and will not be used."""
        for part in fresh:
            await part.backend.close()
        self._preparing = ()

    def _install(
        self,
        number: int,
        serving: Serving,
        fresh: Collection[Part],
        loaded: Collection[Part] = (),
    ) -> None:
        """Serve another fleet from now on. Nothing awaits between here and the end."""
        before, self.serving = self.serving, serving
        for served, part in serving.parts.items():
            if served in before.parts and part in fresh:
                part.backend.drain(before.parts[served].backend.drained)
            elif part not in fresh:
                part.adjust()
        self._builder.use(serving)
        self.router.become(serving.engines, serving.encoders, serving.catalog)
        self._requests.fleet_changed(serving.tokenizers)
        self._launching.become(serving.launched, serving.fleet.pools)
        if number != self._number:
            self._number, self._fault = number, ""
        for part in fresh:
            if part in loaded:
                continue
            self._serve(part)
            if not part.backend.condition().starts_on_demand:
                self._start(part)
        left = [
            part
            for served, part in before.parts.items()
            if served not in serving.parts or serving.parts[served].backend is not part.backend
        ]
        for part in left:
            self._leaving.add(part)
            self._tasks.create_task(self._leave(part), name=f"end of {part.terms.served}")
        log.info("fleet_changed", version=number, added=len(fresh), removed=len(left))

    async def _leave(self, part: Part) -> None:
        """Close a backend when its last request has ended."""
        while self._requests.uses(part.backend) and not self._is_closing:  # noqa: ASYNC110
            await asyncio.sleep(UNUSED_POLL_S)
        await part.backend.close()
        self._requests.forget(part.backend)
        self._leaving.discard(part)

    def _serve(self, part: Part) -> None:
        self._tasks.create_task(part.backend.serve(), name=f"engine {part.terms.served}")

    def _start(self, part: Part) -> None:
        name = f"engine start {part.terms.served}"
        self._tasks.create_task(start_engine(part.backend), name=name)

    def _compare_settings(self, stored: StoredFleet) -> None:
        """Log a warning if the settings name another fleet than the stored one, which counts."""
        models, remote = self._settings.models, self._settings.remote
        remedy = (
            f"version {stored.number} of the database is served: compare with `weir fleet diff`,"
            " make the settings the next version with `weir fleet apply`, or remove them"
        )
        if models.fleet_file:
            try:
                fleet, _ = fleet_of_settings(self._settings)
                cause = "" if document_of(fleet) == stored.document else "the file differs"
            except SettingInvalid as error:
                cause = str(error)
            if cause:
                log.warning("fleet_file_not_used", cause=cause, remedy=remedy)
            return
        has_encoders = models.encoders and dict(models.encoders) != bundled_encoders()
        is_named = dict(models.directories) != bundled_models() or has_encoders
        if is_named or remote.targets or remote.encoders:
            log.warning("models_of_settings_not_used", remedy=remedy)


async def start_engine(engine: Backend) -> None:
    """Load a model before its first request. A failure is logged; requests then get the error."""
    try:
        await engine.start()
    except EngineError as error:
        if engine.condition().state is not EngineState.CLOSED:
            log.error("engine_start_failed", model=engine.model.name, cause=str(error))


def parsed(stored: StoredFleet) -> Fleet:
    """Parse a stored version. Raises: SettingInvalid."""
    try:
        return parse_document(stored.document, None)
    except FleetInvalid as error:  # of a version of Weir that knew other keys
        raise SettingInvalid(f"version {stored.number} of the fleet: {error}") from error


def key_files(fleet: Fleet) -> list[Path | None]:
    """List the files with credentials that a fleet's targets name."""
    versions = [version for model in fleet.models for version in model.versions]
    targets = [target for version in versions for target in version.targets]
    return [target.key_file for target in targets] + [
        target.slices.kubeconfig for target in targets if target.slices is not None
    ]


def check_launchers(fleet: Fleet, present: Fleet) -> None:
    """Check that a fleet of a call has no launchers but those of the present one.

    They run commands on the machine of the server, which a key of Weir's does not allow. Raises:
    SettingInvalid.
    """
    known = [each.launcher for model in present.models for each in model.versions]
    for model in fleet.models:
        for version in model.versions:
            if version.launcher is not None and version.launcher not in known:
                raise SettingInvalid(
                    f"{model.name!r} has a launcher that the present fleet does not have: write it"
                    " into the file of WEIR_FLEET on the server, and apply that"
                )


def check_key_files(fleet: Fleet, known: Collection[Path], folder: Path) -> None:
    """Check that the key files are known, or in the folder for keys: a call names them.

    Otherwise an administrator could send any file of the machine to a server. Raises:
    SettingInvalid.
    """
    folder = folder.resolve()
    for path in key_files(fleet):
        if path is not None and path not in known and folder not in path.resolve().parents:
            raise SettingInvalid(
                f"key_file or kubeconfig {str(path)!r} must be in {folder}, or be named by the"
                " present fleet"
            )
