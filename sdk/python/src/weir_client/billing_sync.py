"""The blocking twin of the billing client."""

from __future__ import annotations

from weir_client.billing import AsyncBillingClient
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items


class BillingClient(BlockingUnaryClient):
    """Reads the bill, closes months and corrects. See `AsyncBillingClient` for every call and its errors.

    >>> with AdminClient() as admin, BillingClient() as billing:
    ...     customer = admin.create_organization("example", allow_existing=True)
    ...     report = billing.get_month_report("example", f"{customer.create_time:%Y-%m}")
    >>> print(report.total)
    0.00 USD
    """

    _async_class = AsyncBillingClient

    get_month_report = blocking(AsyncBillingClient.get_month_report)
    get_month_document = blocking(AsyncBillingClient.get_month_document)
    list_months = blocking(AsyncBillingClient.list_months)
    close_month = blocking(AsyncBillingClient.close_month)
    verify_month = blocking(AsyncBillingClient.verify_month)
    get_invoice = blocking(AsyncBillingClient.get_invoice)
    create_adjustment = blocking(AsyncBillingClient.create_adjustment)
    create_credit_note = blocking(AsyncBillingClient.create_credit_note)
    approve_adjustment = blocking(AsyncBillingClient.approve_adjustment)
    reject_adjustment = blocking(AsyncBillingClient.reject_adjustment)
    list_adjustments = blocking(AsyncBillingClient.list_adjustments)

    list_alerts = blocking_items(AsyncBillingClient._alert_pages)

    get_usage = blocking_items(AsyncBillingClient._usage_pages)
    get_forecast = blocking(AsyncBillingClient.get_forecast)
    export_month = blocking(AsyncBillingClient.export_month)
