"""From the messages of the admin and billing services to the client's values, and the two enums back."""

from __future__ import annotations

from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import billing_service_pb2 as billing_pb
from weir.v1 import types_pb2

from weir_client import accounts, wire_bills
from weir_client.values import QuotaDimension, QuotaSubject
from weir_client.wire import DIMENSIONS, SUBJECTS, money, time_of

_TOKEN_KINDS = {
    billing_pb.TOKEN_KIND_INPUT: accounts.TokenKind.INPUT,
    billing_pb.TOKEN_KIND_CACHED_INPUT: accounts.TokenKind.CACHED_INPUT,
    billing_pb.TOKEN_KIND_OUTPUT: accounts.TokenKind.OUTPUT,
    billing_pb.TOKEN_KIND_EMBEDDING: accounts.TokenKind.EMBEDDING,
}
SUBJECT_NUMBERS = {QuotaSubject.UNSPECIFIED: types_pb2.QUOTA_SUBJECT_UNSPECIFIED} | {
    subject: number for number, subject in SUBJECTS.items()
}
DIMENSION_NUMBERS = {QuotaDimension.UNSPECIFIED: types_pb2.QUOTA_DIMENSION_UNSPECIFIED} | {
    dimension: number for number, dimension in DIMENSIONS.items()
}


def billing_profile(message: types_pb2.BillingProfile) -> accounts.BillingProfile:
    """A billing profile."""
    return accounts.BillingProfile(
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


def organization(message: admin_pb.Organization) -> accounts.Organization:
    """A customer."""
    return accounts.Organization(
        organization_id=message.organization_id,
        name=message.name,
        currency_code=message.currency_code,
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
        billing_profile=billing_profile(message.billing_profile) if message.HasField("billing_profile") else None,
    )


def project(message: admin_pb.Project) -> accounts.Project:
    """A project."""
    return accounts.Project(
        project_id=message.project_id,
        organization_id=message.organization_id,
        name=message.name,
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
    )


def api_key(message: admin_pb.ApiKey) -> accounts.ApiKey:
    """A key without its secret."""
    return accounts.ApiKey(
        api_key_id=message.api_key_id,
        organization_id=message.organization_id,
        project_id=message.project_id,
        name=message.name,
        prefix=message.prefix,
        scopes=tuple(message.scopes),
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
        expire_time=time_of(message.expire_time) if message.HasField("expire_time") else None,
        revoke_time=time_of(message.revoke_time) if message.HasField("revoke_time") else None,
        overlap_end_time=time_of(message.overlap_end_time) if message.HasField("overlap_end_time") else None,
        models=tuple(message.models),
        allowed_networks=tuple(message.allowed_networks),
        max_input_tokens=message.max_input_tokens or None,
        max_output_tokens=message.max_output_tokens or None,
        last_use_time=time_of(message.last_use_time) if message.HasField("last_use_time") else None,
        use_known_since_time=time_of(message.use_known_since_time) if message.HasField("use_known_since_time") else None,
        organization_name=message.organization_name,
        project_name=message.project_name,
    )


def audit_entry(message: admin_pb.AuditEntry) -> accounts.AuditEntry:
    """One change."""
    return accounts.AuditEntry(
        entry_id=message.entry_id,
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
        actor=message.actor,
        action=message.action,
        subject_id=message.subject_id,
        before_json=message.before_json,
        after_json=message.after_json,
    )


def month_report(message: billing_pb.GetMonthReportResponse) -> accounts.MonthReport:
    """One month of one organization."""
    counts, check = message.request_counts, message.reconciliation
    return accounts.MonthReport(
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        month=message.month,
        lines=tuple(_report_line(each) for each in message.lines),
        request_counts=accounts.RequestCounts(
            total_count=counts.total_count,
            completed_count=counts.completed_count,
            cancelled_count=counts.cancelled_count,
            limited_count=counts.limited_count,
            failed_count=counts.failed_count,
        ),
        total=money(message.total),
        total_rounded=money(message.total_rounded),
        unrated_event_count=message.unrated_event_count,
        reconciliation=accounts.Reconciliation(
            usage_token_count=check.usage_token_count,
            ledger_token_count=check.ledger_token_count,
            unrated_token_count=check.unrated_token_count,
            balanced=check.balanced,
        ),
        state=wire_bills.month_state(message.state),
        invoice_number=message.invoice_number,
        close_time=time_of(message.close_time) if message.HasField("close_time") else None,
        closed_by=message.closed_by,
        charges=wire_bills.charges(message),
        carried_in=money(message.carried_in) if message.HasField("carried_in") else None,
        carried_out=money(message.carried_out) if message.HasField("carried_out") else None,
        prepaid_credit=wire_bills.prepaid_credit(message.prepaid_credit) if message.HasField("prepaid_credit") else None,
        credit_notes=wire_bills.credit_notes(message),
        tax_note=message.tax_note,
        report_format=message.report_format,
        receipts_root=message.receipts_root,
        billing_profile=billing_profile(message.billing_profile) if message.HasField("billing_profile") else None,
    )


def _report_line(message: billing_pb.MonthReportLine) -> accounts.MonthReportLine:
    return accounts.MonthReportLine(
        model=message.model,
        token_kind=_TOKEN_KINDS.get(message.token_kind, accounts.TokenKind.UNSPECIFIED),
        price_version=message.price_version,
        request_count=message.request_count,
        token_count=message.token_count,
        cancelled_token_count=message.cancelled_token_count,
        unit_price_picos=message.unit_price_picos,
        amount=money(message.amount),
        late_month=message.late_month,
        tier=message.tier,
        rounded_amount=money(message.rounded_amount) if message.HasField("rounded_amount") else None,
    )
