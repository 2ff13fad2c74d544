"""End users and label values: their rows, and limits on them.

A usage subject is an end user of a customer, or a value of a label. A quota with `for_each` is a
selector: it limits nothing itself, and each usage subject within its subject gets a quota of its
own, whose terms are read through the selector (`quota_terms`).
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

SUBJECTS = """
-- An end user gets its row in the commit that admits its first request, a label value in the one
-- that first limits it. An erased row has no name, so that nothing refers to a person any more.
CREATE TABLE usage_subjects (
    id uuid DEFAULT gen_random_uuid() CONSTRAINT pk_usage_subjects PRIMARY KEY,
    organization_id uuid NOT NULL
        CONSTRAINT fk_usage_subjects_organization_id_organizations REFERENCES organizations (id),
    kind text NOT NULL,
    label_key text DEFAULT '' NOT NULL,
    name text,
    created_at timestamptz DEFAULT now() NOT NULL,
    last_used_on date DEFAULT (now() AT TIME ZONE 'UTC')::date NOT NULL,
    archived_at timestamptz,
    erased_at timestamptz,
    CONSTRAINT ck_usage_subjects_kind_known CHECK (kind IN ('end_user', 'label')),
    CONSTRAINT ck_usage_subjects_label_key_of_label CHECK ((kind = 'label') = (label_key <> '')),
    CONSTRAINT ck_usage_subjects_name_length CHECK (CASE kind
        WHEN 'end_user' THEN octet_length(name) BETWEEN 1 AND 512
        ELSE octet_length(name) <= 2048 END),
    CONSTRAINT ck_usage_subjects_erased_without_name
        CHECK ((name IS NULL) = (erased_at IS NOT NULL)
               AND (erased_at IS NULL OR archived_at IS NOT NULL)),
    CONSTRAINT uq_usage_subjects_name UNIQUE (organization_id, kind, label_key, name)
);
-- The sweeper archives the longest unused first.
CREATE INDEX ix_usage_subjects_last_used_on ON usage_subjects (last_used_on)
    WHERE archived_at IS NULL;
CREATE TRIGGER usage_subjects_no_delete BEFORE DELETE OR TRUNCATE ON usage_subjects
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_deletion();

-- Numbers of an organization's usage subjects that are not archived. The row is locked to
-- create or archive one, so that no bound is exceeded and no name gets two rows.
CREATE TABLE usage_subject_counts (
    organization_id uuid CONSTRAINT pk_usage_subject_counts PRIMARY KEY
        CONSTRAINT fk_usage_subject_counts_organization_id_organizations
        REFERENCES organizations (id),
    end_user_count bigint DEFAULT 0 NOT NULL,
    label_value_count bigint DEFAULT 0 NOT NULL,
    CONSTRAINT ck_usage_subject_counts_not_negative
        CHECK (least(end_user_count, label_value_count) >= 0)
);

-- Only erasing changes a name, to none.
CREATE FUNCTION usage_subject_keeps_name() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'usage subject %: only erasing may change its name', OLD.id
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER usage_subjects_keep_name BEFORE UPDATE ON usage_subjects FOR EACH ROW WHEN (
    (NEW.id, NEW.organization_id, NEW.kind, NEW.label_key, NEW.created_at)
        IS DISTINCT FROM (OLD.id, OLD.organization_id, OLD.kind, OLD.label_key, OLD.created_at)
    OR NEW.name IS NOT NULL AND NEW.name IS DISTINCT FROM OLD.name
    OR OLD.erased_at IS NOT NULL AND NEW.erased_at IS DISTINCT FROM OLD.erased_at
) EXECUTE FUNCTION usage_subject_keeps_name();

CREATE FUNCTION usage_subjects_insert_counted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage_subject_counts AS c (organization_id, end_user_count, label_value_count)
    SELECT organization_id, count(*) FILTER (WHERE kind = 'end_user'),
           count(*) FILTER (WHERE kind = 'label')
    FROM added
    WHERE archived_at IS NULL
    GROUP BY organization_id
    ORDER BY organization_id
    ON CONFLICT (organization_id) DO UPDATE
    SET end_user_count = c.end_user_count + excluded.end_user_count,
        label_value_count = c.label_value_count + excluded.label_value_count;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_subjects_insert_counted AFTER INSERT ON usage_subjects
    REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION usage_subjects_insert_counted();

