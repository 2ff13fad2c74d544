"""The audit log."""

from __future__ import annotations

from weir.v1 import admin_service_pb2 as pb

from api.access.servicer import AuthenticatedServicer
from api.admin.configuration_messages import json_text
from api.core import wire
from api.core.interceptor import Context
from metering.core import audit
from metering.core.models import AuditEntry
from metering.tenants.tenants import subject_ids


class AuditCalls(AuthenticatedServicer):
    """Calls on the audit log."""

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


def audit_message(entry: AuditEntry) -> pb.AuditEntry:
    before, after = (json_text(each, sort_keys=True) for each in (entry.before, entry.after))
    return wire.message_of(
        pb.AuditEntry, entry, entry_id=entry.id, before_json=before, after_json=after
    )
