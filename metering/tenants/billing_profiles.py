"""Billing profiles: the addressee of an organization's invoices, and where Stripe sends them.

A profile is replaced as a whole. The audit log keeps the earlier ones. A closed month keeps the
profile that it was closed with (`invoicing/invoices.py`). Functions take a session and never
commit.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import func, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change
from metering.core.errors import InvalidValue
from metering.core.models import insertion, record_of
from metering.tenants.tenants import find_organization

EMAILS_MAX = 10
EMAIL_CHARS_MAX = 254  # RFC 5321; Stripe takes 512
LEGAL_NAME_CHARS_MAX = 256  # Stripe's limit for a customer's name
# Deliberately narrower than RFC 5322: no quoted local parts, no address literals, no comments.
EMAIL_FORM = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z][A-Za-z0-9-]{0,61}[A-Za-z0-9]",
    re.ASCII,
)
LOCAL_PART_CHARS_MAX = 64
LANGUAGE_FORM = re.compile(r"[a-z]{2,3}(-[A-Z][a-z]{3})?(-([A-Z]{2}|[0-9]{3}))?", re.ASCII)
TEXT_CHARS_MAX: Mapping[str, int] = {
    "legal_name": LEGAL_NAME_CHARS_MAX,
    "address_line1": 200,
    "address_line2": 200,
    "city": 100,
    "postal_code": 20,
    "state": 100,
    "tax_id": 50,
}
ADDRESS_FIELDS = ("address_line1", "address_line2", "city", "postal_code", "state", "country")
# ISO 3166-1 alpha-2, the officially assigned codes.
COUNTRY_CODES = """
AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS BT
BV BW BY BZ CA CC CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE EG EH
ER ES ET FI FJ FK FM FO FR GA GB GD GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM HN HR HT
HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH KI KM KN KP KR KW KY KZ LA LB LC LI LK LR LS
LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV MW MX MY MZ NA NC NE NF NG NI
NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW SA SB SC SD SE SG
SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO TR TT TV TW TZ UA UG
UM US UY UZ VA VC VE VG VI VN VU WF WS YE YT ZA ZM ZW
"""
CODES_AFTER_CITY = "AU BR CA GB ID IE IN JP KR NZ SG TH TW US ZA"
COUNTRIES = frozenset(COUNTRY_CODES.split())


@dataclass(frozen=True, slots=True)
class BillingProfile:
    """Recipient of an organization's invoices. Unknown fields are empty.

    Stripe sends to the first of `emails`; the others are for the operator. `language` is an IETF
    tag, such as `de` or `pt-BR`.
    """

    emails: tuple[str, ...] = ()
    legal_name: str = ""
    address_line1: str = ""
    address_line2: str = ""
    city: str = ""
    postal_code: str = ""
    state: str = ""
    country: str = ""
    tax_id: str = ""
    language: str = ""

    @property
    def email(self) -> str:
        """E-mail address to which Stripe sends invoices; empty if there is none."""
        return self.emails[0] if self.emails else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Postal address, tax id and e-mail as lines for a document."""
        town = [self.city, self.state]
        town.insert(2 if self.country in CODES_AFTER_CITY.split() else 0, self.postal_code)
        tax = f"Tax ID {self.tax_id}" if self.tax_id else ""
        postal = (self.address_line1, self.address_line2, " ".join(filter(None, town)))
        return tuple(filter(None, (*postal, self.country, tax, self.email)))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"emails": list(self.emails)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BillingProfile:
        return cls(**{**document, "emails": tuple(document["emails"])})


PROFILES = text("""
SELECT * FROM billing_profiles
WHERE CAST(:ids AS uuid[]) IS NULL OR organization_id = ANY(CAST(:ids AS uuid[]))
""")


async def billing_profiles(
    session: AsyncSession, ids: Collection[uuid.UUID] | None = None
) -> dict[uuid.UUID, BillingProfile]:
    """Read the profiles of all organizations, or of these, by organization id.

    Organizations without one are left out.
    """
    rows = await session.execute(PROFILES, {"ids": None if ids is None else list(ids)})
    return {row.organization_id: record_of(BillingProfile, row) for row in rows}


async def billing_profile(
    session: AsyncSession, organization_id: uuid.UUID
) -> BillingProfile | None:
    """Read an organization's profile; None if none was ever set."""
    return (await billing_profiles(session, [organization_id])).get(organization_id)


async def set_billing_profile(
    session: AsyncSession, *, organization: str, profile: BillingProfile, actor: str
) -> BillingProfile:
    """Replace an organization's profile. Raises: NotFound, InvalidValue."""
    owner = await find_organization(session, organization)
    checked = checked_profile(profile)
    before = await billing_profile(session, owner.id)
    if checked == before:
        return checked
    changed = checked.as_json() | {"updated_at": func.now()}
    statement = insertion("billing_profiles", changed | {"organization_id": owner.id})
    await session.execute(
        statement.on_conflict_do_update(index_elements=["organization_id"], set_=changed)
    )
    await record_change(
        session,
        actor=actor,
        action="billing_profile.set",
        subject_id=str(owner.id),
        before=None if before is None else before.as_json(),
        after=checked.as_json(),
    )
    return checked


def check_email(email: str, field: str) -> None:
    """Check an e-mail address. Raises: InvalidValue."""
    if len(email) > EMAIL_CHARS_MAX or len(email.partition("@")[0]) > LOCAL_PART_CHARS_MAX:
        limits = (
            f"at most {EMAIL_CHARS_MAX} characters, {LOCAL_PART_CHARS_MAX} of them before the @"
        )
        raise InvalidValue(field, f"an address must have {limits}")
    if not EMAIL_FORM.fullmatch(email):
        raise InvalidValue(
            field, f"{email!r} is not an e-mail address: write it as billing@example.com"
        )


def checked_profile(profile: BillingProfile) -> BillingProfile:
    """Validate a profile and return it. Raises: InvalidValue for the first invalid field."""
    if len(profile.emails) > EMAILS_MAX:
        raise InvalidValue(
            "emails", f"must have at most {EMAILS_MAX} addresses, got {len(profile.emails)}"
        )
    for email in profile.emails:
        check_email(email, "emails")
    if len({email.lower() for email in profile.emails}) < len(profile.emails):
        raise InvalidValue("emails", "must not repeat an address")
    for name, chars_max in TEXT_CHARS_MAX.items():
        text: str = getattr(profile, name)
        if len(text) > chars_max:
            raise InvalidValue(name, f"must have at most {chars_max} characters, got {len(text)}")
        if not text.isprintable():
            raise InvalidValue(name, "must not contain control characters or line breaks")
        if text != text.strip():
            raise InvalidValue(name, "must not begin or end with a space")
    if profile.country and profile.country not in COUNTRIES:
        raise InvalidValue(
            "country",
            f"{profile.country[:10]!r} is not an ISO 3166-1 alpha-2 code: write it as DE or US",
        )
    if profile.language and not LANGUAGE_FORM.fullmatch(profile.language):
        raise InvalidValue(
            "language", f"{profile.language[:10]!r} is not a language tag: write it as de or pt-BR"
        )
    if any(getattr(profile, name) for name in ADDRESS_FIELDS):
        for name in ("address_line1", "country"):
            if not getattr(profile, name):
                raise InvalidValue(
                    name, "is missing: an address has at least its first line and its country"
                )
    return profile
