"""Usage events: each belongs to a hold, repeats its facts, bills what was delivered, and costs what its tokens cost."""

from __future__ import annotations

from metering.proof.checks import EVENT_COST, NOT_CORRECTED, SINCE, Check, rows_with

USAGE_TELLS_THE_HOLD = Check(
    "usage-tells-the-hold",
    "A usage event has its hold, repeats whose it is, which request, model and price version, bills what was delivered, and costs "
    "what its tokens cost at that price.",
    rows_with(
        "concat('usage event ', id, ' of hold ', hold_id)",
        f"""
        SELECT e.id, e.hold_id, e.cost_picos, e.billed_token_count, e.delivered_token_count, h.id AS known_hold_id,
               (h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, h.price_version_id)
               IS DISTINCT FROM (e.organization_id, e.project_id, e.api_key_id, e.request_id, e.model, e.price_version_id)
               AS differs,
               {EVENT_COST} AS right_cost, {NOT_CORRECTED} AS stands,
               -- A hold that has its own id as request id was taken in advance, for a request that is billed under another hold.
               CASE WHEN e.request_id = e.hold_id THEN 0 ELSE e.delivered_token_count END AS to_bill
        FROM usage_events e LEFT JOIN holds h ON h.id = e.hold_id LEFT JOIN price_versions p ON p.id = e.price_version_id
        WHERE e.settled_at >= {SINCE}
        """,
        {
            "known_hold_id IS NULL": "'there is no such hold'",
            "known_hold_id IS NOT NULL AND differs": "'tells another story than its hold'",
            "stands AND cost_picos IS DISTINCT FROM right_cost": "concat('costs ', cost_picos, "
            "' picos, by its price version ', right_cost)",
            "billed_token_count <> to_bill": "concat('bills ', billed_token_count, ' of ', delivered_token_count, "
            "' delivered tokens')",
        },
    ),
)

USAGE_PARTS = Check(
    "usage-parts",
    "The usage events of a hold are its part 0, and part 1 where more was found later: no delivered token is told twice.",
    rows_with(
        "concat('hold ', hold_id)",
        f"""
        SELECT suspect.hold_id, told.* FROM (
            SELECT hold_id FROM usage_events WHERE settled_at >= {SINCE} GROUP BY hold_id
            HAVING min(part) <> 0 OR max(part) > 1 OR count(*) <> max(part) + 1
        ) AS suspect, LATERAL (
            SELECT count(*) AS parts, min(part) AS first, max(part) AS last FROM usage_events e WHERE e.hold_id = suspect.hold_id
        ) AS told
        """,
        {
            "first <> 0 OR last > 1 OR parts <> last + 1": "concat('has the parts ', first, ' to ', last, ' in ', "
            "parts, ' usage events')"
        },
    ),
)

PRICE_OF_THE_ADMISSION = Check(
    "price-of-the-admission",
    "A hold is priced by a version of its model, in its customer's currency, of the list or its customer's own, that was in force "
    "when it was admitted.",
    rows_with(
        "concat('price version ', price_version_id, ', model ', model, ', organization ', organization_id)",
        f"""
        SELECT c.*, p.model AS price_model, p.currency_code AS price_currency, o.currency_code, p.effective_at,
               p.organization_id <> c.organization_id AS is_anothers, p.withdrawn
        FROM (SELECT price_version_id, model, organization_id, count(*) AS holds, min(admitted_at) AS first FROM holds
              WHERE admitted_at >= {SINCE} GROUP BY 1, 2, 3) c
        JOIN organizations o ON o.id = c.organization_id
        LEFT JOIN price_versions p ON p.id = c.price_version_id
        """,
        {
            "price_model IS DISTINCT FROM model": "concat(holds, ' holds are priced as model ', price_model)",
            "price_currency IS DISTINCT FROM currency_code": "concat(holds, ' holds are priced in ', price_currency, ', not ', "
            "currency_code)",
            "is_anothers": "concat(holds, ' holds are priced by another customer''s own price')",
            "withdrawn": "concat(holds, ' holds are priced by a row that ends a price')",
            "effective_at > first": "concat('a hold was admitted at ', first, ', before the price began at ', effective_at)",
        },
    ),
)

CORRECTIONS_ARE_APPROVED = Check(
    "corrections-are-approved",
    "Usage that is billed by an adjustment is rated nowhere, and the adjustment is approved, its customer's, and of what its "
    "tokens cost.",
    rows_with(
        "concat('adjustment ', adjustment_id)",
        f"""
        SELECT c.adjustment_id, a.amount_picos, sum({EVENT_COST}) AS right_picos, bool_or(e.rated_at IS NOT NULL) AS rated,
               bool_or(a.organization_id IS DISTINCT FROM e.organization_id) AS is_anothers, bool_and(d.approved) AS approved
        FROM usage_corrections c LEFT JOIN usage_events e USING (hold_id, part, settled_at)
        LEFT JOIN price_versions p ON p.id = e.price_version_id
        LEFT JOIN adjustments a ON a.id = c.adjustment_id LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id
        GROUP BY 1, 2
        """,
        {
            "approved IS NOT TRUE": "'is not approved, and corrects usage'",
            "is_anothers": "'corrects usage of another customer'",
            "rated": "'corrects usage that is rated as well'",
            "amount_picos IS DISTINCT FROM right_picos": "concat('is of ', amount_picos, "
            "' picos, and the tokens cost ', right_picos)",
        },
    ),
)

CHECKS = (CORRECTIONS_ARE_APPROVED, USAGE_TELLS_THE_HOLD, USAGE_PARTS, PRICE_OF_THE_ADMISSION)
