"""Closing of organizations and projects: a suspension that nothing ends, and refunds of credit."""

from __future__ import annotations

from alembic import op

revision = "0034"
down_revision = "0032"
branch_labels = None
depends_on = None

# A closed owner keeps its row: the authentication of its former keys reads why they are refused.
CLOSURES = """
ALTER TABLE suspensions ADD COLUMN closed_at timestamptz,
    ADD COLUMN remaining_credit text DEFAULT '' NOT NULL;
ALTER TABLE suspensions ADD CONSTRAINT ck_suspensions_remaining_credit_known CHECK (
    remaining_credit IN ('', 'refund', 'expire', 'keep')
    AND (remaining_credit = '' OR closed_at IS NOT NULL AND project_id IS NULL)
);
CREATE FUNCTION refuse_reopening() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'closed for good: % %', TG_OP, OLD.id USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER suspensions_closed_for_good BEFORE UPDATE OR DELETE ON suspensions
    FOR EACH ROW WHEN (OLD.closed_at IS NOT NULL) EXECUTE FUNCTION refuse_reopening();
CREATE OR REPLACE VIEW organization_border.suspensions AS
SELECT * FROM suspensions
WHERE organization_id = (SELECT current_setting('weir.organization')::uuid)
WITH CHECK OPTION;
ALTER TABLE cancel_commands ADD COLUMN closes boolean DEFAULT false NOT NULL;
ALTER TABLE cancel_commands ADD CONSTRAINT ck_cancel_commands_closure_of_owner
    CHECK (NOT closes OR owner_id IS NOT NULL);
"""
# The table grows with every request: revision 0037 validates the constraint without a long lock.
KINDS = """
ALTER TABLE ledger_transactions DROP CONSTRAINT ck_ledger_transactions_kind_known;
ALTER TABLE ledger_transactions ADD CONSTRAINT ck_ledger_transactions_kind_known CHECK (kind IN (
    'usage', 'plan', 'credit_granted', 'credit_applied', 'credit_expired', 'adjustment',
    'rounding'{more})) NOT VALID;
"""
# Without the columns a closed owner is suspended. A posted refund can never be removed; with one,
# the former constraint stays unvalidated.
DOWNGRADE = """
ALTER TABLE cancel_commands DROP CONSTRAINT ck_cancel_commands_closure_of_owner;
ALTER TABLE cancel_commands DROP COLUMN closes;
DROP TRIGGER suspensions_closed_for_good ON suspensions;
DROP FUNCTION refuse_reopening;
DROP VIEW organization_border.suspensions;
ALTER TABLE suspensions DROP CONSTRAINT ck_suspensions_remaining_credit_known;
ALTER TABLE suspensions DROP COLUMN closed_at, DROP COLUMN remaining_credit;
CREATE VIEW organization_border.suspensions AS
SELECT * FROM suspensions
WHERE organization_id = (SELECT current_setting('weir.organization')::uuid)
WITH CHECK OPTION;
"""


def upgrade() -> None:
    op.execute(CLOSURES)
    op.execute(KINDS.format(more=", 'credit_refunded'"))


def downgrade() -> None:
    op.execute(KINDS.format(more=""))
    op.execute(DOWNGRADE)
