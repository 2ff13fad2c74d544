"""Applying and exporting configurations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from weir.v1 import configuration_pb2

from api.access.servicer import AuthenticatedServicer
from api.admin.configuration_messages import Parsing, answer_of, configuration_message
from api.core.interceptor import Context
from inference.routing.router import Router
from metering.configuration.configuration import (
    VIOLATION_COUNT_MAX,
    apply_configuration,
    present_state,
)
from metering.invoicing.documents import check_shown
from metering.invoicing.invoice_document import Issuer
from metering.tenants.tenants import Principal

InThread = Callable[[Principal, int, Callable[[], Any]], Awaitable[Any]]


async def at_once(principal: Principal, size: int, call: Callable[[], Any]) -> Any:
    """Run the call on the event loop."""
    return call()


class ConfigurationCalls(AuthenticatedServicer):
    """Calls on configurations."""

    _router: Router
    _issuer: Issuer
    _in_thread: InThread

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
