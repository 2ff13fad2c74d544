"""Checks of usage events.

Each event belongs to a hold, repeats the hold's facts, bills the delivered tokens, and costs what
its tokens cost.
"""

from __future__ import annotations

from metering.proof.check import (
    EVENTS_KEPT_FROM,
    HOLDS_KEPT_FROM,
    SINCE,
    Check,
    violations_sql,
)

# Price of thinking at price version p: that of output unless another one is stated.
REASONING_PRICE = """CASE WHEN p.reasoning_picos_per_token IS NULL THEN p.output_picos_per_token
    ELSE p.reasoning_picos_per_token END"""

# For each kind of token: its count in a usage event, and its price at price version p.
TOKEN_KINDS = {
    "input": ("input_token_count - cached_input_token_count", "p.input_picos_per_token"),
    "cached_input": ("cached_input_token_count", "p.cached_input_picos_per_token"),
    "output": ("billed_token_count - billed_reasoning_token_count", "p.output_picos_per_token"),
    "reasoning": ("billed_reasoning_token_count", REASONING_PRICE),
    "embedding": ("embedding_token_count", "p.embedding_picos_per_token"),
}

# One sum over usage events for each kind.
KIND_SUMS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in TOKEN_KINDS.items())

# One row for each kind, from a row with such sums.
KIND_ROWS = (
    f"LATERAL (VALUES {', '.join(f'({kind!r}, {kind})' for kind in TOKEN_KINDS)})"
    " AS k (token_kind, token_count)"
)

# Cost of usage event e at its price version p.
EVENT_COST = " + ".join(
    f"(e.{count.replace('- ', '- e.')}) * {price}" for count, price in TOKEN_KINDS.values()
)

# Columns that it reads.
EVENT_COUNTS = """input_token_count, cached_input_token_count, billed_token_count,
    billed_reasoning_token_count, embedding_token_count"""

# Usage event e is not billed by an adjustment instead of at its own cost.
NOT_CORRECTED = """NOT EXISTS (
    SELECT FROM usage_corrections c
    WHERE (c.hold_id, c.part, c.settled_at) = (e.hold_id, e.part, e.settled_at)
)"""

