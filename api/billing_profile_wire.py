"""Billing profiles as messages, and back. Pure."""

from __future__ import annotations

from weir.v1 import types_pb2

from metering.tenants.billing_profiles import BillingProfile


def billing_profile_message(profile: BillingProfile) -> types_pb2.BillingProfile:
    """The message of a profile."""
    return types_pb2.BillingProfile(**profile.as_json())


def parse_billing_profile(message: types_pb2.BillingProfile) -> BillingProfile:
    """The profile that a message holds, not validated."""
    return BillingProfile(
        emails=tuple(message.emails),
        legal_name=message.legal_name,
        address_line1=message.address_line1,
        address_line2=message.address_line2,
        city=message.city,
        postal_code=message.postal_code,
        state=message.state,
        country=message.country,
        tax_id=message.tax_id,
        language=message.language,
    )
