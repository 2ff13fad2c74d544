"""One run of the stage posted → exported, to wherever the settings say."""

from __future__ import annotations

from collections.abc import Mapping

from metering.export.batches import form_batches
from metering.export.deliveries import deliver_pending
from metering.export.export_settings import Destination, export_settings
from metering.export.file_exporter import FileExporter
from metering.store.db import Sessions


async def export_usage(sessions: Sessions, environment: Mapping[str, str]) -> None:
    """Make the batches of hours that are over, hand over what waits, and handle what Stripe told. Nothing where the export is off.

    Raises: InvalidValue naming a setting.
    """
    settings = export_settings(environment)
    if settings.destination is Destination.OFF:
        return
    await form_batches(sessions)
    if settings.stripe is None:
        await deliver_pending(sessions, FileExporter(settings.file))
        return
    # Imported here: it takes a second, and only those who bill with Stripe have to wait for it.
    from metering.export.late_items import invoice_late_usage
    from metering.export.month_items import settle_months
    from metering.export.stripe_gateway import StripeGateway
    from metering.export.stripe_inbox import handle_events

    gateway = StripeGateway(settings.stripe)
    await deliver_pending(sessions, gateway)
    await handle_events(sessions, gateway)
    await invoice_late_usage(sessions, gateway)
    await settle_months(sessions, gateway)
