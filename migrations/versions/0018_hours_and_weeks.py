"""Limits per hour and week, and every measure in every window."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

ADDED = """
    'requests_per_hour', 'requests_per_day', 'requests_per_week', 'requests_per_month',
    'tokens_per_hour', 'tokens_per_week',
    'input_tokens_per_hour', 'input_tokens_per_day', 'input_tokens_per_week',
    'input_tokens_per_month',
    'output_tokens_per_hour', 'output_tokens_per_day', 'output_tokens_per_week',
    'output_tokens_per_month',
    'cost_picos_per_hour', 'cost_picos_per_week'
"""
KNOWN = """
ALTER TABLE quotas
    DROP CONSTRAINT ck_quotas_dimension_known,
    ADD CONSTRAINT ck_quotas_dimension_known CHECK (dimension IN (
        'concurrent_requests', 'requests_per_minute',
        'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute',
        'tokens_per_day', 'tokens_per_month',
        'cost_picos_per_day', 'cost_picos_per_month', 'prepaid_credit_picos'{more}))
"""
# The previous code does not know these dimensions: running requests stop counting in such limits,
# and their alerts go with them.
FORGET = f"""
CREATE TEMPORARY TABLE forgotten ON COMMIT DROP AS
    SELECT id FROM quotas WHERE dimension IN ({ADDED});
UPDATE holds
SET quota_ids = ARRAY(
    SELECT q FROM unnest(quota_ids) WITH ORDINALITY AS u (q, i)
    WHERE q NOT IN (SELECT id FROM forgotten) ORDER BY i)
WHERE state = 'held' AND quota_ids && ARRAY(SELECT id FROM forgotten);
DELETE FROM alert_deliveries d USING alerts a
WHERE a.id = d.alert_id AND a.quota_id IN (SELECT id FROM forgotten);
ALTER TABLE alerts DISABLE TRIGGER alerts_append_only;
DELETE FROM alerts WHERE quota_id IN (SELECT id FROM forgotten);
ALTER TABLE alerts ENABLE TRIGGER alerts_append_only;
DELETE FROM quota_counters WHERE quota_id IN (SELECT id FROM forgotten);
DELETE FROM quotas WHERE id IN (SELECT id FROM forgotten);
"""


def upgrade() -> None:
    op.execute(KNOWN.format(more="," + ADDED))


def downgrade() -> None:
    op.execute(FORGET)
    op.execute(KNOWN.format(more=""))
