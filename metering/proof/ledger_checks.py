"""The ledger: every usage event is posted once, every transaction balances, and its legs are the tokens used, at their prices."""

from __future__ import annotations

from metering.proof.checks import KIND_ROWS, KIND_SUMS, NOT_CORRECTED, SINCE, TOKEN_KINDS, Check, Moment, rows_with

UNRATED_FOR = "10 minutes"  # rating runs every second
POSTED_EVENTS = "usage_events e JOIN ledger_transactions t ON t.id = e.ledger_transaction_id"
PRICES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in TOKEN_KINDS.items())
PRICE = f"CASE token_kind {PRICES} END"
DIFFERENT = "(used_tokens, used_picos) IS DISTINCT FROM (posted_tokens, posted_picos)"
USED_AND_POSTED = """concat(coalesce(used_tokens, 0), ' tokens for ', coalesce(used_picos, 0), ' picos used, ',
    coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted')"""

RATED_IS_POSTED = Check(
    "rated-is-posted",
    "A usage event points to a transaction exactly if it is rated: one for usage, of its own customer and day.",
    rows_with(
        "concat('usage event ', id)",
        f"""
        SELECT e.id, e.rated_at, e.ledger_transaction_id, t.id AS transaction_id, t.kind,
               (t.organization_id, t.effective_at) = (e.organization_id, date_trunc('day', e.settled_at, 'UTC')) AS is_own
        FROM usage_events e LEFT JOIN ledger_transactions t ON t.id = e.ledger_transaction_id
        WHERE e.settled_at >= {SINCE}
        """,
        {
            "rated_at IS NULL AND ledger_transaction_id IS NOT NULL": "concat('is not rated and stands in transaction ', "
            "ledger_transaction_id)",
            "rated_at IS NOT NULL AND transaction_id IS NULL": "concat('was rated at ', rated_at, ' and is not posted')",
            "kind <> 'usage' OR NOT is_own": "concat('stands in transaction ', transaction_id, ', which is another customer''s, '"
            ", 'of another day, or not for usage')",
        },
    ),
)

POSTINGS_ARE_THEIR_USAGE = Check(
    "postings-are-their-usage",
    "The legs of a transaction are the tokens of the usage events behind it, by price version and kind, at exactly their price.",
    rows_with(
        "concat('ledger transaction ', transaction_id, ', price version ', price_version_id, ', ', token_kind)",
        f"""
        SELECT * FROM (
            SELECT transaction_id, price_version_id, token_kind, token_count AS used_tokens, token_count * {PRICE} AS used_picos
            FROM (SELECT t.id AS transaction_id, e.price_version_id, {KIND_SUMS} FROM {POSTED_EVENTS}
                  WHERE t.recorded_at >= {SINCE} GROUP BY 1, 2) sums
            JOIN price_versions p ON p.id = price_version_id, {KIND_ROWS} WHERE token_count <> 0
        ) used FULL JOIN (
            SELECT transaction_id, price_version_id, token_kind, sum(token_count) AS posted_tokens,
                   -sum(amount_picos) AS posted_picos
            FROM ledger_entries l JOIN ledger_transactions t ON t.id = l.transaction_id
            WHERE token_kind IS NOT NULL AND t.recorded_at >= {SINCE} GROUP BY 1, 2, 3
        ) posted USING (transaction_id, price_version_id, token_kind)
        """,
        {DIFFERENT: USED_AND_POSTED},
    ),
)

USAGE_EQUALS_LEDGER = Check(
    "usage-equals-ledger",
    "Per customer, month, model and kind, the tokens and the money of rated usage events are those of the ledger.",
    rows_with(
        "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'), ', model ', model, ', ', token_kind)",
        f"""
        SELECT * FROM (
            SELECT sums.organization_id, month, model, token_kind, sum(token_count) AS used_tokens,
                   sum(token_count * {PRICE}) AS used_picos
            FROM (SELECT organization_id, date_trunc('month', settled_at, 'UTC') AS month, price_version_id, {KIND_SUMS}
                  FROM usage_events WHERE rated_at IS NOT NULL AND settled_at >= date_trunc('month', {SINCE}, 'UTC')
                  GROUP BY 1, 2, 3) sums
            JOIN price_versions p ON p.id = price_version_id, {KIND_ROWS} WHERE token_count <> 0 GROUP BY 1, 2, 3, 4
        ) used FULL JOIN (
            SELECT t.organization_id, date_trunc('month', t.effective_at, 'UTC') AS month, p.model, token_kind,
                   sum(token_count) AS posted_tokens, -sum(amount_picos) AS posted_picos
            FROM ledger_transactions t JOIN ledger_entries l ON l.transaction_id = t.id
            JOIN price_versions p ON p.id = l.price_version_id
            WHERE t.effective_at >= date_trunc('month', {SINCE}, 'UTC') GROUP BY 1, 2, 3, 4
        ) posted USING (organization_id, month, model, token_kind)
        """,
        {DIFFERENT: USED_AND_POSTED},
    ),
)

