"""Checks of receipts.

Each receipt matches its usage event, names the receipt before it, and is in the batch that signs
it. SQL cannot verify signatures: `weir receipt verify` does, with public keys alone.
"""

from __future__ import annotations

from metering.proof.check import OF_REMOVED_MONTH, SINCE, Check, violations_sql

HAS_REASONING = "e.billed_reasoning_token_count > 0"
HAS_SUBJECTS = "num_nonnulls(e.receipt_end_user_hash, e.receipt_labels_hash) > 0"

# Only receipts of version 2 and later have its number.
REASONING_NUMBER = (
    f"CASE WHEN {HAS_REASONING} OR e.receipt_is_timed OR {HAS_SUBJECTS}"
    " THEN int8send(e.billed_reasoning_token_count) ELSE '' END"
)
RECEIPT_NUMBERS = " || ".join(
    REASONING_NUMBER if number == "reasoning" else f"int8send(({number})::bigint)"
    for number in (
        "e.part",
        "e.input_token_count",
        "e.cached_input_token_count",
        "e.billed_token_count",
        "e.embedding_token_count",
        "reasoning",
        "e.price_version_id",
        "e.cost_picos",
        "extract(epoch FROM e.admitted_at) * 1000000",
        "extract(epoch FROM e.settled_at) * 1000000",
        "e.receipt_sequence",
    )
)
RECEIPT_TIMES = " || ".join(
    f"int8send(floor(coalesce((e.timings->>'{name}')::float8, 0) * 1000 + 0.5)::bigint)"
    for name in (
        "ttft_ms",
        "tokens_per_second",
        "itl_p50_ms",
        "itl_p99_ms",
        "itl_max_ms",
        "client_stall_ms",
    )
)

RECEIPT_IDS = " || ".join(
    f"uuid_send(e.{name}_id)" for name in ("organization", "project", "api_key", "request")
)

RECEIPT_TEXTS = " || ".join(
    f"int8send(octet_length(convert_to({text}, 'UTF8'))) || convert_to({text}, 'UTF8')"
    for text in ("p.currency_code", "e.model", "e.outcome")
)

# Between the previous hash and the timings, in version 4 only.
RECEIPT_CONTENT = (
    f"CASE WHEN {HAS_SUBJECTS} THEN int8send(e.receipt_is_timed::int"
    " + 2 * (e.receipt_end_user_hash IS NOT NULL)::int"
    " + 4 * (e.receipt_labels_hash IS NOT NULL)::int) ELSE '' END"
)

# Encoding that docs/reference/receipts.md specifies.
RECEIPT_BYTES = (
    rf"(CASE WHEN {HAS_SUBJECTS} THEN 'weir.receipt.v4\012'"
    r" WHEN e.receipt_is_timed THEN 'weir.receipt.v3\012'"
    rf" WHEN {HAS_REASONING} THEN 'weir.receipt.v2\012' ELSE 'weir.receipt.v1\012' END)::bytea"
    + f" || {RECEIPT_IDS} || {RECEIPT_NUMBERS}"
    + f" || e.previous_receipt_hash || {RECEIPT_CONTENT}"
    + f" || CASE WHEN e.receipt_is_timed THEN {RECEIPT_TIMES} ELSE '' END"
    + " || coalesce(e.receipt_end_user_hash, '') || coalesce(e.receipt_labels_hash, '')"
    + f" || {RECEIPT_TEXTS}"
)

END_USER_HASH = r"""sha256('weir.receipt.end_user.v1\012'::bytea
            || sha256(u.receipt_salt || uuid_send(e.request_id)) || convert_to(u.name, 'UTF8'))"""
LABELS_HASH = r"""(
            SELECT sha256('weir.receipt.labels.v1\012'::bytea || e.receipt_labels_salt
                || int8send(count(*)) || coalesce(string_agg(
                    int8send(octet_length(l.key)) || l.key
                    || int8send(octet_length(l.value)) || l.value, '' ORDER BY l.key), ''))
            FROM (
                SELECT convert_to(key, 'UTF8') AS key, convert_to(value, 'UTF8') AS value
                FROM jsonb_each_text(e.labels)
            ) AS l)"""

