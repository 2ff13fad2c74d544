"""The calls of `AdminService` that take and give the whole configuration as one document."""

from __future__ import annotations

from weir.v1 import configuration_pb2 as pb

from api.admin.admin_calls import AdminCalls
from api.admin.configuration_wire import Parsing, applied_message, configuration_message, mistaken_message
from api.core.interceptor import Context
from inference.routing.router import Router
from metering.configuration.applying import apply_configuration, present_state


class ConfigurationCalls(AdminCalls):
    """See `proto/weir/v1/configuration.proto`."""

    _router: Router

    async def ApplyConfiguration(self, request: pb.ApplyConfigurationRequest, context: Context) -> pb.ApplyConfigurationResponse:
        """Makes what is into what should be; a dry run does the same and undoes it."""
        async with self._acting(context, alone=True) as acting:
            parsing = Parsing()
            wanted = parsing.configuration(request.configuration)
            work = await apply_configuration(
                acting.session,
                wanted,
                actor=acting.actor,
                own_key_id=acting.principal.api_key_id,
                own_address=acting.principal.address,
                models=[model.name for model in self._router.models()],
                dry_run=request.dry_run or bool(parsing.mistakes),
            )
            if mistakes := [*parsing.mistakes, *work.mistakes]:
                await acting.session.rollback()
                return mistaken_message(mistakes)
            if request.dry_run:
                await acting.session.rollback()
            return applied_message(work, secrets=not request.dry_run)

    async def ExportConfiguration(self, request: pb.ExportConfigurationRequest, context: Context) -> pb.ExportConfigurationResponse:
        """Tells what is."""
        async with self._acting(context, alone=True) as acting:
            present = await present_state(acting.session, organization=request.organization or None)
            return pb.ExportConfigurationResponse(configuration=configuration_message(present))
