"""Receipts: each says what its usage event says, names the one before, and stands under the signature of its batch.

Signatures themselves are not checked here, since SQL cannot: `weir receipt verify` does, with nothing but public keys.
"""

from __future__ import annotations

from metering.proof.checks import SINCE, Check, rows_with

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

CHECKS = (RECEIPT_TELLS_THE_USAGE, RECEIPTS_IN_CHAINS, CHAIN_HEADS, RECEIPTS_SIGNED)
