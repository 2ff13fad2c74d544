"""The calls of the admin API about what runs and about whole configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from weir.v1 import configuration_pb2, live_requests_pb2

from weir_client import wire
from weir_client.admin_replicas import AsyncReplicaCalls
from weir_client.live import AppliedConfiguration, KilledRequest, LiveView, RecordedRequest


class AsyncLiveCalls(AsyncReplicaCalls):
    """Part of `AsyncAdminClient`."""

    async def list_live_requests(self, organization: str = "", *, page_size: int = 200, stuck_only: bool = False) -> LiveView:
        """What runs in all processes, of one organization or all. stuck_only: holds that should have ended by themselves."""
        request = live_requests_pb2.ListLiveRequestsRequest(organization=organization, page_size=page_size, stuck_only=stuck_only)
        return wire.read(LiveView, await self._call(self._stub.ListLiveRequests, request))

    async def get_request(self, request_id: str, *, project: str = "") -> RecordedRequest:
        """What is recorded of a request of any project. project: needed where several have one of this id. Raises: NotFound."""
        request = live_requests_pb2.GetRequestRequest(request_id=request_id, project=project)
        return wire.read(RecordedRequest, await self._call(self._stub.GetRequest, request))

    async def kill_request(self, request_id: str, *, project: str = "", reason: str = "") -> KilledRequest:
        """Ends a request wherever it runs; its client is told the reason. Doing it twice changes nothing."""
        request = live_requests_pb2.KillRequestRequest(request_id=request_id, project=project, reason=reason)
        return wire.read(KilledRequest, await self._call(self._stub.KillRequest, request))

    async def end_overdue_holds(self) -> int:
        """Ends the holds whose time is over, as the worker does; tells how many."""
        response = await self._call(self._stub.EndOverdueHolds, live_requests_pb2.EndOverdueHoldsRequest())
        return response.ended_count

    async def apply_configuration(self, configuration: Mapping[str, Any], *, dry_run: bool = False) -> AppliedConfiguration:
        """Makes organizations, projects, keys, limits and prices what the configuration says, all or nothing.

        configuration: JSON mapping of `weir.v1.Configuration`. Raises: google.protobuf.json_format.ParseError if it is none.
        """
        request = configuration_pb2.ApplyConfigurationRequest(dry_run=dry_run)
        ParseDict(dict(configuration), request.configuration)
        # Not tried again by itself: the secrets of new keys are in the first answer only.
        return wire.read(AppliedConfiguration, await self._call(self._stub.ApplyConfiguration, request, idempotent=False))

    async def export_configuration(self, organization: str = "") -> dict[str, Any]:
        """The present state as a configuration, of one organization or all."""
        request = configuration_pb2.ExportConfigurationRequest(organization=organization)
        response = await self._call(self._stub.ExportConfiguration, request)
        exported: dict[str, Any] = MessageToDict(response.configuration, preserving_proto_field_name=True)
        return exported
