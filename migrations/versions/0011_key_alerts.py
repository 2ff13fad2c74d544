"""Alerts about keys that were rotated or given more rights."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

UPGRADE = """
-- The changed key, and the entry of the audit log that the alert reports, each once.
ALTER TABLE alerts
    ADD COLUMN api_key_id uuid CONSTRAINT fk_alerts_api_key_id_api_keys REFERENCES api_keys (id),
    ADD COLUMN audit_entry_id bigint
        CONSTRAINT fk_alerts_audit_entry_id_audit_log REFERENCES audit_log (id),
    ADD CONSTRAINT ck_alerts_key_complete CHECK (num_nulls(api_key_id, audit_entry_id) IN (0, 2)),
    ADD CONSTRAINT ck_alerts_one_subject
        CHECK (num_nonnulls(quota_id, stripe_invoice_id, audit_entry_id) <= 1);
CREATE UNIQUE INDEX uq_alerts_audit_entry_id ON alerts (audit_entry_id);
CREATE INDEX ix_alerts_api_key_id ON alerts (api_key_id, audit_entry_id)
    WHERE api_key_id IS NOT NULL;
"""
DOWNGRADE = """
ALTER TABLE alerts DROP COLUMN audit_entry_id, DROP COLUMN api_key_id;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