-- Processes drop what they cached of a subject that is archived or erased.
CREATE FUNCTION usage_subjects_update_counted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE usage_subject_counts c
    SET end_user_count = end_user_count + d.end_users,
        label_value_count = label_value_count + d.label_values
    FROM (
        SELECT n.organization_id,
               coalesce(sum(v.change) FILTER (WHERE n.kind = 'end_user'), 0) AS end_users,
               coalesce(sum(v.change) FILTER (WHERE n.kind = 'label'), 0) AS label_values
        FROM old_rows o
        JOIN new_rows n USING (id),
        LATERAL (
            SELECT (n.archived_at IS NULL)::int - (o.archived_at IS NULL)::int AS change
        ) v
        WHERE v.change <> 0
        GROUP BY n.organization_id
        ORDER BY n.organization_id
    ) d
    WHERE c.organization_id = d.organization_id;
    INSERT INTO rule_changes (subject_id)
    SELECT n.id
    FROM old_rows o
    JOIN new_rows n USING (id)
    WHERE n.archived_at IS NOT NULL AND o.archived_at IS NULL
       OR n.name IS DISTINCT FROM o.name;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_subjects_update_counted AFTER UPDATE ON usage_subjects
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION usage_subjects_update_counted();
"""

QUOTAS = """
ALTER TABLE quotas
    ADD COLUMN for_each text DEFAULT '' NOT NULL,
    ADD COLUMN within_id uuid,
    ADD COLUMN selector_id uuid CONSTRAINT fk_quotas_selector_id_quotas REFERENCES quotas (id),
    DROP CONSTRAINT ck_quotas_subject_known,
    ADD CONSTRAINT ck_quotas_subject_known
        CHECK (subject IN ('organization', 'project', 'api_key', 'end_user', 'label')),
    DROP CONSTRAINT ck_quotas_for_new_keys_subject,
    ADD CONSTRAINT ck_quotas_for_new_keys_subject
        CHECK (NOT for_new_keys OR subject IN ('organization', 'project')),
    ADD CONSTRAINT ck_quotas_for_each_known
        CHECK (for_each IN ('', 'end_user') OR for_each LIKE 'label:_%'),
    ADD CONSTRAINT ck_quotas_for_each_subject
        CHECK (for_each = '' OR subject IN ('organization', 'project') AND NOT for_new_keys),
    ADD CONSTRAINT ck_quotas_within_of_usage_subject
        CHECK ((within_id IS NOT NULL) = (subject IN ('end_user', 'label'))),
    ADD CONSTRAINT ck_quotas_selector_of_usage_subject
        CHECK (selector_id IS NULL OR within_id IS NOT NULL);
DROP INDEX uq_quotas_active;
-- A selector's limit of a subject counts as another one than the subject's own: a removed selector
-- leaves its limits behind.
CREATE UNIQUE INDEX uq_quotas_active
    ON quotas (subject_id, model, dimension, for_new_keys, for_each, within_id, selector_id)
    NULLS NOT DISTINCT
    WHERE deleted_at IS NULL;
CREATE INDEX ix_quotas_selector_id ON quotas (selector_id, subject_id)
    WHERE selector_id IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX ix_quotas_within_id ON quotas (within_id, subject, subject_id)
    WHERE within_id IS NOT NULL AND selector_id IS NULL AND deleted_at IS NULL;

-- Each quota with its terms in force: those of its selector, unless it has none. `version` changes
-- with each of them.
CREATE VIEW quota_terms AS
SELECT q.id, concat(q.xmin, '.', s.xmin) AS version, q.subject, q.subject_id, q.within_id,
    q.selector_id, q.for_each, q.for_new_keys, q.model, q.dimension,
    coalesce(s.limit_value, q.limit_value) AS limit_value,
    coalesce(s.input_weight_milli, q.input_weight_milli) AS input_weight_milli,
    coalesce(s.cached_input_weight_milli, q.cached_input_weight_milli) AS cached_input_weight_milli,
    coalesce(s.output_weight_milli, q.output_weight_milli) AS output_weight_milli,
    coalesce(s.enforced, q.enforced) AS enforced,
    CASE WHEN s.id IS NULL THEN q.override_limit_value ELSE s.override_limit_value END
        AS override_limit_value,
    CASE WHEN s.id IS NULL THEN q.override_until ELSE s.override_until END AS override_until,
    CASE WHEN s.id IS NULL THEN q.override_reason ELSE s.override_reason END AS override_reason,
    coalesce(s.alert_at, q.alert_at) AS alert_at,
    coalesce(q.deleted_at, s.deleted_at) AS deleted_at, q.deleted_at AS own_deleted_at,
    q.created_at, greatest(q.changed_at, s.changed_at) AS changed_at
