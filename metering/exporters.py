"""One run of the stage posted → exported, to wherever the settings say."""

from __future__ import annotations

from collections.abc import Mapping

from metering.batches import form_batches
from metering.db import Sessions
from metering.deliveries import deliver_pending
from metering.export_settings import Destination, export_settings
from metering.file_exporter import FileExporter


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
    from metering.stripe_gateway import StripeGateway
    from metering.stripe_inbox import handle_events

    gateway = StripeGateway(settings.stripe)
    await deliver_pending(sessions, gateway)
    await handle_events(sessions, gateway)
