"""The blocking twin of the admin client."""

from __future__ import annotations

from weir_client.admin import AsyncAdminClient
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items


class AdminClient(BlockingUnaryClient):
    """Manages who may use the service, and how much. See `AsyncAdminClient` for every call and its errors.

    >>> with AdminClient() as admin:
    ...     organization = admin.create_organization("example", allow_existing=True)
    ...     limit = admin.set_quota(QuotaSubject.ORGANIZATION, "example", QuotaDimension.TOKENS_PER_MONTH, 1_000_000)
    >>> organization.name, limit.limit_value
    ('example', 1000000)
    """

    _async_class = AsyncAdminClient

    create_organization = blocking(AsyncAdminClient.create_organization)
    list_organizations = blocking(AsyncAdminClient.list_organizations)
    set_billing_profile = blocking(AsyncAdminClient.set_billing_profile)
    create_project = blocking(AsyncAdminClient.create_project)
    list_projects = blocking(AsyncAdminClient.list_projects)
    create_api_key = blocking(AsyncAdminClient.create_api_key)
    rotate_api_key = blocking(AsyncAdminClient.rotate_api_key)
    update_api_key = blocking(AsyncAdminClient.update_api_key)
    revoke_api_key = blocking(AsyncAdminClient.revoke_api_key)
    list_api_keys = blocking(AsyncAdminClient.list_api_keys)
    set_quota = blocking(AsyncAdminClient.set_quota)
    raise_quota = blocking(AsyncAdminClient.raise_quota)
    end_quota_raise = blocking(AsyncAdminClient.end_quota_raise)
    delete_quota = blocking(AsyncAdminClient.delete_quota)
    list_quotas = blocking(AsyncAdminClient.list_quotas)
    list_key_quotas = blocking(AsyncAdminClient.list_key_quotas)
    list_audit_entries = blocking_items(AsyncAdminClient._audit_pages)

    set_price = blocking(AsyncAdminClient.set_price)
    withdraw_price = blocking(AsyncAdminClient.withdraw_price)
    list_prices = blocking(AsyncAdminClient.list_prices)

    simulate_prices = blocking(AsyncAdminClient.simulate_prices)
    create_plan = blocking(AsyncAdminClient.create_plan)
    list_plans = blocking(AsyncAdminClient.list_plans)
    assign_plan = blocking(AsyncAdminClient.assign_plan)
    grant_credit = blocking(AsyncAdminClient.grant_credit)
    list_credit_grants = blocking(AsyncAdminClient.list_credit_grants)
    get_credit_balance = blocking(AsyncAdminClient.get_credit_balance)
    set_prepaid = blocking(AsyncAdminClient.set_prepaid)

    list_live_requests = blocking(AsyncAdminClient.list_live_requests)
    get_request = blocking(AsyncAdminClient.get_request)
    kill_request = blocking(AsyncAdminClient.kill_request)
    end_overdue_holds = blocking(AsyncAdminClient.end_overdue_holds)
    apply_configuration = blocking(AsyncAdminClient.apply_configuration)
    export_configuration = blocking(AsyncAdminClient.export_configuration)

    list_replicas = blocking(AsyncAdminClient.list_replicas)
    drain_replica = blocking(AsyncAdminClient.drain_replica)
    undrain_replica = blocking(AsyncAdminClient.undrain_replica)

    set_alert_webhook = blocking(AsyncAdminClient.set_alert_webhook)
    list_alert_webhooks = blocking(AsyncAdminClient.list_alert_webhooks)
    delete_alert_webhook = blocking(AsyncAdminClient.delete_alert_webhook)
    test_alert_webhook = blocking(AsyncAdminClient.test_alert_webhook)