FROM quotas q
LEFT JOIN quotas s ON s.id = q.selector_id;

-- Subject, scope and selector of a limit on a usage subject must exist and belong together.
CREATE FUNCTION quotas_belong_together() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    SELECT a.id
    INTO stray
    FROM added a
    LEFT JOIN usage_subjects u ON u.id = a.subject_id AND u.kind = a.subject
    LEFT JOIN projects p ON p.id = a.within_id
    LEFT JOIN quotas s ON s.id = a.selector_id
    WHERE a.within_id IS NOT NULL
      AND (u.organization_id IS DISTINCT FROM coalesce(p.organization_id, a.within_id)
           OR a.selector_id IS NOT NULL
              AND (s.subject_id, s.model, s.dimension, s.for_each)
                  IS DISTINCT FROM
                  (a.within_id, a.model, a.dimension,
                   CASE u.kind WHEN 'label' THEN 'label:' || u.label_key ELSE 'end_user' END))
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'quota %: subject, scope and selector must exist and belong together', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER quotas_insert_belong_together AFTER INSERT ON quotas REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION quotas_belong_together();
CREATE TRIGGER quotas_update_belong_together AFTER UPDATE ON quotas REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION quotas_belong_together();

-- A selector's limit is created before any process has cached terms of its subject: only own limits
-- are recorded. The first one of a scope concerns every request within, and so does each of a label
-- value, because its key may be new.
CREATE OR REPLACE FUNCTION quotas_insert_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rule_changes (subject_id)
    SELECT subject_id FROM changed WHERE selector_id IS NULL
    UNION
    SELECT c.within_id
    FROM changed c
    WHERE c.selector_id IS NULL
      AND c.within_id IS NOT NULL
      AND (c.subject = 'label' OR NOT EXISTS (
          SELECT
          FROM quotas o
          WHERE o.within_id = c.within_id
            AND o.subject = c.subject
            AND o.selector_id IS NULL
            AND o.deleted_at IS NULL
            AND o.id NOT IN (SELECT id FROM changed)));
    RETURN NULL;
END $$;
"""
QUOTAS_DOWN = """
CREATE OR REPLACE FUNCTION quotas_insert_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rule_changes (subject_id) SELECT DISTINCT subject_id FROM changed;
    RETURN NULL;
END $$;
DROP TRIGGER quotas_update_belong_together ON quotas;
DROP TRIGGER quotas_insert_belong_together ON quotas;
DROP FUNCTION quotas_belong_together;
DROP VIEW quota_terms;
DROP INDEX ix_quotas_selector_id, ix_quotas_within_id, uq_quotas_active;
DELETE FROM quota_counters c USING quotas q
WHERE q.id = c.quota_id AND (q.within_id IS NOT NULL OR q.for_each <> '');
UPDATE quotas SET selector_id = NULL WHERE selector_id IS NOT NULL;
DELETE FROM quotas WHERE within_id IS NOT NULL OR for_each <> '';
ALTER TABLE quotas
    DROP CONSTRAINT ck_quotas_for_new_keys_subject,
    ADD CONSTRAINT ck_quotas_for_new_keys_subject CHECK (NOT for_new_keys OR subject <> 'api_key'),
    DROP CONSTRAINT ck_quotas_subject_known,
    ADD CONSTRAINT ck_quotas_subject_known
        CHECK (subject IN ('organization', 'project', 'api_key')),
    DROP COLUMN selector_id,
    DROP COLUMN within_id,
    DROP COLUMN for_each;
CREATE UNIQUE INDEX uq_quotas_active ON quotas (subject_id, model, dimension, for_new_keys)
    WHERE deleted_at IS NULL;
