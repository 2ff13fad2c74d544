"""Checks of rating and the ledger.

Every usage event is posted once, every transaction balances, and its entries are the tokens used at
their prices.
"""

from __future__ import annotations

from metering.proof.check import (
    DAY_SUMS,
    EVENTS_KEPT_FROM,
    SINCE,
    Check,
    Moment,
    violations_sql,
)
from metering.proof.usage_checks import KIND_ROWS, KIND_SUMS, NOT_CORRECTED, TOKEN_KINDS

UNRATED_FOR = "10 minutes"  # rating runs every second
POSTED_EVENTS = "usage_events e JOIN ledger_transactions t ON t.id = e.ledger_transaction_id"
PRICES = " ".join(f"WHEN '{kind}' THEN {price}" for kind, (_, price) in TOKEN_KINDS.items())
PRICE = f"CASE token_kind {PRICES} END"

USED_DIFFERS_FROM_POSTED = (
    "(used_tokens, used_picos) IS DISTINCT FROM (posted_tokens, posted_picos)"
)

USED_AND_POSTED = (
    "concat(coalesce(used_tokens, 0), ' tokens for ', coalesce(used_picos, 0), ' picos used, ',"
    " coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted')"
)

LEDGER_CHECKS = (
    Check(
        "unrated-usage-is-queued",
        "The queue of usage to rate, `unrated_usage`, holds each unrated usage event once, and"
        " nothing else.",
        f"""
        SELECT concat('usage event ', e.id) AS subject,
               'is not rated and is missing from unrated_usage' AS problem
        FROM usage_events e
        LEFT JOIN unrated_usage w USING (hold_id, part, settled_at)
        WHERE e.rated_at IS NULL
          AND w.event_id IS NULL
          AND e.settled_at >= {SINCE}
          AND {NOT_CORRECTED}
        UNION ALL
        SELECT concat('usage event ', w.event_id),
               concat('is ', count(*), ' times in unrated_usage, of which unrated: ', count(e.id))
        FROM unrated_usage w
        LEFT JOIN usage_events e
            ON (e.id, e.hold_id, e.part, e.settled_at, e.organization_id)
             = (w.event_id, w.hold_id, w.part, w.settled_at, w.organization_id)
           AND e.rated_at IS NULL
        GROUP BY w.event_id
        HAVING count(*) > 1 OR count(e.id) = 0
        """,
    ),
    Check(
        "rated-usage-is-posted",
        "A usage event names a ledger transaction exactly if it is rated: a usage transaction of"
        " its customer and day.",
        violations_sql(
            "concat('usage event ', id)",
            f"""
            SELECT e.id, e.rated_at, e.ledger_transaction_id, t.id AS transaction_id, t.kind,
                   (t.organization_id, t.effective_at)
                   = (e.organization_id, date_trunc('day', e.settled_at, 'UTC')) AS is_own
            FROM usage_events e
            LEFT JOIN ledger_transactions t ON t.id = e.ledger_transaction_id
            WHERE e.settled_at >= {SINCE}
            """,
            {
                "rated_at IS NULL AND ledger_transaction_id IS NOT NULL": (
                    "concat('is not rated but is in transaction ', ledger_transaction_id)"
                ),
                "rated_at IS NOT NULL AND transaction_id IS NULL": (
                    "concat('was rated at ', rated_at, ' and is not posted')"
                ),
                "kind <> 'usage' OR NOT is_own": (
                    "concat('is in transaction ', transaction_id,"
                    " ', which belongs to another customer or day, or is not for usage')"
                ),
            },
        ),
    ),
    Check(
        "postings-match-usage",
        "The entries of a transaction are the tokens of its usage events, by price version and"
        " kind, at exactly their price.",
        violations_sql(
            "concat('ledger transaction ', transaction_id, ', price version ', price_version_id,"
            " ', ', token_kind)",
            f"""
            SELECT *
            FROM (
                SELECT transaction_id, price_version_id, token_kind,
                       token_count AS used_tokens,
                       token_count * {PRICE} AS used_picos
                FROM (
                    SELECT t.id AS transaction_id, e.price_version_id, {KIND_SUMS}
                    FROM {POSTED_EVENTS}
                    WHERE t.recorded_at >= {SINCE}
                      AND t.effective_at >= {EVENTS_KEPT_FROM}
                    GROUP BY 1, 2
                ) AS sums
                JOIN price_versions p ON p.id = price_version_id,
                {KIND_ROWS}
                WHERE token_count <> 0
            ) AS used
            FULL JOIN (
                SELECT transaction_id, price_version_id, token_kind,
                       sum(token_count) AS posted_tokens,
                       -sum(amount_picos) AS posted_picos
                FROM ledger_entries l
                JOIN ledger_transactions t ON t.id = l.transaction_id
                WHERE token_kind IS NOT NULL
                  AND t.recorded_at >= {SINCE}
                  AND t.effective_at >= {EVENTS_KEPT_FROM}
                GROUP BY 1, 2, 3
            ) AS posted USING (transaction_id, price_version_id, token_kind)
            """,
            {USED_DIFFERS_FROM_POSTED: USED_AND_POSTED},
        ),
    ),
    Check(
        "usage-equals-ledger",
        "For each customer, month, model and kind of token, rated usage events and the ledger have"
        " the same tokens and money; so have the sums that replace the events of an old month.",
        violations_sql(
            "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'), ', model ',"
            " model, ', ', token_kind)",
            f"""
            SELECT *
            FROM (
                SELECT sums.organization_id, month, model, token_kind,
                       sum(token_count) AS used_tokens,
                       sum(token_count * {PRICE}) AS used_picos
                FROM (
                    SELECT organization_id, date_trunc('month', settled_at, 'UTC') AS month,
                           price_version_id, {KIND_SUMS}
                    FROM usage_events
                    WHERE rated_at IS NOT NULL
                      AND settled_at >= date_trunc('month', {SINCE}, 'UTC')
                    GROUP BY 1, 2, 3
                    UNION ALL
                    SELECT organization_id, date_trunc('month', settled_at, 'UTC'),
                           price_version_id, {KIND_SUMS}
                    FROM {DAY_SUMS}
                    WHERE billing_month IS NOT NULL
                      AND settled_at >= date_trunc('month', {SINCE}, 'UTC')
                    GROUP BY 1, 2, 3
                ) AS sums
                JOIN price_versions p ON p.id = price_version_id,
                {KIND_ROWS}
                WHERE token_count <> 0
                GROUP BY 1, 2, 3, 4
            ) AS used
            FULL JOIN (
                SELECT t.organization_id, date_trunc('month', t.effective_at, 'UTC') AS month,
                       p.model, token_kind,
                       sum(token_count) AS posted_tokens,
                       -sum(amount_picos) AS posted_picos
                FROM ledger_transactions t
                JOIN ledger_entries l ON l.transaction_id = t.id
                JOIN price_versions p ON p.id = l.price_version_id
                WHERE t.effective_at >= date_trunc('month', {SINCE}, 'UTC')
                GROUP BY 1, 2, 3, 4
            ) AS posted USING (organization_id, month, model, token_kind)
            """,
            {USED_DIFFERS_FROM_POSTED: USED_AND_POSTED},
        ),
    ),
    Check(
        "day-sums-equal-ledger",
        "The sums that replace the usage events of an old month have, for each customer, day, month"
        " of the bill, price version and kind of token, the tokens of the ledger.",
        violations_sql(
            "concat('organization ', organization_id, ', ', day, ' billed in ', billing_month,"
            " ', price version ', price_version_id, ', ', token_kind)",
            f"""
            SELECT *
            FROM (
                SELECT organization_id, settled_at AS day, billing_month, price_version_id,
                       token_kind, token_count AS used_tokens
                FROM (
                    SELECT organization_id, settled_at, billing_month, price_version_id, {KIND_SUMS}
                    FROM {DAY_SUMS}
                    WHERE billing_month IS NOT NULL
                    GROUP BY 1, 2, 3, 4
                ) AS sums,
                {KIND_ROWS}
                WHERE token_count <> 0
            ) AS used
            FULL JOIN (
                SELECT t.organization_id, t.effective_at AS day, t.billing_month,
                       l.price_version_id, l.token_kind, sum(l.token_count) AS posted_tokens
                FROM ledger_transactions t
                JOIN ledger_entries l ON l.transaction_id = t.id AND l.token_kind IS NOT NULL
                WHERE t.effective_at < {EVENTS_KEPT_FROM}
                GROUP BY 1, 2, 3, 4, 5
            ) AS posted
            USING (organization_id, day, billing_month, price_version_id, token_kind)
            """,
            {
                "used_tokens IS DISTINCT FROM posted_tokens": (
                    "concat(coalesce(used_tokens, 0), ' tokens used, ', coalesce(posted_tokens, 0),"
                    " ' posted')"
                )
            },
        ),
    ),
    Check(
        "transactions-balance",
        "Every ledger transaction has entries, which sum to zero in each currency and are on"
        " accounts of its customer, in the currency of their price.",
        f"""
        SELECT concat('ledger transaction ', t.id) AS subject, 'has no entries' AS problem
        FROM ledger_transactions t
        WHERE t.recorded_at >= {SINCE}
          AND NOT EXISTS (SELECT FROM ledger_entries l WHERE l.transaction_id = t.id)
        UNION ALL
        SELECT concat('ledger transaction ', l.transaction_id),
               concat('does not sum to zero: ', sum(l.amount_picos), ' ', a.currency_code)
        FROM ledger_entries l
        JOIN ledger_accounts a ON a.id = l.account_id
        JOIN ledger_transactions t ON t.id = l.transaction_id
        WHERE t.recorded_at >= {SINCE}
        GROUP BY l.transaction_id, a.currency_code
        HAVING sum(l.amount_picos) <> 0
        UNION ALL
        SELECT concat('ledger entry ', l.id),
               'is on an account of another customer or in another currency than its price'
        FROM ledger_entries l
        JOIN ledger_accounts a ON a.id = l.account_id
        JOIN ledger_transactions t ON t.id = l.transaction_id
        LEFT JOIN price_versions p ON p.id = l.price_version_id
        WHERE t.recorded_at >= {SINCE}
          AND (a.organization_id <> t.organization_id OR p.currency_code <> a.currency_code)
        """,
    ),
    Check(
        "usage-is-rated",
        f"No usage event is unrated {UNRATED_FOR} after it was settled, while a billing worker"
        " runs.",
        f"""
        SELECT concat('usage event ', id) AS subject,
               concat('was settled at ', settled_at, ' and is not rated') AS problem
        FROM usage_events e
        WHERE rated_at IS NULL
          AND settled_at < now() - interval '{UNRATED_FOR}'
          AND {NOT_CORRECTED}
        """,
        Moment.SOON,
    ),
    Check(
        "all-usage-is-rated",
        "No usage event waits to be rated.",
        f"""
        SELECT concat('usage event ', id) AS subject, 'is not rated' AS problem
        FROM usage_events e
        WHERE rated_at IS NULL
          AND {NOT_CORRECTED}
        """,
        Moment.AT_REST,
    ),
)