TRANSACTIONS_BALANCE = Check(
    "transactions-balance",
    "Every ledger transaction has legs that sum to zero in each currency, on accounts of its own customer, in the currency of "
    "their price.",
    f"""
    SELECT concat('ledger transaction ', t.id) AS subject, 'has no legs' AS problem FROM ledger_transactions t
    WHERE t.recorded_at >= {SINCE} AND NOT EXISTS (SELECT FROM ledger_entries l WHERE l.transaction_id = t.id)
    UNION ALL
    SELECT concat('ledger transaction ', l.transaction_id),
           concat('does not sum to zero: ', sum(l.amount_picos), ' ', a.currency_code)
    FROM ledger_entries l JOIN ledger_accounts a ON a.id = l.account_id JOIN ledger_transactions t ON t.id = l.transaction_id
    WHERE t.recorded_at >= {SINCE} GROUP BY l.transaction_id, a.currency_code HAVING sum(l.amount_picos) <> 0
    UNION ALL
    SELECT concat('ledger entry ', l.id), 'stands on an account of another customer, or in another currency than its price'
    FROM ledger_entries l JOIN ledger_accounts a ON a.id = l.account_id JOIN ledger_transactions t ON t.id = l.transaction_id
    LEFT JOIN price_versions p ON p.id = l.price_version_id
    WHERE t.recorded_at >= {SINCE} AND (a.organization_id <> t.organization_id OR p.currency_code <> a.currency_code)
    """,
)

UNRATED_IS_LISTED = Check(
    "unrated-is-listed",
    "The list of what waits for rating is exactly the usage events that are not rated, each once.",
    f"""
    SELECT concat('usage event ', e.id) AS subject, 'is not rated, and not in the list of what waits for it' AS problem
    FROM usage_events e LEFT JOIN unrated_usage w USING (hold_id, part, settled_at)
    WHERE e.rated_at IS NULL AND w.event_id IS NULL AND e.settled_at >= {SINCE} AND {NOT_CORRECTED}
    UNION ALL
    SELECT concat('usage event ', w.event_id), concat('is ', count(*), ' times in the list of what waits for rating')
    FROM unrated_usage w LEFT JOIN usage_events e
        ON (e.id, e.hold_id, e.part, e.settled_at, e.organization_id)
            = (w.event_id, w.hold_id, w.part, w.settled_at, w.organization_id) AND e.rated_at IS NULL
    GROUP BY w.event_id HAVING count(*) > 1 OR count(e.id) = 0
    """,
)

USAGE_IS_RATED = Check(
    "usage-is-rated",
    f"No usage event is unrated {UNRATED_FOR} after it was written: somebody rates, and nothing stands in the way.",
    f"""
    SELECT concat('usage event ', id) AS subject, concat('was settled at ', settled_at, ' and is not rated') AS problem
    FROM usage_events e WHERE rated_at IS NULL AND settled_at < now() - interval '{UNRATED_FOR}' AND {NOT_CORRECTED}
    """,
    Moment.SOON,
)

ALL_IS_RATED = Check(
    "all-is-rated",
    "Nothing is waiting to be rated.",
    f"SELECT concat('usage event ', id) AS subject, 'is not rated' AS problem FROM usage_events e WHERE rated_at IS NULL "
    f"AND {NOT_CORRECTED}",
    Moment.AT_REST,
)

CHECKS = (
    UNRATED_IS_LISTED,
    RATED_IS_POSTED,
    POSTINGS_ARE_THEIR_USAGE,
    USAGE_EQUALS_LEDGER,
    TRANSACTIONS_BALANCE,
    USAGE_IS_RATED,
    ALL_IS_RATED,
)