"""

# With the end user, and without, as before this revision.
HOLDS_MATCH = """
CREATE OR REPLACE FUNCTION holds_belong_together() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    IF NOT EXISTS (
        SELECT
        FROM (
            SELECT DISTINCT api_key_id, project_id, organization_id, price_version_id FROM added
        ) a
        LEFT JOIN api_keys k ON k.id = a.api_key_id
        LEFT JOIN projects p ON p.id = k.project_id
        LEFT JOIN price_versions v ON v.id = a.price_version_id
        WHERE k.project_id IS DISTINCT FROM a.project_id
           OR p.organization_id IS DISTINCT FROM a.organization_id
           OR v.id IS NULL
    ){0} THEN
        RETURN NULL;
    END IF;
    SELECT a.id
    INTO stray
    FROM added a
    LEFT JOIN api_keys k ON k.id = a.api_key_id
    LEFT JOIN projects p ON p.id = k.project_id
    LEFT JOIN price_versions v ON v.id = a.price_version_id
    WHERE k.project_id IS DISTINCT FROM a.project_id
       OR p.organization_id IS DISTINCT FROM a.organization_id
       OR v.id IS NULL
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION
            'hold %: key, project, organization and price version must exist and belong together',
            stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;{1}
    RETURN NULL;
END $$;
"""
END_USERS_MATCH = """ AND NOT EXISTS (
        SELECT
        FROM added a
        LEFT JOIN usage_subjects u ON u.id = a.end_user_id AND u.kind = 'end_user'
        WHERE a.end_user_id IS NOT NULL AND u.organization_id IS DISTINCT FROM a.organization_id
    )"""
STRAY_END_USER = """
    SELECT a.id
    INTO stray
    FROM added a
    LEFT JOIN usage_subjects u ON u.id = a.end_user_id AND u.kind = 'end_user'
    WHERE a.end_user_id IS NOT NULL AND u.organization_id IS DISTINCT FROM a.organization_id
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'hold %: its organization has no such end user', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;"""

# The index is one of each new partition, not of the whole table: building it for the present ones
# would keep them locked. Without it, queries use the index on organization and time.
PARTITION = """
CREATE OR REPLACE FUNCTION create_usage_partition(month date) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    name text := 'usage_events_' || to_char(month, 'YYYY_MM');
    begins timestamptz := date_trunc('month', month::timestamp) AT TIME ZONE 'UTC';
    ends timestamptz :=
        (date_trunc('month', month::timestamp) + interval '1 month') AT TIME ZONE 'UTC';
    place text := (
        SELECT format('%I.%I', relnamespace::regnamespace, name)
        FROM pg_class
        WHERE oid = 'usage_events'::regclass
    );
    moved bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(1466263922, 2);
    IF to_regclass(place) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'CREATE TABLE %s (LIKE usage_events INCLUDING DEFAULTS INCLUDING CONSTRAINTS) '
        'WITH (fillfactor = 50)', place);
    LOCK TABLE usage_events_default IN ACCESS EXCLUSIVE MODE;
    EXECUTE format(
        'INSERT INTO %s SELECT * FROM usage_events_default '
        'WHERE settled_at >= $1 AND settled_at < $2', place)
        USING begins, ends;
    GET DIAGNOSTICS moved = ROW_COUNT;
    IF moved > 0 THEN
        ALTER TABLE usage_events_default DISABLE TRIGGER USER;
        DELETE FROM usage_events_default WHERE settled_at >= begins AND settled_at < ends;
        ALTER TABLE usage_events_default ENABLE TRIGGER USER;
        RAISE NOTICE 'usage_events: % rows of % moved from the default partition',
            moved, to_char(month, 'YYYY-MM');
    END IF;
    EXECUTE format(
        'ALTER TABLE usage_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
        place, begins, ends);
    EXECUTE format(
        'CREATE TRIGGER usage_events_partition BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
        'FOR EACH STATEMENT EXECUTE FUNCTION refuse_partition()', place);<index>
    RETURN true;
END $$;
"""
PARTITION_INDEX = """
    EXECUTE format(
        'CREATE INDEX %I ON %s (end_user_id, settled_at) WHERE end_user_id IS NOT NULL',
        'ix_' || name || '_end_user_id_settled_at', place);"""
# With the end user, and without, as before this revision.
EVENTS_MATCH = """
CREATE OR REPLACE FUNCTION usage_events_match_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stray uuid;
    late uuid[];
    unusual_count bigint;
