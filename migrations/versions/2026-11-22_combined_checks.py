"""Checks of new holds and usage events combined into one query, for holds once per payer.

The checks are unchanged. They run one by one only if the combined query finds an error, to name it.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

HOLDS_BELONG_TOGETHER = """
CREATE OR REPLACE FUNCTION holds_belong_together() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid;
BEGIN
    {whether}
    SELECT a.id INTO stray
    FROM added a LEFT JOIN api_keys k ON k.id = a.api_key_id LEFT JOIN projects p ON p.id = k.project_id
    LEFT JOIN price_versions v ON v.id = a.price_version_id
    WHERE k.project_id IS DISTINCT FROM a.project_id OR p.organization_id IS DISTINCT FROM a.organization_id OR v.id IS NULL
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'hold %: its key, project, organization and price version do not exist or do not belong together', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$
"""
# Most holds of a batch share key and price with another one.
WHETHER_ANY_IS_STRAY = """
    IF NOT EXISTS (
        SELECT FROM (SELECT DISTINCT api_key_id, project_id, organization_id, price_version_id FROM added) a
        LEFT JOIN api_keys k ON k.id = a.api_key_id LEFT JOIN projects p ON p.id = k.project_id
        LEFT JOIN price_versions v ON v.id = a.price_version_id
        WHERE k.project_id IS DISTINCT FROM a.project_id OR p.organization_id IS DISTINCT FROM a.organization_id OR v.id IS NULL
    ) THEN
        RETURN NULL;
    END IF;
"""
USAGE_EVENTS_ARE_OF_THEIR_HOLDS = """
CREATE OR REPLACE FUNCTION usage_events_are_of_their_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE stray uuid; late uuid[]; odd bigint;
BEGIN
    {whether}
    SELECT a.hold_id INTO stray FROM added a LEFT JOIN holds h ON h.id = a.hold_id
    WHERE (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
        IS DISTINCT FROM (a.organization_id, a.project_id, a.api_key_id, a.price_version_id)
    LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'usage event of hold %: there is no such hold of the same key and price version', stray
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    SELECT hold_id INTO stray FROM added GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
    IF stray IS NOT NULL THEN
        RAISE EXCEPTION 'usage event of hold %: it has this part twice', stray USING ERRCODE = 'unique_violation';
    END IF;
    SELECT array_agg(a.hold_id) INTO late FROM added a JOIN holds h ON h.id = a.hold_id
    WHERE a.part > 0 OR h.ended_at IS DISTINCT FROM now();
    IF late IS NOT NULL THEN
        PERFORM FROM (SELECT id FROM holds WHERE id = ANY(late) ORDER BY id FOR NO KEY UPDATE) locked;
        SELECT hold_id INTO stray FROM usage_events WHERE hold_id = ANY(late) GROUP BY hold_id, part HAVING count(*) > 1 LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: it has this part already', stray USING ERRCODE = 'unique_violation';
        END IF;
        SELECT h.id INTO stray FROM holds h WHERE h.id = ANY(late) AND h.ended_at IS NULL LIMIT 1;
        IF stray IS NOT NULL THEN
            RAISE EXCEPTION 'usage event of hold %: it has not ended', stray USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    IF EXISTS (SELECT FROM added WHERE rated_at IS NOT NULL) THEN
        RAISE EXCEPTION 'usage_events: an event is not rated as it is written' USING ERRCODE = 'restrict_violation';
    END IF;
    {after}
    INSERT INTO unrated_usage (event_id, hold_id, part, settled_at, organization_id)
    SELECT id, hold_id, part, settled_at, organization_id FROM added ORDER BY id;
    RETURN NULL;
END $$
"""
WHETHER_ANY_IS_ODD = """
    SELECT count(*) FILTER (WHERE a.part > 0 OR a.rated_at IS NOT NULL OR h.ended_at IS DISTINCT FROM now()
            OR (h.organization_id, h.project_id, h.api_key_id, h.price_version_id)
                IS DISTINCT FROM (a.organization_id, a.project_id, a.api_key_id, a.price_version_id))
        + count(*) - count(DISTINCT a.hold_id)
    INTO odd FROM added a LEFT JOIN holds h ON h.id = a.hold_id;
    IF odd > 0 THEN
"""


def upgrade() -> None:
    op.execute(HOLDS_BELONG_TOGETHER.format(whether=WHETHER_ANY_IS_STRAY))
    op.execute(USAGE_EVENTS_ARE_OF_THEIR_HOLDS.format(whether=WHETHER_ANY_IS_ODD, after="END IF;"))


def downgrade() -> None:
    op.execute(USAGE_EVENTS_ARE_OF_THEIR_HOLDS.format(whether="", after=""))
    op.execute(HOLDS_BELONG_TOGETHER.format(whether=""))