# Hashes of the receipts whose usage events are removed.
RETIRED_RECEIPTS = f"retired_receipts WHERE {OF_REMOVED_MONTH}"
ZERO_HASH = "decode(repeat('00', 32), 'hex')"  # named by the first receipt of a chain

RECEIPT_CHECKS = (
    Check(
        "receipt-matches-usage",
        "The hash of a receipt is the SHA-256 of its usage event, encoded as"
        " docs/reference/receipts.md specifies.",
        violations_sql(
            "concat('receipt ', receipt_sequence, ' of project ', project_id)",
            f"""
            SELECT e.project_id, e.receipt_sequence, e.id, e.receipt_hash,
                   sha256({RECEIPT_BYTES}) AS expected_hash
            FROM usage_events e
            JOIN price_versions p ON p.id = e.price_version_id
            WHERE e.receipt_sequence IS NOT NULL
              AND e.settled_at >= {SINCE}
            """,
            {
                "receipt_hash IS DISTINCT FROM expected_hash": (
                    "concat('differs from usage event ', id)"
                )
            },
        ),
    ),
    Check(
        "receipt-subjects",
        "The hashes of end user and labels in a receipt are those of its usage event, unless they"
        " were erased with their salts.",
        violations_sql(
            "concat('receipt ', receipt_sequence, ' of project ', project_id)",
            f"""
            SELECT e.project_id, e.receipt_sequence, e.id, e.receipt_end_user_hash,
                   e.receipt_labels_hash, e.receipt_labels_salt, u.receipt_salt,
                   {END_USER_HASH} AS end_user_hash,
                   {LABELS_HASH} AS labels_hash
            FROM usage_events e
            LEFT JOIN usage_subjects u ON u.id = e.end_user_id
            WHERE e.receipt_sequence IS NOT NULL
              AND {HAS_SUBJECTS}
              AND e.settled_at >= {SINCE}
            """,
            {
                "receipt_salt IS NOT NULL AND receipt_end_user_hash <> end_user_hash": (
                    "concat('has the hash of another end user than usage event ', id)"
                ),
                "receipt_labels_salt IS NOT NULL"
                " AND receipt_labels_hash IS DISTINCT FROM labels_hash": (
                    "concat('has the hash of other labels than usage event ', id)"
                ),
            },
        ),
    ),
    Check(
        "receipt-chains",
        "The receipts of a project are numbered without a gap or fork, and each names the receipt"
        " before it and is not settled earlier.",
        violations_sql(
            "concat('receipt ', receipt_sequence, ' of project ', project_id)",
            f"""
            SELECT project_id, receipt_sequence, previous_receipt_hash, settled_at,
                   lag(last_sequence) OVER chain AS previous_sequence,
                   lag(last_hash) OVER chain AS previous_hash,
                   lag(settled_at) OVER chain AS previous_settled_at,
                   {SINCE} = '-infinity' AS is_whole_chain, lacks_hashes
            FROM (
                SELECT project_id, receipt_sequence, receipt_sequence AS last_sequence,
                       previous_receipt_hash, receipt_hash AS last_hash, settled_at,
                       false AS lacks_hashes
                FROM usage_events
                WHERE receipt_sequence IS NOT NULL
                UNION ALL
                SELECT project_id, first_sequence, last_sequence, previous_hash,
                       substr(hashes, octet_length(hashes) - 31),
                       month::timestamp AT TIME ZONE 'UTC',
                       receipt_count <> last_sequence - first_sequence + 1
                       OR octet_length(hashes) <> 32 * receipt_count
                FROM {RETIRED_RECEIPTS}
            ) AS receipts
            WHERE settled_at >= {SINCE}
            WINDOW chain AS (PARTITION BY project_id ORDER BY receipt_sequence)
            """,
            {
                "receipt_sequence = previous_sequence": "'exists twice'",
                """receipt_sequence > 1 + coalesce(
            previous_sequence, CASE WHEN is_whole_chain THEN 0 ELSE receipt_sequence - 1 END)""": (
                    "concat('comes after receipt ', coalesce(previous_sequence, 0))"
                ),
                f"""previous_receipt_hash <> coalesce(
            previous_hash, CASE WHEN is_whole_chain THEN {ZERO_HASH} END)""": (
                    "'does not name the receipt before it'"
                ),
                "lacks_hashes": "'and those after it have too few or too many hashes'",
                "settled_at < previous_settled_at": (
                    "concat('is settled at ', settled_at, ', before the receipt before it')"
                ),
            },
        ),
    ),
    Check(
        "chain-heads",
        "Every project has a receipt chain, which ends with the project's last receipt.",
        violations_sql(
            "concat('project ', project_id)",
            f"""
            SELECT p.id AS project_id, c.project_id AS chain_project_id, c.last_sequence,
                   c.last_hash, c.last_settled_at, e.receipt_sequence, e.receipt_hash, e.settled_at
            FROM projects p
            LEFT JOIN receipt_chains c ON c.project_id = p.id
            LEFT JOIN (
                SELECT DISTINCT ON (project_id)
                       project_id, receipt_sequence, receipt_hash, settled_at
                FROM (
                    SELECT project_id, receipt_sequence, receipt_hash, settled_at
                    FROM usage_events
                    WHERE receipt_sequence IS NOT NULL
                    UNION ALL
                    SELECT project_id, last_sequence, substr(hashes, octet_length(hashes) - 31),
                           month::timestamp AT TIME ZONE 'UTC'
                    FROM {RETIRED_RECEIPTS}
                ) AS receipts
                ORDER BY project_id, receipt_sequence DESC
            ) AS e ON e.project_id = p.id
            """,
            {
                "chain_project_id IS NULL": "'has no chain of receipts'",
                "last_sequence <> coalesce(receipt_sequence, 0)": (
                    "concat('has a chain that ends with receipt ', last_sequence,"
                    " ', but its last one is ', coalesce(receipt_sequence, 0))"
                ),
                f"""last_sequence = receipt_sequence
            AND last_hash <> coalesce(receipt_hash, {ZERO_HASH})""": (
                    "'has a chain with another hash than its last receipt'"
                ),
                "settled_at > last_settled_at": (
                    "concat('has a chain that ends at ', last_settled_at,"
                    " ', before its last receipt')"
                ),
            },
        ),
    ),
    Check(
        "receipts-signed",
        "A signed receipt is among the hashes of its batch, a batch has no others, and the name of"
        " every signing key is derived from its public key.",
        f"""
        SELECT concat('receipt ', e.receipt_sequence, ' of project ', e.project_id) AS subject,
               CASE WHEN b.id IS NULL
                    THEN concat('receipt batch ', e.receipt_batch_id, ' does not exist')
                    ELSE concat('is not among the receipts of batch ', b.id)
               END AS problem
        FROM usage_events e
        LEFT JOIN receipt_batches b ON b.id = e.receipt_batch_id
        WHERE e.receipt_batch_id IS NOT NULL
          AND e.settled_at >= {SINCE}
          AND coalesce(position(e.receipt_hash IN b.hashes), 0) = 0
        UNION ALL
        SELECT concat('receipt batch ', b.id), 'has more or fewer hashes than receipts'
        FROM receipt_batches b
        LEFT JOIN (
            SELECT receipt_batch_id, count(*) AS receipts
            FROM usage_events
            WHERE receipt_batch_id IS NOT NULL
            GROUP BY 1
        ) AS e ON e.receipt_batch_id = b.id
        WHERE octet_length(b.hashes) <> 32 * coalesce(e.receipts, 0)
          -- Batches of an old month, and their neighbours, have lost receipts to its removal.
          AND NOT (octet_length(b.hashes) > 32 * coalesce(e.receipts, 0)
                   AND b.id <= (SELECT coalesce(max(receipt_batch_id), 0) FROM retired_months))
        UNION ALL
        SELECT concat('receipt key ', k.id), 'has a name that does not match its public key'
        FROM receipt_keys k
        WHERE left(encode(sha256(k.public_key), 'hex'), 16) <> k.id
        """,
    ),
)
