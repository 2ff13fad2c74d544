"""Tables of customers, their parts and their keys, and the log of who changed what."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.models.base import Base


class Organization(Base):
    """A customer: the unit of billing and of isolation."""

    __tablename__ = "organizations"
    __table_args__ = (
        CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name="name_form"),
        CheckConstraint("currency_code ~ '^[A-Z]{3}$'", name="currency_form"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    name: Mapped[str] = mapped_column(unique=True)
    currency_code: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class BillingProfileRow(Base):
    """Whom an organization's invoices are addressed to; empty text for what is not known. See `tenants/billing_profiles.py`."""

    __tablename__ = "billing_profiles"

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    emails: Mapped[list[str]]
    legal_name: Mapped[str]
    address_line1: Mapped[str]
    address_line2: Mapped[str]
    city: Mapped[str]
    postal_code: Mapped[str]
    state: Mapped[str]
    country: Mapped[str]
    tax_id: Mapped[str]
    language: Mapped[str]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Project(Base):
    """A part of an organization with its own keys and request ids."""

    __tablename__ = "projects"
    __table_args__ = (
        UniqueConstraint("organization_id", "name"),
        CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name="name_form"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A credential. Only the SHA-256 of the secret is stored; it has 256 random bits, so a slow hash would add nothing."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("octet_length(secret_hash) = 32", name="secret_hash_size"),
        CheckConstraint("scopes <@ ARRAY['inference', 'admin', 'billing'] AND scopes <> '{}'", name="scopes_known"),
        CheckConstraint("array_position(models, '') IS NULL", name="models_named"),
        CheckConstraint("allowed_networks::cidr[] IS NOT NULL", name="allowed_networks_are"),
        CheckConstraint("max_input_tokens > 0", name="max_input_tokens_positive"),
        CheckConstraint("max_output_tokens > 0", name="max_output_tokens_positive"),
        Index("ix_api_keys_project_id", "project_id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    project_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(unique=True)
    secret_hash: Mapped[bytes] = mapped_column(unique=True)
    scopes: Mapped[list[str]]
    models: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # that it may use; none: every one
    allowed_networks: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # to be used from; none: everywhere
    max_input_tokens: Mapped[int | None]  # of one request; none: as many as the model takes
    max_output_tokens: Mapped[int | None]  # of one request, all its choices together
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    uses_known_since: Mapped[datetime] = mapped_column(server_default=func.now())  # later than `created_at` of keys of before


class ApiKeyUse(Base):
    """When a key was used last; a key without a row was not. Written by `tenants/key_uses.py`, a minute late, and only forward."""

    __tablename__ = "api_key_uses"
    # Free space on the page keeps the updates off the index.
    __table_args__ = ({"postgresql_with": {"fillfactor": "50"}},)

    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    last_used_at: Mapped[datetime]


class AuditEntry(Base):
    """Who changed what. Written in the transaction of the change."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    subject_id: Mapped[str]
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]