BEGIN
    SELECT count(*) FILTER (
               WHERE a.part > 0
                  OR a.rated_at IS NOT NULL
                  OR h.ended_at IS DISTINCT FROM now()
                  OR (h.organization_id, h.project_id, h.api_key_id, h.price_version_id{0})
                     IS DISTINCT FROM
                     (a.organization_id, a.project_id, a.api_key_id, a.price_version_id{1})
           ) + count(*) - count(DISTINCT a.hold_id)
    INTO unusual_count
    FROM added a
    LEFT JOIN holds h ON h.id = a.hold_id;
    IF unusual_count > 0 THEN
        SELECT a.hold_id
        INTO stray
        FROM added a
        LEFT JOIN holds h ON h.id = a.hold_id
        WHERE (h.organization_id, h.project_id, h.api_key_id, h.price_version_id{0})
              IS DISTINCT FROM
              (a.organization_id, a.project_id, a.api_key_id, a.price_version_id{1})
        LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION
                'usage event of hold %: there is no such hold with the same key and price version',
                stray
                USING ERRCODE = 'foreign_key_violation';
        END IF;
        SELECT hold_id INTO stray FROM added GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: the statement has this part twice', stray
                USING ERRCODE = 'unique_violation';
        END IF;
        SELECT array_agg(a.hold_id)
        INTO late
        FROM added a
        JOIN holds h ON h.id = a.hold_id
        WHERE a.part > 0 OR h.ended_at IS DISTINCT FROM now();
        IF late IS NOT NULL THEN
            PERFORM FROM (
                SELECT id FROM holds WHERE id = ANY(late) ORDER BY id FOR NO KEY UPDATE
            ) locked;
            SELECT hold_id
            INTO stray
            FROM usage_events
            WHERE hold_id = ANY(late)
            GROUP BY hold_id, part
            HAVING count(*) > 1
            LIMIT 1;
            IF stray IS NOT NULL THEN
                RAISE EXCEPTION 'usage event of hold %: the hold has this part already', stray
                    USING ERRCODE = 'unique_violation';
            END IF;
            SELECT h.id
            INTO stray
            FROM holds h
            WHERE h.id = ANY(late) AND h.ended_at IS NULL
            LIMIT 1;
            IF stray IS NOT NULL THEN
                RAISE EXCEPTION 'usage event of hold %: the hold has not ended', stray
                    USING ERRCODE = 'restrict_violation';
            END IF;
        END IF;
        IF EXISTS (SELECT FROM added WHERE rated_at IS NOT NULL) THEN
            RAISE EXCEPTION 'usage_events: a new event must not be rated'
                USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    INSERT INTO unrated_usage (event_id, hold_id, part, settled_at, organization_id)
    SELECT id, hold_id, part, settled_at, organization_id FROM added ORDER BY id;
    RETURN NULL;
END $$;
"""


def upgrade() -> None:
    op.execute(SUBJECTS)
    op.execute(QUOTAS)
    op.execute("ALTER TABLE holds ADD COLUMN end_user_id uuid")
    op.execute(HOLDS_MATCH.replace("{0}", END_USERS_MATCH).replace("{1}", STRAY_END_USER))
    op.execute("ALTER TABLE usage_events ADD COLUMN end_user_id uuid")
    op.execute("SELECT guard_usage_events()")  # no rating may change the new column
    op.execute(EVENTS_MATCH.replace("{0}", ", h.end_user_id").replace("{1}", ", a.end_user_id"))
    op.execute(PARTITION.replace("<index>", PARTITION_INDEX))


def downgrade() -> None:
    op.execute(PARTITION.replace("<index>", ""))
    op.execute(EVENTS_MATCH.replace("{0}", "").replace("{1}", ""))
    op.execute("DROP TRIGGER usage_events_rated_once ON usage_events")  # it reads the column
    op.execute("ALTER TABLE usage_events DROP COLUMN end_user_id")  # with the indexes
    op.execute("SELECT guard_usage_events()")
    op.execute(HOLDS_MATCH.replace("{0}", "").replace("{1}", ""))
    op.execute("ALTER TABLE holds DROP COLUMN end_user_id")
    op.execute(QUOTAS_DOWN)
    op.execute("DROP TABLE usage_subject_counts, usage_subjects")
    op.execute(
        "DROP FUNCTION usage_subjects_update_counted, usage_subjects_insert_counted,"
        " usage_subject_keeps_name"
    )
