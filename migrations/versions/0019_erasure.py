"""Erasure of end users: labels and reasons may lose a name, and nothing else.

Holds, usage events and audit entries stay as they were written. While the setting
`weir.erased_name` of a transaction names an end user, labels with this value may be removed from
them; nothing else may change then.
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

FUNCTIONS = """
-- The name that this transaction erases; NULL in every other transaction.
CREATE FUNCTION erased_name() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT nullif(current_setting('weir.erased_name', true), '')
$$;
CREATE FUNCTION labels_without(labels jsonb, erased text) RETURNS jsonb
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT coalesce(jsonb_object_agg(key, value), '{}')
    FROM jsonb_each(labels)
    WHERE value <> to_jsonb(erased)
$$;
-- A salt that proves the labels in a receipt goes with them. Returns NULL, or false, if the
-- transaction erases nothing.
CREATE FUNCTION only_erases(old_row jsonb, new_row jsonb) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT new_row - 'receipt_labels_salt' = jsonb_set(
               old_row - 'receipt_labels_salt',
               '{labels}', labels_without(old_row -> 'labels', erased_name()))
           AND coalesce(new_row ->> 'receipt_labels_salt', '') = ''
$$;
"""

HOLD_ENDS_ONCE = """
CREATE OR REPLACE FUNCTION hold_ends_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN{0}
    RAISE EXCEPTION 'hold % has already ended as %', OLD.id, OLD.state
        USING ERRCODE = 'restrict_violation';
END $$;
"""
USAGE_EVENT_CHANGED = """
CREATE OR REPLACE FUNCTION usage_event_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN{0}
    RAISE EXCEPTION
        'usage_events is append-only: only rated_at and ledger_transaction_id may be set, once'
        USING ERRCODE = 'restrict_violation';
END $$;
"""
UNLESS_ERASED = """
    IF only_erases(to_jsonb(OLD), to_jsonb(NEW)) THEN
        RETURN NEW;
    END IF;"""

# Rating is refused while a name is erased, so that `usage_events_posted` may be skipped then.
GUARD = """
CREATE OR REPLACE FUNCTION guard_usage_events() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    new_values text;
    old_values text;
    is_unchanged text;
BEGIN
    SELECT string_agg(format('NEW.%I', attname), ', ' ORDER BY attnum),
           string_agg(format('OLD.%I', attname), ', ' ORDER BY attnum)
    INTO new_values, old_values
    FROM pg_attribute
    WHERE attrelid = 'usage_events'::regclass
      AND attnum > 0
      AND NOT attisdropped
      AND attname NOT IN ('rated_at', 'ledger_transaction_id');
    is_unchanged := format('(%s) IS NOT DISTINCT FROM (%s)', new_values, old_values);
    DROP TRIGGER IF EXISTS usage_events_rated_once ON usage_events;
    EXECUTE format(
        'CREATE TRIGGER usage_events_rated_once BEFORE UPDATE ON usage_events FOR EACH ROW '
        'WHEN (NOT (OLD.rated_at IS NULL AND NEW.rated_at IS NOT NULL AND %s{0})) '
        'EXECUTE FUNCTION usage_event_changed()', is_unchanged);
END $$;
SELECT guard_usage_events();
DROP TRIGGER usage_events_posted ON usage_events;
CREATE TRIGGER usage_events_posted AFTER UPDATE ON usage_events REFERENCING NEW TABLE AS marked
    FOR EACH STATEMENT {1}EXECUTE FUNCTION usage_events_posted();
"""

AUDIT = """
-- Of the limits of an erased end user, the reasons of overrides may be removed.
CREATE FUNCTION audit_entry_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.created_at, NEW.actor, NEW.action, NEW.subject_id)
           IS NOT DISTINCT FROM (OLD.id, OLD.created_at, OLD.actor, OLD.action, OLD.subject_id)
       AND (NEW.before, NEW.after) IS NOT DISTINCT FROM
           (OLD.before || '{"override_reason": null}', OLD.after || '{"override_reason": null}')
       AND EXISTS (
           SELECT
           FROM quotas q
           JOIN usage_subjects u ON u.id = q.subject_id
           WHERE q.id::text = OLD.subject_id AND u.erased_at IS NOT NULL)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'audit_log is append-only: write a correcting row instead'
        USING ERRCODE = 'restrict_violation';
END $$;
DROP TRIGGER audit_log_append_only ON audit_log;
CREATE TRIGGER audit_log_append_only BEFORE DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_log_keeps_entries BEFORE UPDATE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION audit_entry_changed();
"""
AUDIT_DOWN = """
DROP TRIGGER audit_log_keeps_entries ON audit_log;
DROP TRIGGER audit_log_append_only ON audit_log;
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
DROP FUNCTION audit_entry_changed;
"""


def upgrade() -> None:
    op.execute(FUNCTIONS)
    op.execute(HOLD_ENDS_ONCE.replace("{0}", UNLESS_ERASED))
    op.execute(USAGE_EVENT_CHANGED.replace("{0}", UNLESS_ERASED))
    op.execute(
        GUARD.replace("{0}", " AND erased_name() IS NULL").replace(
            "{1}", "WHEN (erased_name() IS NULL) "
        )
    )
    op.execute(AUDIT)


def downgrade() -> None:
    op.execute(AUDIT_DOWN)
    op.execute(GUARD.replace("{0}", "").replace("{1}", ""))
    op.execute(USAGE_EVENT_CHANGED.replace("{0}", ""))
    op.execute(HOLD_ENDS_ONCE.replace("{0}", ""))
    op.execute("DROP FUNCTION only_erases, labels_without, erased_name")
