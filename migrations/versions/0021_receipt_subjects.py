"""End users and labels in receipts: their hashes, and the salts that prove what was hashed.

The salt of an end user goes with its name, that of an event's labels is beside them, so that
nothing can be tried against a hash whose content is erased.
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

# 244 random bits.
SALT = "sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))"
SUBJECTS = f"""
ALTER TABLE usage_subjects ADD COLUMN receipt_salt bytea DEFAULT {SALT};
UPDATE usage_subjects SET receipt_salt = NULL WHERE name IS NULL;
ALTER TABLE usage_subjects
    ADD CONSTRAINT ck_usage_subjects_salt_of_name
        CHECK ((receipt_salt IS NULL) = (name IS NULL) AND octet_length(receipt_salt) = 32);

-- Erasing a name deletes its salt, and nothing else changes one.
CREATE FUNCTION usage_subject_keeps_salt() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.receipt_salt := CASE WHEN NEW.name IS NOT NULL THEN OLD.receipt_salt END;
    RETURN NEW;
END $$;
CREATE TRIGGER usage_subjects_keep_salt BEFORE UPDATE ON usage_subjects FOR EACH ROW WHEN (
    NEW.name IS NULL OR NEW.receipt_salt IS DISTINCT FROM OLD.receipt_salt
) EXECUTE FUNCTION usage_subject_keeps_salt();
"""
SUBJECTS_DOWN = """
DROP TRIGGER usage_subjects_keep_salt ON usage_subjects;
DROP FUNCTION usage_subject_keeps_salt;
ALTER TABLE usage_subjects DROP COLUMN receipt_salt;
"""
EVENTS = """
ALTER TABLE usage_events
    ADD COLUMN receipt_end_user_hash bytea,
    ADD COLUMN receipt_labels_hash bytea,
    ADD COLUMN receipt_labels_salt bytea;
SELECT guard_usage_events();  -- no rating may change the new columns
"""
EVENTS_DOWN = """
DROP TRIGGER usage_events_rated_once ON usage_events;  -- it reads the columns
ALTER TABLE usage_events
    DROP COLUMN receipt_end_user_hash,
    DROP COLUMN receipt_labels_hash,
    DROP COLUMN receipt_labels_salt;
SELECT guard_usage_events();
"""


def upgrade() -> None:
    op.execute(SUBJECTS)
    op.execute(EVENTS)


def downgrade() -> None:
    op.execute(EVENTS_DOWN)
    op.execute(SUBJECTS_DOWN)
