"""Which exporter the settings ask for, and one run of the whole stage."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from metering.batches import form_batches
from metering.db import Sessions
from metering.deliveries import deliver_pending
from metering.export_settings import Destination, ExportSettings, export_settings
from metering.exporting import Exporter
from metering.file_exporter import FileExporter

log = logging.getLogger(__name__)


def make_exporter(settings: ExportSettings) -> Exporter | None:
    """The exporter; None where nothing is exported."""
    if settings.destination is Destination.OFF:
        return None
    if settings.destination is Destination.FILE:
        return FileExporter(settings.file)
    # Imported here: it takes a second, and only those who bill with Stripe have to wait for it.
    from metering.stripe_gateway import StripeGateway

    assert settings.stripe is not None
    return StripeGateway(settings.stripe)


async def export_usage(sessions: Sessions, environment: Mapping[str, str]) -> None:
    """Make the batches of hours that are over, and hand over what waits. Does nothing where the export is off."""
    exporter = make_exporter(export_settings(environment))
    if exporter is None:
        return
    await form_batches(sessions)
    await deliver_pending(sessions, exporter)
