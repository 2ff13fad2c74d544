"""End users of holds are verified by `weir fsck`, not for each hold.

The check read a row of the end user for each admission. With many end users, each row was on a page
of its own.
"""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

# Without the end user, and with it, as before this revision.
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


def upgrade() -> None:
    op.execute(HOLDS_MATCH.replace("{0}", "").replace("{1}", ""))


def downgrade() -> None:
    op.execute(HOLDS_MATCH.replace("{0}", END_USERS_MATCH).replace("{1}", STRAY_END_USER))
