"""One run of the stage posted → exported, to wherever the settings say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from common.incidents import Retries
from metering.errors import StoreAway
from metering.export.batches import form_batches
from metering.export.deliveries import deliver_pending
from metering.export.export_settings import Destination, export_settings
from metering.export.file_exporter import FileExporter
from metering.store.db import Sessions

retries = Retries("usage_export", passing=(StoreAway,))  # by stage


async def export_usage(sessions: Sessions, environment: Mapping[str, str]) -> None:
    """Make the batches of hours that are over, hand over what waits, and handle what Stripe told. Nothing where the export is off.

    Raises: InvalidValue naming a setting.
    """
    settings = export_settings(environment)
    if settings.destination is Destination.OFF:
        return
    stages: list[Callable[[], Awaitable[object]]] = [partial(form_batches, sessions)]
    if settings.stripe is None:
        stages.append(partial(deliver_pending, sessions, FileExporter(settings.file)))
        await run_stages(stages)
        return
    # Imported here: it takes a second, and only those who bill with Stripe have to wait for it.
    from metering.export.late_items import invoice_late_usage
    from metering.export.month_items import settle_months
    from metering.export.stripe_gateway import StripeGateway
    from metering.export.stripe_inbox import handle_events

    gateway = StripeGateway(settings.stripe)
    stages += (partial(stage, sessions, gateway) for stage in (deliver_pending, handle_events, invoice_late_usage, settle_months))
    await run_stages(stages)


async def run_stages(stages: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run one after the other, those that are due. A stage that fails unexpectedly rests, and the others go on."""
    for number, stage in enumerate(stages):
        if retries.is_due(number):
            with retries.survive(number):
                await stage()
