"""Checks of usage events and of their receipts.

Each event belongs to a hold, repeats its facts, bills what was delivered, and costs what its tokens cost. Each receipt says what
its event says, names the one before, and is under the signature of its batch. Signatures themselves are not checked here, since SQL
cannot: `weir receipt verify` does, with nothing but public keys.
"""

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

USAGE_CHECKS = (CORRECTIONS_ARE_APPROVED, USAGE_TELLS_THE_HOLD, USAGE_PARTS, PRICE_OF_THE_ADMISSION)


NUMBERS = (
    "e.part",
    "e.input_token_count",
    "e.cached_input_token_count",
    "e.billed_token_count",
    "e.embedding_token_count",
    "e.price_version_id",
    "e.cost_picos",
    "extract(epoch FROM e.admitted_at) * 1000000",
    "extract(epoch FROM e.settled_at) * 1000000",
    "e.receipt_sequence",
)
IDS = " || ".join(f"uuid_send(e.{name}_id)" for name in ("organization", "project", "api_key", "request"))
TEXTS = " || ".join(
    f"int8send(octet_length(convert_to({text}, 'UTF8'))) || convert_to({text}, 'UTF8')"
    for text in ("p.currency_code", "e.model", "e.outcome")
)
# The bytes of docs/receipts.md.
ENCODED = (
    rf"'weir.receipt.v1\n'::bytea || {IDS} || ".replace(r"\n", r"\012")
    + " || ".join(f"int8send(({number})::bigint)" for number in NUMBERS)
    + f" || e.previous_receipt_hash || {TEXTS}"
)
NOTHING = "decode(repeat('00', 32), 'hex')"

RECEIPT_TELLS_THE_USAGE = Check(
    "receipt-tells-the-usage",
    "The hash of a receipt is that of what its usage event says, byte for byte as docs/receipts.md has it.",
    rows_with(
        "concat('receipt ', receipt_sequence, ' of project ', project_id)",
        f"""
        SELECT e.project_id, e.receipt_sequence, e.id, e.receipt_hash, sha256({ENCODED}) AS right_hash
        FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
        WHERE e.receipt_sequence IS NOT NULL AND e.settled_at >= {SINCE}
        """,
        {"receipt_hash IS DISTINCT FROM right_hash": "concat('usage event ', id, ' says something else')"},
    ),
)

RECEIPTS_IN_CHAINS = Check(
    "receipts-in-chains",
    "The receipts of a project are numbered without gap or fork, each names the one before, and none is settled before it.",
    rows_with(
        "concat('receipt ', receipt_sequence, ' of project ', project_id)",
        f"""
        SELECT project_id, receipt_sequence, previous_receipt_hash, settled_at, lag(receipt_sequence) OVER w AS before,
               lag(receipt_hash) OVER w AS hash_before, lag(settled_at) OVER w AS settled_before
        FROM usage_events WHERE receipt_sequence IS NOT NULL AND settled_at >= {SINCE}
        WINDOW w AS (PARTITION BY project_id ORDER BY receipt_sequence)
        """,
        {
            "receipt_sequence = before": "'stands there twice'",
            f"receipt_sequence > coalesce(before, CASE WHEN {SINCE} = '-infinity' THEN 0 ELSE receipt_sequence - 1 END) + 1": (
                "concat('comes after receipt ', coalesce(before, 0))"
            ),
            f"previous_receipt_hash <> coalesce(hash_before, CASE WHEN {SINCE} = '-infinity' THEN {NOTHING} END)": (
                "'does not name the receipt before it'"
            ),
            "settled_at < settled_before": "concat('is settled at ', settled_at, ', before the receipt before it')",
        },
    ),
)

CHAIN_HEADS = Check(
    "chain-heads",
    "A project's chain ends with its last receipt, and every project has a chain.",
    rows_with(
        "concat('project ', project_id)",
        """
        SELECT p.id AS project_id, c.project_id AS known, c.last_sequence, c.last_hash, c.last_settled_at,
               e.receipt_sequence, e.receipt_hash, e.settled_at
        FROM projects p LEFT JOIN receipt_chains c ON c.project_id = p.id
        LEFT JOIN (SELECT DISTINCT ON (project_id) project_id, receipt_sequence, receipt_hash, settled_at FROM usage_events
                   WHERE receipt_sequence IS NOT NULL ORDER BY project_id, receipt_sequence DESC) e ON e.project_id = p.id
        """,
        {
            "known IS NULL": "'has no chain of receipts'",
            "last_sequence <> coalesce(receipt_sequence, 0)": (
                "concat('has come to receipt ', last_sequence, ', but its last one is ', coalesce(receipt_sequence, 0))"
            ),
            f"last_sequence = receipt_sequence AND last_hash <> coalesce(receipt_hash, {NOTHING})": (
                "'goes on from another receipt'"
            ),
            "settled_at > last_settled_at": "concat('may go on at ', last_settled_at, ', before its last receipt')",
        },
    ),
)

RECEIPTS_SIGNED = Check(
    "receipts-signed",
    "A receipt that was signed is among those whose root its batch signs, and every batch names a key by its public half.",
    f"""
    SELECT concat('receipt ', e.receipt_sequence, ' of project ', e.project_id) AS subject,
           CASE WHEN b.id IS NULL THEN concat('receipt batch ', e.receipt_batch_id, ' is not there')
                ELSE concat('is not among the receipts of batch ', b.id) END AS problem
    FROM usage_events e LEFT JOIN receipt_batches b ON b.id = e.receipt_batch_id
    WHERE e.receipt_batch_id IS NOT NULL AND e.settled_at >= {SINCE} AND coalesce(position(e.receipt_hash IN b.hashes), 0) = 0
    UNION ALL
    SELECT concat('receipt batch ', b.id), 'has more or fewer hashes than receipts'
    FROM receipt_batches b LEFT JOIN (SELECT receipt_batch_id, count(*) AS receipts FROM usage_events
        WHERE receipt_batch_id IS NOT NULL GROUP BY 1) e ON e.receipt_batch_id = b.id
    WHERE octet_length(b.hashes) <> 32 * coalesce(e.receipts, 0)
    UNION ALL
    SELECT concat('receipt key ', k.id), 'has another name than its public key gives'
    FROM receipt_keys k WHERE left(encode(sha256(k.public_key), 'hex'), 16) <> k.id
    """,
)

RECEIPT_CHECKS = (RECEIPT_TELLS_THE_USAGE, RECEIPTS_IN_CHAINS, CHAIN_HEADS, RECEIPTS_SIGNED)