USAGE_CHECKS = (
    Check(
        "corrections-are-approved",
        "Usage that an adjustment bills is not rated, and the adjustment is approved, belongs to"
        " the same customer, and equals the cost of the tokens.",
        violations_sql(
            "concat('adjustment ', adjustment_id)",
            f"""
            SELECT c.adjustment_id, a.amount_picos,
                   sum({EVENT_COST}) AS expected_picos,
                   bool_or(e.rated_at IS NOT NULL) AS rated,
                   bool_or(a.organization_id IS DISTINCT FROM e.organization_id)
                       AS is_other_customers,
                   bool_and(d.approved) AS approved
            FROM usage_corrections c
            LEFT JOIN usage_events e USING (hold_id, part, settled_at)
            LEFT JOIN price_versions p ON p.id = e.price_version_id
            LEFT JOIN adjustments a ON a.id = c.adjustment_id
            LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id
            WHERE c.settled_at >= {EVENTS_KEPT_FROM}
            GROUP BY 1, 2
            """,
            {
                "approved IS NOT TRUE": "'corrects usage and is not approved'",
                "is_other_customers": "'corrects usage of another customer'",
                "rated": "'corrects usage that is also rated'",
                "amount_picos IS DISTINCT FROM expected_picos": (
                    "concat('is ', amount_picos, ' picos, but the tokens cost ', expected_picos)"
                ),
            },
        ),
    ),
    Check(
        "usage-matches-hold",
        "A usage event has its hold, repeats its owner, request, model and price version, bills the"
        " delivered tokens, and costs what its tokens cost at that price.",
        violations_sql(
            "concat('usage event ', id, ' of hold ', hold_id)",
            f"""
            SELECT e.id, e.hold_id, e.cost_picos, e.billed_token_count, e.delivered_token_count,
                   e.reasoning_token_count, e.billed_reasoning_token_count,
                   h.id AS existing_hold_id,
                   -- A hold that ended in an old month is deleted, and may have an event of later.
                   e.admitted_at < {HOLDS_KEPT_FROM} AS may_be_deleted,
                   (h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model,
                    h.price_version_id)
                   IS DISTINCT FROM
                   (e.organization_id, e.project_id, e.api_key_id, e.request_id, e.model,
                    e.price_version_id) AS differs,
                   {EVENT_COST} AS expected_picos,
                   {NOT_CORRECTED} AS is_billed,
                   -- The request id of a pre-authorized hold is its own id: the request is billed
                   -- under another hold.
                   CASE WHEN e.request_id = e.hold_id THEN 0 ELSE e.delivered_token_count END
                       AS billable_token_count
            FROM usage_events e
            LEFT JOIN holds h ON h.id = e.hold_id
            LEFT JOIN price_versions p ON p.id = e.price_version_id
            WHERE e.settled_at >= {SINCE}
            """,
            {
                "existing_hold_id IS NULL AND NOT may_be_deleted": "'the hold does not exist'",
                "existing_hold_id IS NOT NULL AND differs": "'differs from its hold'",
                "is_billed AND cost_picos IS DISTINCT FROM expected_picos": (
                    "concat('costs ', cost_picos, ' picos, by its price version ', expected_picos)"
                ),
                "billed_token_count <> billable_token_count": (
                    "concat('bills ', billed_token_count, ' of ', delivered_token_count, "
                    "' delivered tokens')"
                ),
                "reasoning_token_count NOT BETWEEN 0 AND delivered_token_count": (
                    "concat('has ', reasoning_token_count, ' reasoning tokens of ', "
                    "delivered_token_count, ' delivered tokens')"
                ),
                # Events of earlier versions bill thinking as output.
                """billed_reasoning_token_count NOT IN (
                0, least(reasoning_token_count, billable_token_count))""": (
                    "concat('bills ', billed_reasoning_token_count, ' of ', "
                    "reasoning_token_count, ' reasoning tokens')"
                ),
            },
        ),
    ),
    Check(
        "usage-parts",
        "The usage events of a hold are part 0, and part 1 if its owner reported more later: no"
        " delivered token is counted twice.",
        violations_sql(
            "concat('hold ', hold_id)",
            f"""
            SELECT suspect.hold_id, events.*
            FROM (
                SELECT hold_id
                FROM usage_events
                WHERE settled_at >= {SINCE}
                GROUP BY hold_id
                HAVING (min(part) <> 0 OR max(part) > 1 OR count(*) <> max(part) + 1)
                   AND max(admitted_at) >= {HOLDS_KEPT_FROM}
            ) AS suspect,
            LATERAL (
                SELECT count(*) AS parts, min(part) AS first, max(part) AS last
                FROM usage_events e
                WHERE e.hold_id = suspect.hold_id
            ) AS events
            """,
            {
                "first <> 0 OR last > 1 OR parts <> last + 1": (
                    "concat('has the parts ', first, ' to ', last, ' in ', parts, ' usage events')"
                )
            },
        ),
    ),
    Check(
        "price-at-admission",
        "The price version of a hold is for its model and its customer's currency, is a list price"
        " or the customer's own, and was in force at the admission.",
        violations_sql(
            "concat('price version ', price_version_id, ', model ', model, ', organization ',"
            " organization_id)",
            f"""
            SELECT c.*, p.model AS price_model, p.currency_code AS price_currency, o.currency_code,
                   p.effective_at, p.organization_id <> c.organization_id AS is_other_customers,
                   p.withdrawn
            FROM (
                SELECT price_version_id, model, organization_id, count(*) AS holds,
                       min(admitted_at) AS first_admitted_at
                FROM holds
                WHERE admitted_at >= {SINCE}
                GROUP BY 1, 2, 3
            ) AS c
            JOIN organizations o ON o.id = c.organization_id
            LEFT JOIN price_versions p ON p.id = c.price_version_id
            """,
            {
                "price_model IS DISTINCT FROM model": (
                    "concat(holds, ' holds are priced as model ', price_model)"
                ),
                "price_currency IS DISTINCT FROM currency_code": (
                    "concat(holds, ' holds are priced in ', price_currency, ', not "
                    "', currency_code)"
                ),
                "is_other_customers": (
                    "concat(holds, ' holds are priced by another customer''s own price')"
                ),
                "withdrawn": "concat(holds, ' holds are priced by a row that ends a price')",
                "effective_at > first_admitted_at": (
                    "concat('a hold was admitted at ', first_admitted_at,"
                    " ', before the price began at ', effective_at)"
                ),
            },
        ),
    ),
)
