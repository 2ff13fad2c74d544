"""Checks of organizations and projects that are closed for good."""

from __future__ import annotations

from metering.proof.check import Check, violations_sql

TENANT_CHECKS = (
    Check(
        "closed-owners-have-nothing-open",
        "No key of a closed organization or project works, and no rental of a closed organization"
        " lasts longer than it.",
        violations_sql(
            "concat(kind, ' ', id)",
            """
            SELECT 'API key' AS kind, k.prefix AS id, k.revoked_at IS NULL AS is_open
            FROM suspensions s
            JOIN projects p
              ON p.organization_id = s.organization_id
             AND (s.project_id IS NULL OR s.project_id = p.id)
            JOIN api_keys k ON k.project_id = p.id
            WHERE s.closed_at IS NOT NULL
            UNION ALL
            SELECT 'rental', r.id::text,
                   r.ends_at IS NULL OR r.ends_at > s.closed_at AND r.ends_at > r.starts_at
            FROM suspensions s
            JOIN replica_rentals r ON r.organization_id = s.organization_id
            WHERE s.closed_at IS NOT NULL AND s.project_id IS NULL
            """,
            {"is_open": "'belongs to an owner that is closed, and has no end'"},
        ),
    ),
)
