"""`weir fsck`: read-only checks of a database, all on one snapshot, including its triggers and
constraints.

The checks share no code with the rest of the server: windows, weights, prices and sums are written
here a second time, in SQL, so that one mistake cannot hide another. Each query is set-based and has
one parameter, `since` ('-infinity' for all rows).

Usage events and receipts. Each event belongs to a hold, repeats the hold's facts, bills the
delivered tokens, and costs what its tokens cost. Each receipt matches its event, names the receipt
before it, and is in the batch that signs it. SQL cannot verify signatures: `weir receipt verify`
does, with public keys alone.

Holds and quota counters. Each hold ends once, has the usage events of that end, and is charged to
its own organization only. A counter is a sum over holds: the reservations of live holds and the
tokens that their extensions posted, by calendar window; the usage events of settled holds; the
leases of expired holds until their owners report; nothing for voided holds. `held` plus `used` is
within the limit.

Ledger, closed months and export. Every usage event is posted once, every transaction balances, and
its entries are the tokens used at their prices. Invoices match the ledger and the customer's
account, add up, and are numbered without a gap; they are few, so all of them are checked whatever
`since` is. The export batches of an hour contain the tokens used in it, each token once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg

from metering.core.errors import InvalidValue
from metering.store.db import (
    CONNECT_TIMEOUT_S,
    SETTLE,
    connection_options,
    psycopg_conninfo,
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
SINCE = "%(since)s::timestamptz"
# Usage event e is not billed by an adjustment instead of at its own cost.
NOT_CORRECTED = """NOT EXISTS (
    SELECT FROM usage_corrections c
    WHERE (c.hold_id, c.part, c.settled_at) = (e.hold_id, e.part, e.settled_at)
)"""

HAS_REASONING = "e.billed_reasoning_token_count > 0"
RECEIPT_NUMBERS = [
    f"int8send(({number})::bigint)"
    for number in (
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
]
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
# Encoding that docs/reference/receipts.md specifies.
RECEIPT_BYTES = (
    r"(CASE WHEN e.receipt_is_timed THEN 'weir.receipt.v3\012'"
    rf" WHEN {HAS_REASONING} THEN 'weir.receipt.v2\012' ELSE 'weir.receipt.v1\012' END)::bytea"
    + f" || {RECEIPT_IDS} || "
    + " || ".join(RECEIPT_NUMBERS)
    + " || e.previous_receipt_hash"
    + f" || CASE WHEN e.receipt_is_timed THEN {RECEIPT_TIMES} ELSE '' END || {RECEIPT_TEXTS}"
)
ZERO_HASH = "decode(repeat('00', 32), 'hex')"  # named by the first receipt of a chain
OVERDUE = "10 minutes"  # sixty sweeps: the owner and every sweep have had their chance
USED_MAX = 2**63 - 1  # a counter saturates here
# Nearly every hold has its whole charge in one window, that of the minute of its admission.
ONE_WINDOW = "(cardinality(h.posted_minutes) = 0 OR r.charge IN ('requests', 'running'))"
CHARGED_AT = "CASE charge WHEN 'requests' THEN admitted_at ELSE charged_at END"
# A hold that was extended later leaves in each such minute the charge of the tokens delivered by
# then, less that of the minutes before. `posted_minutes` alternates minutes and posted totals; mark
# 0 is the end of the hold.
SEVERAL_MINUTES = "cardinality(h.posted_minutes) > 0"
TOKENS_OR_MONEY = "r.charge IN ('tokens', 'money')"
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
MONTH_SUBJECT = "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))"
# Hours older than this at the first run of the export have no batches.
FIRST_RUN_LOOKBACK = "35 days"
# Usage that was rated this shortly before the last scan may not have been visible to it.
LATE_MARGIN = "150 seconds"
FROM_HOUR = f"date_trunc('hour', {SINCE}, 'UTC')"
BATCH_SUBJECT = (
    "concat('organization ', organization_id, ', price version ', price_version_id, ', ',"
    " token_kind, ', hour ', hour)"
)
# Tables with a trigger `TABLE_append_only`. Some of them have a further trigger, which says what
# may change in their rows.
APPEND_ONLY = """
    adjustment_decisions adjustments alerts audit_log billing_months credit_applications
    credit_grants document_series invoice_letterheads invoice_lines invoices issued_documents
    ledger_accounts ledger_entries ledger_transactions meter_batches month_closings plan_assignments
    plan_versions price_versions receipt_batches receipt_keys stripe_events stripe_late_items
    stripe_month_items stripe_month_settlements usage_corrections usage_events
"""
# Each trigger with its function. A migrated database has exactly these; a test compares them.
TRIGGERS = {f"{table}_append_only": "refuse_change" for table in APPEND_ONLY.split()} | {
    "api_keys_no_delete": "refuse_deletion",
    "api_keys_update_recorded": "api_keys_update_recorded",
    "billing_months_close_in_order": "billing_months_close_in_order",
    "billing_months_close_once": "billing_month_closes_once",
    "credit_applications_within_grant": "credit_within_grant",
    "document_series_consecutive": "document_series_consecutive",
    "holds_belong_together": "holds_belong_together",
    "holds_end_once": "hold_ends_once",
    "holds_no_delete": "refuse_deletion",
    "invoice_lines_add_up": "invoice_adds_up",
    "ledger_entries_balanced": "ledger_balanced",
    "ledger_months_open": "ledger_months_open",
    "meter_batches_invoiced_once": "meter_batch_invoiced_once",
    "meter_batches_restrict_update": "meter_batch_keeps_tokens",
    "organizations_no_delete": "refuse_deletion",
    "price_versions_insert_recorded": "price_versions_insert_recorded",
    "projects_create_receipt_chain": "create_receipt_chain",
    "projects_no_delete": "refuse_deletion",
    "quotas_delete_recorded": "quotas_delete_recorded",
    "quotas_insert_recorded": "quotas_insert_recorded",
    "quotas_set_changed_at": "quotas_set_changed_at",
    "quotas_update_recorded": "quotas_update_recorded",
    "receipt_chains_no_delete": "refuse_change",
    "receipt_chains_only_forward": "refuse_chain_rewind",
    "stripe_events_restrict_update": "stripe_event_keeps_payload",
    "stripe_late_items_restrict_update": "stripe_late_item_keeps_amount",
    "stripe_month_items_restrict_update": "stripe_month_item_keeps_amount",
    "stripe_month_settlements_restrict_update": "stripe_month_settled_once",
    "usage_events_match_holds": "usage_events_match_holds",
    "usage_events_partition": "refuse_partition",
    "usage_events_posted": "usage_events_posted",
    "usage_events_rated_once": "usage_event_changed",
}
TRIGGER_ROWS = ", ".join(f"('{trigger}', '{function}')" for trigger, function in TRIGGERS.items())
SAMPLE_MAX = 10  # violations reported per check, next to their total number
# Sums over millions of rows: in memory where possible, without a time limit, since a read-only
# transaction blocks no writer.
SETTINGS = {
    "work_mem": "256MB",
    "statement_timeout": "0",
    "jit": "off",
    "max_parallel_workers_per_gather": "4",
}
ALL_TIME = "-infinity"


class Moment(StrEnum):
    """Time at which a check must pass.

    always: at every commit. soon: within minutes of a commit, while the background work runs.
    at_rest: after every process has stopped and all holds are swept and all usage is rated.
    """

    ALWAYS = "always"
    SOON = "soon"
    AT_REST = "at_rest"


@dataclass(frozen=True, slots=True)
class Check:
    """Invariant of the database, as a sentence, and SQL that selects its violations."""

    name: str
    proves: str
    sql: str
    moment: Moment = Moment.ALWAYS


def violations_sql(subject: str, source: str, problems: Mapping[str, str]) -> str:
    """Return SQL that selects the rows of `source` that meet a condition, a key of `problems`; its
    value is the SQL of the problem's text.

    Texts are built for those rows only, so that a check costs what its conditions cost.
    """
    texts = ",\n        ".join(
        f"CASE WHEN {condition} THEN {problem} END" for condition, problem in problems.items()
    )
    any_condition = "\n   OR ".join(f"({condition})" for condition in problems)
    return f"""
SELECT {subject} AS subject,
       concat_ws('; ',
        {texts}) AS problem
FROM ({source}) AS candidates
WHERE {any_condition}
"""


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
                "existing_hold_id IS NULL": "'the hold does not exist'",
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
                HAVING min(part) <> 0 OR max(part) > 1 OR count(*) <> max(part) + 1
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


# Only receipts that bill reasoning or have timings have its number.
RECEIPT_NUMBERS.insert(
    5,
    f"CASE WHEN {HAS_REASONING} OR e.receipt_is_timed"
    " THEN int8send(e.billed_reasoning_token_count) ELSE '' END",
)


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
        "receipt-chains",
        "The receipts of a project are numbered without a gap or fork, and each names the receipt"
        " before it and is not settled earlier.",
        violations_sql(
            "concat('receipt ', receipt_sequence, ' of project ', project_id)",
            f"""
            SELECT project_id, receipt_sequence, previous_receipt_hash, settled_at,
                   lag(receipt_sequence) OVER chain AS previous_sequence,
                   lag(receipt_hash) OVER chain AS previous_hash,
                   lag(settled_at) OVER chain AS previous_settled_at,
                   {SINCE} = '-infinity' AS is_whole_chain
            FROM usage_events
            WHERE receipt_sequence IS NOT NULL
              AND settled_at >= {SINCE}
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
            """
            SELECT p.id AS project_id, c.project_id AS chain_project_id, c.last_sequence,
                   c.last_hash, c.last_settled_at, e.receipt_sequence, e.receipt_hash, e.settled_at
            FROM projects p
            LEFT JOIN receipt_chains c ON c.project_id = p.id
            LEFT JOIN (
                SELECT DISTINCT ON (project_id)
                       project_id, receipt_sequence, receipt_hash, settled_at
                FROM usage_events
                WHERE receipt_sequence IS NOT NULL
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
        UNION ALL
        SELECT concat('receipt key ', k.id), 'has a name that does not match its public key'
        FROM receipt_keys k
        WHERE left(encode(sha256(k.public_key), 'hex'), 16) <> k.id
        """,
    ),
)


# A hold with the sums of its usage events. `usage-parts` proves that it has two at most, so that
# nothing has to be grouped.
HOLDS_WITH_EVENTS = """
SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.model, h.price_version_id, h.state,
       h.quota_ids, h.admitted_at, h.charged_at, h.ended_at,
       h.input_token_count, h.cached_input_token_count, h.leased_token_count,
       h.delivered_token_count, h.posted_token_count, h.posted_minutes, h.embedding,
       h.reasoning_token_count,
       num_nonnulls(first.id, second.id) AS parts,
       coalesce(first.input_token_count + first.embedding_token_count, 0)
           + coalesce(second.input_token_count + second.embedding_token_count, 0) AS event_input,
       coalesce(first.embedding_token_count, 0)
           + coalesce(second.embedding_token_count, 0) AS event_embedding,
       coalesce(first.delivered_token_count, 0)
           + coalesce(second.delivered_token_count, 0) AS event_delivered,
       coalesce(first.billed_token_count, 0)
           + coalesce(second.billed_token_count, 0) AS event_billed,
       coalesce(first.billed_reasoning_token_count, 0)
           + coalesce(second.billed_reasoning_token_count, 0) AS event_reasoning,
       first.outcome
FROM holds h
LEFT JOIN usage_events first ON first.hold_id = h.id AND first.part = 0
LEFT JOIN usage_events second ON second.hold_id = h.id AND second.part = 1
"""


NO_LIVE_HOLDS = Check(
    "no-live-holds",
    "No hold is live when no process runs.",
    """
    SELECT concat('hold ', id) AS subject,
           concat('of process ', process_id, ' is still live') AS problem
    FROM holds
    WHERE state = 'held'
    """,
    Moment.AT_REST,
)

HOLD_CHECKS = (
    Check(
        "holds-end-once",
        "A hold is live or has ended in one way, with the usage events of that end: none if it is"
        " live or voided, one with the delivered tokens if settled, the known tokens if expired.",
        violations_sql(
            "concat('hold ', id, ' (', state, ')')",
            f"""
            {HOLDS_WITH_EVENTS}
            WHERE h.ended_at IS NULL OR h.ended_at >= {SINCE}
            """,
            {
                "(ended_at IS NULL) <> (state = 'held')": (
                    "concat('ended at ', coalesce(ended_at::text, 'no time'))"
                ),
                "state IN ('held', 'voided') AND parts > 0": "'has a usage event'",
                "state = 'settled' AND (parts <> 1 OR event_delivered <> delivered_token_count)": (
                    "concat(parts, ' usage events with ', event_delivered, ' tokens of ',"
                    " delivered_token_count, ' delivered')"
                ),
                """state = 'expired'
            AND event_delivered NOT BETWEEN delivered_token_count AND leased_token_count""": (
                    "concat('usage events with ', event_delivered, ' tokens, known to be delivered"
                    " ', delivered_token_count, ', leased ', leased_token_count)"
                ),
                "state = 'expired' AND parts > 1 AND delivered_token_count = 0": (
                    "concat(parts, ' usage events, but no tokens were known when it expired')"
                ),
                "event_embedding <> CASE WHEN embedding THEN event_input ELSE 0 END": (
                    "concat(event_embedding, ' embedding tokens of ', event_input, CASE WHEN"
                    " embedding THEN ' in an embedding' ELSE ' in a completion' END)"
                ),
                # An embedding that was cut off bills the texts that the encoder had begun with.
                """event_input NOT IN (0, input_token_count)
            AND NOT (embedding AND event_input < input_token_count AND outcome <> 'stop')""": (
                    "concat(event_input, ' input tokens in usage events, ', input_token_count,"
                    " ' in the request')"
                ),
            },
        ),
    ),
    Check(
        "requests-run-once",
        "A request id of a project has at most one hold that is not voided.",
        f"""
        SELECT concat('request ', request_id, ' of project ', project_id) AS subject,
               concat('has ', count(*), ' holds that were not voided') AS problem
        FROM holds
        WHERE state <> 'voided'
          AND admitted_at >= {SINCE}
        GROUP BY project_id, request_id
        HAVING count(*) > 1
        """,
    ),
    # Many holds have the same few combinations: they are grouped first, then looked up.
    Check(
        "holds-have-one-customer",
        "The key, project and organization of a hold belong together, and its quotas belong to"
        " one of them.",
        violations_sql(
            "concat('hold ', any_hold_id)",
            f"""
            SELECT DISTINCT ON (c.api_key_id, c.project_id, c.organization_id, c.quota_ids)
                   c.*, k.project_id AS key_project_id,
                   p.organization_id AS project_organization_id,
                   NOT EXISTS (
                       SELECT
                       FROM unnest(c.quota_ids) AS charged (id)
                       LEFT JOIN quotas q
                           ON q.id = charged.id
                          AND q.subject_id IN (c.organization_id, c.project_id, c.api_key_id)
                          AND NOT q.for_new_keys
                       WHERE q.id IS NULL
                   ) AS has_own_quotas
            FROM (
                SELECT min(id::text) AS any_hold_id,
                       api_key_id, project_id, organization_id, quota_ids
                FROM holds
                WHERE admitted_at >= {SINCE}
                GROUP BY 2, 3, 4, 5
            ) AS c
            LEFT JOIN api_keys k ON k.id = c.api_key_id
            LEFT JOIN projects p ON p.id = c.project_id
            """,
            {
                """(key_project_id, project_organization_id)
            IS DISTINCT FROM (project_id, organization_id)""": (
                    "'has a key, a project and an organization that do not belong together'"
                ),
                "NOT has_own_quotas": "'is charged to a quota of another customer'",
            },
        ),
    ),
    Check(
        "holds-are-swept",
        f"No hold is live {OVERDUE} after its expiry: a sweep ends it.",
        f"""
        SELECT concat('hold ', id) AS subject,
               concat('of process ', process_id, ' has expired at ', expires_at,
                      ' and is still live')
                   AS problem
        FROM holds
        WHERE state = 'held'
          AND expires_at < now() - interval '{OVERDUE}'
        """,
        Moment.SOON,
    ),
    NO_LIVE_HOLDS,
)


# For each quota dimension: kind of charge, calendar unit of its window, and whether it counts
# input and output tokens.
DIMENSIONS = """(VALUES
    ('concurrent_requests', 'running', NULL, 0, 0),
    ('requests_per_minute', 'requests', 'minute', 0, 0),
    ('tokens_per_minute', 'tokens', 'minute', 1, 1),
    ('input_tokens_per_minute', 'tokens', 'minute', 1, 0),
    ('output_tokens_per_minute', 'tokens', 'minute', 0, 1),
    ('tokens_per_day', 'tokens', 'day', 1, 1),
    ('tokens_per_month', 'tokens', 'month', 1, 1),
    ('cost_picos_per_day', 'money', 'day', 1, 1),
    ('cost_picos_per_month', 'money', 'month', 1, 1),
    ('prepaid_credit_picos', 'money', NULL, 1, 1)
) AS d (dimension, charge, unit, counts_input, counts_output)"""
# Age at which counters of months, and of minutes and days, are deleted.
MONTHS_KEPT, DAYS_KEPT = "93 days", "2 days"

# A quota that an admin has set also counts usage from before it existed; any other counts only the
# holds that are charged to it.
RULES = f"""
SELECT q.id AS quota_id, q.subject_id, q.model, q.dimension, q.deleted_at, d.charge, d.unit,
       d.counts_input * q.input_weight_milli AS input_weight,
       d.counts_input * q.cached_input_weight_milli AS cached_weight,
       d.counts_output * q.output_weight_milli AS output_weight,
       a.subject_id IS NOT NULL AS audited,
       a.subject_id IS NOT NULL AND q.deleted_at IS NULL AND NOT q.for_new_keys AS counts_past
FROM quotas q
JOIN {DIMENSIONS} USING (dimension)
LEFT JOIN (
    SELECT DISTINCT subject_id FROM audit_log WHERE action = 'quota.set'
) AS a ON a.subject_id = q.id::text
"""


# Output of a live request may turn out to be thinking: it is held at the higher of the two weights,
# and posted at the lower one.
HIGHER, LOWER = "greatest(w_output, w_reasoning)", "least(w_output, w_reasoning)"


def weighted_sql(
    input_count: str,
    cached_count: str,
    output_count: str,
    reasoning_count: str = "0",
    w_output: str = "w_output",
) -> str:
    """Return SQL of the charge for some tokens, rounded up to an integer.

    reasoning_count: output tokens known to be thinking. w_output: weight of the others.
    """
    return (
        f"(({input_count} - {cached_count}) * w_input + {cached_count} * w_cached"
        f" + ({output_count} - {reasoning_count}) * {w_output}"
        f" + {reasoning_count} * w_reasoning + divisor - 1) / divisor"
    )


def window_start_sql(unit: str, at: str) -> str:
    """Return SQL of the start of the calendar window around a time: the epoch without a unit."""
    return f"CASE WHEN {unit} IS NULL THEN 'epoch' ELSE date_trunc({unit}, {at}, 'UTC') END"


def charges_sql(hold_condition: str, rule_condition: str) -> str:
    """Return SQL that selects pairs of a hold and a quota that counts it, with their weights.

    An expired hold is charged its whole lease until its owner reports, in a further usage event,
    the tokens that it delivered. OFFSET 0 keeps the planner, which does not know how many quotas a
    hold has, from looking up usage events once for each pair.
    """
    return f"""
    SELECT h.*, r.quota_id, r.charge, r.unit,
           h.input_token_count AS sent,
           h.cached_input_token_count AS cached,
           h.posted_token_count AS posted,
           r.quota_id = ANY(h.quota_ids) AS is_charged,
           CASE WHEN r.charge <> 'money' THEN r.input_weight
                WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.input_picos_per_token END AS w_input,
           CASE WHEN r.charge <> 'money' THEN r.cached_weight
                WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.cached_input_picos_per_token END AS w_cached,
           CASE r.charge WHEN 'money' THEN p.output_picos_per_token
                ELSE r.output_weight END AS w_output,
           CASE r.charge WHEN 'money' THEN {REASONING_PRICE}
                ELSE r.output_weight END AS w_reasoning,
           CASE r.charge WHEN 'money' THEN 1 ELSE 1000 END AS divisor,
           h.state = 'expired'
               AND h.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END
               AS reported_late
    FROM (
        {HOLDS_WITH_EVENTS}
        WHERE ({HOLD_MAY_COUNT}) AND {hold_condition}
        OFFSET 0
    ) AS h
    CROSS JOIN unnest(ARRAY[h.organization_id, h.project_id, h.api_key_id]) AS s (subject_id)
    JOIN rules r
        ON r.subject_id = s.subject_id
       AND (r.quota_id = ANY(h.quota_ids) OR (r.counts_past AND r.model IN ('', h.model)))
       AND {rule_condition}
    JOIN price_versions p ON p.id = h.price_version_id
    """


# Hold h may be charged in a window whose counter has not been deleted yet.
HOLD_MAY_COUNT = f"""h.state = 'held'
    OR h.organization_id IN (
        SELECT subject_id
        FROM quotas
        WHERE dimension = 'prepaid_credit_picos' AND deleted_at IS NULL
    )
    OR h.charged_at >= (
        SELECT least(min(window_start), now() - interval '{MONTHS_KEPT}')
        FROM quota_counters
        WHERE window_start > 'epoch'
    )"""
# Charge of a hold that has ended. A lifetime quota, which has no unit, does not keep the lease of
# an expired hold: that credit would be lost for ever.
FINAL_CHARGE = f"""CASE
    WHEN state = 'settled' OR reported_late OR (state = 'expired' AND unit IS NULL)
        THEN {
    weighted_sql("event_input", "least(cached, event_input)", "event_billed", "event_reasoning")
}
    WHEN state = 'expired'
        THEN {
    weighted_sql(
        "sent", "least(cached, sent)", "leased_token_count", "reasoning_token_count", HIGHER
    )
}
    ELSE 0
END"""
# Part of a live hold's charge that its extensions have moved from held to used.
POSTED_CHARGE = f"""CASE
    WHEN posted > 0 AND state = 'held'
        THEN {weighted_sql("sent", "cached", "(posted - sent)", w_output=LOWER)}
    ELSE 0
END"""
HELD_CHARGE = f"""CASE
    WHEN state <> 'held' THEN 0
    WHEN charge = 'running' THEN 1
    WHEN charge = 'requests' THEN 0
    WHEN posted > 0
        THEN {weighted_sql("sent", "cached", "leased_token_count", "reasoning_token_count", HIGHER)}
           - {weighted_sql("sent", "cached", "(posted - sent)", w_output=LOWER)}
    ELSE greatest(
        {weighted_sql("sent", "0", "leased_token_count", w_output=HIGHER)},
        {weighted_sql("sent", "sent", "leased_token_count", w_output=HIGHER)}
    )
END"""
# Charge that a counter may lack, because it was released while the quota was being created.
UNCERTAIN_CHARGE = f"""CASE
    WHEN reported_late AND NOT is_charged AND charge IN ('tokens', 'money')
        THEN {weighted_sql("sent", "0", "leased_token_count", w_output=HIGHER)}
    ELSE 0
END"""
CHARGES_IN_ONE_WINDOW = f"""
SELECT quota_id,
       {window_start_sql("unit", CHARGED_AT)} AS window_start,
       CASE charge WHEN 'requests' THEN (state <> 'voided')::int WHEN 'running' THEN 0
            ELSE greatest({FINAL_CHARGE}, {POSTED_CHARGE}) END AS used,
       {HELD_CHARGE} AS held,
       {UNCERTAIN_CHARGE} AS uncertain
FROM ({charges_sql("true", ONE_WINDOW)}) AS charges
"""
CHARGES_IN_SEVERAL_WINDOWS = f"""
SELECT quota_id,
       {window_start_sql("unit", "posted_at")} AS window_start,
       total - lag(total, 1, 0) OVER history AS used,
       CASE WHEN mark = 0 THEN held ELSE 0 END AS held,
       CASE WHEN mark = 0 THEN uncertain ELSE 0 END AS uncertain
FROM (
    SELECT id, quota_id, unit, mark,
           CASE WHEN mark = 0 THEN charged_at
                ELSE to_timestamp(posted_minutes[mark] * 60) END AS posted_at,
           {HELD_CHARGE} AS held,
           {UNCERTAIN_CHARGE} AS uncertain,
           CASE WHEN mark = 0 THEN greatest({FINAL_CHARGE}, {POSTED_CHARGE})
                WHEN state <> 'voided' AND posted_minutes[mark + 1] > 0
                     AND NOT (state = 'expired' AND unit IS NULL)
                    THEN {
    weighted_sql("sent", "cached", "(posted_minutes[mark + 1] - sent)", w_output=LOWER)
}
                ELSE 0 END AS total
    FROM ({charges_sql(SEVERAL_MINUTES, TOKENS_OR_MONEY)}) AS charges,
    LATERAL (
        SELECT generate_series(1, cardinality(posted_minutes), 2)
        UNION ALL
        SELECT 0
    ) AS marks (mark)
) AS totals
WINDOW history AS (PARTITION BY id, quota_id ORDER BY mark = 0, mark)
"""


# A counter may exceed a limit that an admin set or lowered below what was used, until the windows
# of that time have ended. After such a change nothing is admitted: a hold of later, beyond the time
# of an administrator's transaction, shows that the limit failed. A lifetime quota may be exceeded
# by usage that owners of expired holds reported late: the leases had been released.
WITHIN_LIMITS = Check(
    "counters-within-limits",
    "Used plus held is within the limit of every enforced quota, unless the limit was set or"
    " lowered during the window and nothing was admitted since.",
    violations_sql(
        "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
        """
        SELECT c.*, q.dimension, late.picos AS late_picos,
               CASE WHEN (q.override_until IS NOT NULL AND q.dimension = 'prepaid_credit_picos')
                      OR q.override_until > coalesce(nullif(c.window_start, 'epoch'), running.since)
                    THEN q.override_limit_value
                    ELSE q.limit_value
               END AS limit_value
        FROM quota_counters c
        JOIN quotas q ON q.id = c.quota_id,
        LATERAL (
            SELECT min(admitted_at) AS since
            FROM holds
            WHERE c.window_start = 'epoch'
              AND state = 'held'
              AND q.id = ANY(quota_ids)
        ) AS running,
        LATERAL (
            SELECT coalesce(sum(e.cost_picos), 0) AS picos
            FROM holds h
            JOIN usage_events e ON e.hold_id = h.id
            WHERE q.dimension = 'prepaid_credit_picos'
              AND h.organization_id = q.subject_id
              AND h.state = 'expired'
              AND e.part = (h.delivered_token_count > 0)::int
        ) AS late
        WHERE q.deleted_at IS NULL
          AND q.enforced
          AND NOT EXISTS (
              SELECT
              FROM audit_log a
              WHERE a.action IN ('quota.set', 'quota.override')
                AND a.subject_id = q.id::text
                AND a.created_at >= c.window_start
                AND (
                    coalesce(before, 'null') = 'null'
                    OR before->>'deleted_at' IS NOT NULL
                    OR (after->>'limit_value')::numeric < (before->>'limit_value')::numeric
                    OR (after->>'override_limit_value')::numeric
                       < coalesce((before->>'override_limit_value')::numeric,
                                  (before->>'limit_value')::numeric)
                    OR greatest((after->>'limit_value')::numeric,
                                (after->>'override_limit_value')::numeric)
                       < greatest((before->>'limit_value')::numeric,
                                  (before->>'override_limit_value')::numeric)
                    OR (after->>'input_weight_milli', after->>'cached_input_weight_milli',
                        after->>'output_weight_milli')
                       <> (before->>'input_weight_milli', before->>'cached_input_weight_milli',
                           before->>'output_weight_milli')
                    OR (after->>'enforced')::bool > (before->>'enforced')::bool
                )
                AND NOT EXISTS (
                    SELECT
                    FROM holds h
                    WHERE q.id = ANY(h.quota_ids)
                      AND h.admitted_at > a.created_at + interval '1 minute'
                      AND h.state <> 'voided'
                      -- What costs nothing is admitted by a limit on money that is overdrawn.
                      AND (
                          position('picos' IN q.dimension) = 0
                          OR h.posted_cost_picos > 0
                          OR EXISTS (
                              SELECT FROM usage_events e WHERE e.hold_id = h.id AND e.cost_picos > 0
                          )
                      )
                )
          )
        """,
        {
            "used + held > limit_value + late_picos": (
                "concat('used ', used, ' + held ', held, ' exceed the limit ', limit_value)"
            )
        },
    ),
)


COUNTER_CHECKS = (
    Check(
        "counters-equal-holds",
        "The held value of a counter is the sum over live holds; its used value is the sum of usage"
        " events, postings of live holds and leases of expired holds in its window; no counter is"
        " missing. Reads whole windows, whatever `since` is.",
        f"WITH rules AS ({RULES})"
        + violations_sql(
            "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
            f"""
            SELECT quota_id, window_start, r.dimension, c.used, c.held,
                   c.quota_id IS NOT NULL AS has_counter,
                   coalesce(x.held, 0) AS expected_held,
                   coalesce(x.used, 0) AS used_min,
                   -- What a deleted quota of an admin counted when it was created is not recorded.
                   CASE WHEN r.deleted_at IS NOT NULL AND r.audited
                        THEN greatest(coalesce(x.used, 0), c.used)
                        ELSE coalesce(x.used + x.uncertain, 0)
                   END AS used_max,
                   -- A quota that an admin set has no counters for the windows before it existed.
                   window_start = {window_start_sql("r.unit", "now()")}
                   OR (
                       NOT r.audited
                       AND window_start >= now() - CASE r.unit
                           WHEN 'month' THEN interval '{MONTHS_KEPT}'
                           ELSE interval '{DAYS_KEPT}' END
                   ) AS needs_counter
            FROM (
                SELECT quota_id, window_start, sum(used) AS used, sum(held) AS held,
                       sum(uncertain) AS uncertain
                FROM ({CHARGES_IN_ONE_WINDOW} UNION ALL {CHARGES_IN_SEVERAL_WINDOWS}) AS charged
                GROUP BY 1, 2
            ) AS x
            FULL JOIN quota_counters c USING (quota_id, window_start)
            JOIN rules r USING (quota_id)
            """,
            {
                "has_counter AND held <> expected_held": (
                    "concat('held ', held, ', but live holds reserve ', expected_held)"
                ),
                f"""has_counter
            AND used < {USED_MAX}
            AND used NOT BETWEEN used_min AND used_max""": (
                    "concat('used ', used, ', but holds used ', used_min, ' to ', used_max)"
                ),
                """NOT has_counter
            AND (expected_held > 0 OR (used_min > 0 AND needs_counter))""": (
                    "concat('is missing: holds reserve ', expected_held, ' and used ', used_min)"
                ),
            },
        ),
    ),
    WITHIN_LIMITS,
    # Exact, even with corrections: usage that an adjustment bills is counted here at its own price,
    # and is never rated.
    Check(
        "prepaid-credit-equals-ledger",
        "The used credit of a prepaid organization is its usage in the ledger, plus usage events"
        " that are not rated yet, plus postings of its live holds. Reads all rows, whatever"
        " `since` is.",
        violations_sql(
            "concat('prepaid credit of organization ', organization_id)",
            f"""
            SELECT o.organization_id,
                   coalesce(c.used, 0) AS used,
                   coalesce(posted.picos, 0) AS posted_picos,
                   coalesce(unrated.picos, 0) AS unrated_picos,
                   coalesce(live.picos, 0) AS live_picos,
                   coalesce(posted.picos, 0) + coalesce(unrated.picos, 0) + coalesce(live.picos, 0)
                       AS expected_used
            FROM prepaid_organizations o
            LEFT JOIN quota_counters c USING (quota_id),
            LATERAL (
                SELECT -sum(l.amount_picos) AS picos
                FROM ledger_transactions t
                JOIN ledger_entries l ON l.transaction_id = t.id AND l.token_kind IS NOT NULL
                WHERE t.organization_id = o.organization_id AND t.kind = 'usage'
            ) AS posted,
            LATERAL (
                SELECT sum({EVENT_COST}) AS picos
                FROM usage_events e
                JOIN price_versions p ON p.id = e.price_version_id
                WHERE e.organization_id = o.organization_id AND e.ledger_transaction_id IS NULL
            ) AS unrated,
            LATERAL (
                SELECT sum(posted_cost_picos) AS picos
                FROM holds
                WHERE state = 'held' AND organization_id = o.organization_id
            ) AS live
            """,
            {
                f"used < {USED_MAX} AND used <> expected_used": (
                    "concat('used ', used, ' picos, but ', posted_picos, ' are in the ledger, ',"
                    " unrated_picos, ' wait to be rated and ', live_picos,"
                    " ' are posted by live holds')"
                ),
            },
        ),
    ),
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
                GROUP BY 1, 2, 3
            ) AS posted USING (transaction_id, price_version_id, token_kind)
            """,
            {USED_DIFFERS_FROM_POSTED: USED_AND_POSTED},
        ),
    ),
    Check(
        "usage-equals-ledger",
        "For each customer, month, model and kind of token, rated usage events and the ledger have"
        " the same tokens and money.",
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


INVOICE_CHECKS = (
    Check(
        "closed-months-have-digests",
        "A month has digests of its reports exactly if it is closed.",
        violations_sql(
            MONTH_SUBJECT,
            """
            SELECT coalesce(b.organization_id, c.organization_id) AS organization_id,
                   coalesce(b.month, c.month) AS month,
                   b.state, c.json_sha256
            FROM billing_months b
            FULL JOIN month_closings c USING (organization_id, month)
            """,
            {
                "state = 'closed' AND json_sha256 IS NULL": "'is closed but has no digests'",
                "state IS DISTINCT FROM 'closed' AND json_sha256 IS NOT NULL": (
                    "concat('is ', coalesce(state, 'open'), ' but has digests')"
                ),
            },
        ),
    ),
    Check(
        "documents-match-digests",
        "A PDF is the one that was issued.",
        violations_sql(
            "concat('organization ', organization_id, ', document ', name)",
            "SELECT organization_id, name, pdf_sha256, sha256(pdf) AS now FROM issued_documents",
            {
                "now <> pdf_sha256": (
                    "concat('has the SHA-256 ', encode(now, 'hex'), ', and had ',"
                    " encode(pdf_sha256, 'hex'))"
                )
            },
        ),
    ),
    Check(
        "invoices-match-ledger",
        "The usage lines of an invoice have the tokens and amounts of the ledger for the month, by"
        " price version, kind and month of use.",
        violations_sql(
            f"concat({MONTH_SUBJECT}, ', price version ', price_version_id, ', ', token_kind,"
            " ' of ', usage_month)",
            """
            SELECT *
            FROM (
                SELECT organization_id, t.billing_month AS month, price_version_id, token_kind,
                       to_char(t.effective_at AT TIME ZONE 'UTC', 'YYYY-MM') AS usage_month,
                       sum(token_count) AS posted_tokens,
                       -sum(amount_picos) AS posted_picos
                FROM month_closings c
                JOIN ledger_transactions t USING (organization_id)
                JOIN ledger_entries l ON l.transaction_id = t.id
                WHERE t.billing_month = c.month
                  AND t.kind = 'usage'
                  AND token_kind IS NOT NULL
                GROUP BY 1, 2, 3, 4, 5
            ) AS posted
            FULL JOIN (
                SELECT organization_id, month, price_version_id, token_kind, usage_month,
                       sum(token_count) AS invoiced_tokens,
                       sum(l.exact_picos) AS invoiced_picos
                FROM invoices i
                JOIN invoice_lines l ON l.invoice_id = i.id
                WHERE kind IN ('usage', 'late_usage')
                GROUP BY 1, 2, 3, 4, 5
            ) AS invoiced
            USING (organization_id, month, price_version_id, token_kind, usage_month)
            """,
            {
                """(posted_tokens, posted_picos)
            IS DISTINCT FROM (invoiced_tokens, invoiced_picos)""": (
                    "concat(coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0),"
                    " ' picos posted, ', coalesce(invoiced_tokens, 0), ' for ',"
                    " coalesce(invoiced_picos, 0), ' invoiced')"
                )
            },
        ),
    ),
    Check(
        "invoices-match-receivables",
        "The postings of a closed month on the customer's receivable equal its invoice less the"
        " credit notes of the month.",
        violations_sql(
            MONTH_SUBJECT,
            """
            SELECT c.organization_id, c.month,
                   coalesce(i.total_picos, 0) + (
                       SELECT coalesce(sum(a.amount_picos), 0)
                       FROM adjustment_decisions d
                       JOIN adjustments a ON a.id = d.adjustment_id
                       WHERE d.approved
                         AND a.invoice_id IS NOT NULL
                         AND a.organization_id = c.organization_id
                         AND d.billing_month = c.month
                   ) AS invoiced_picos,
                   (
                       SELECT coalesce(sum(l.amount_picos), 0)
                       FROM ledger_transactions t
                       JOIN ledger_entries l ON l.transaction_id = t.id
                       JOIN ledger_accounts r ON r.id = l.account_id AND r.kind = 'receivable'
                       WHERE t.organization_id = c.organization_id
                         AND t.billing_month = c.month
                   ) AS posted_picos
            FROM month_closings c
            LEFT JOIN invoices i USING (organization_id, month)
            """,
            {
                "invoiced_picos <> posted_picos": (
                    "concat(posted_picos, ' picos are on the account, ', invoiced_picos,"
                    " ' on the invoice and credit notes')"
                )
            },
        ),
    ),
    Check(
        "invoices-add-up",
        "An invoice has as many lines as it states, they sum to its totals, exact and rounded, and"
        " it carries in the rounding remainder of the customer's previous invoice.",
        violations_sql(
            "concat('invoice ', number)",
            """
            SELECT i.*, lines.count, lines.exact, lines.rounded,
                   coalesce(
                       lag(carried_out_picos) OVER (PARTITION BY organization_id ORDER BY month), 0
                   ) AS carried_before
            FROM invoices i,
            LATERAL (
                SELECT count(*) AS count,
                       coalesce(sum(l.exact_picos), 0) AS exact,
                       coalesce(sum(l.amount_picos), 0) AS rounded
                FROM invoice_lines l
                WHERE l.invoice_id = i.id
            ) AS lines
            """,
            {
                "count <> line_count": "concat('has ', count, ' lines of ', line_count)",
                "exact <> exact_picos OR rounded <> total_picos": (
                    "concat('is ', exact_picos, ' picos, rounded ', total_picos, "
                    "'; its lines are ', exact, ', rounded ', rounded)"
                ),
                "total_picos + carried_out_picos <> exact_picos + carried_in_picos": (
                    "'loses picos by rounding'"
                ),
                "carried_in_picos <> carried_before": (
                    "concat('carries in ', carried_in_picos,"
                    " ' picos, but the previous invoice carried out ', carried_before)"
                ),
            },
        ),
    ),
    Check(
        "numbers-have-no-gaps",
        "Invoices and credit notes are each numbered from 1 to the counter of their series, without"
        " a gap.",
        violations_sql(
            "concat('series ', series)",
            """
            SELECT series,
                   count(ordinal) AS count,
                   coalesce(min(ordinal), 1) AS first,
                   coalesce(max(ordinal), 0) AS last,
                   coalesce(
                       (SELECT last_ordinal FROM document_series s WHERE s.series = n.series), 0
                   ) AS counter
            FROM (
                SELECT 'INV' AS series, ordinal FROM invoices
                UNION ALL
                SELECT 'CN', credit_note_ordinal FROM adjustment_decisions
            ) AS n
            GROUP BY series
            """,
            {
                "count <> last OR first <> 1 OR last <> counter": (
                    "concat('has ', count, ' numbers from ', first, ' to ', last, "
                    "', and its counter is ', counter)"
                )
            },
        ),
    ),
)


def rated_usage_sql(condition: str = "true") -> str:
    """Return SQL of rated tokens by customer, price version, hour and kind."""
    return f"""
    SELECT organization_id, price_version_id, hour, token_kind, token_count AS used
    FROM (
        SELECT organization_id, price_version_id,
               date_trunc('hour', settled_at, 'UTC') AS hour, {KIND_SUMS}
        FROM usage_events
        WHERE rated_at IS NOT NULL
          AND settled_at >= {FROM_HOUR}
          AND {condition}
        GROUP BY 1, 2, 3
    ) AS sums,
    {KIND_ROWS}
    WHERE token_count <> 0
    """


EXPORTED_SQL = f"""
SELECT organization_id, price_version_id, hour, token_kind,
       count(*) AS parts, min(part) AS first, max(part) AS last,
       coalesce(sum(token_count) FILTER (WHERE state <> 'cancelled'), 0) AS exported
FROM meter_batches
WHERE hour >= {FROM_HOUR}
GROUP BY 1, 2, 3, 4
"""


def missing_export_sql(condition: str = "true") -> str:
    """Return SQL of closed hours with fewer exported than used tokens."""
    return violations_sql(
        BATCH_SUBJECT,
        f"""
        SELECT *
        FROM (
            SELECT closed_until,
                   least(
                       (SELECT min(hour) FROM meter_batches),
                       closed_until - interval '{FIRST_RUN_LOOKBACK}'
                   ) AS exported_from
            FROM export_progress
        ) AS progress,
        ({rated_usage_sql(condition)}) AS usage
        LEFT JOIN ({EXPORTED_SQL}) AS batches
            USING (organization_id, price_version_id, hour, token_kind)
        WHERE hour >= exported_from
          AND hour < closed_until
        """,
        {
            "coalesce(exported, 0) < used": (
                "concat('exports only ', coalesce(exported, 0), ' tokens of ', used, ' used')"
            )
        },
    )


EXPORT_CHECKS = (
    Check(
        "stripe-matches-invoices",
        "A settlement with Stripe is for the invoice of a closed month, and Stripe's usage, late"
        " usage and items sum to it.",
        violations_sql(
            "concat('settlement of organization ', organization_id, ', ',"
            " to_char(month, 'YYYY-MM'))",
            """
            SELECT s.*, m.state, coalesce(i.total_picos, 0) AS total_picos,
                   invoiced_minor + late_minor + (
                       SELECT coalesce(sum(amount_minor), 0)
                       FROM stripe_month_items t
                       WHERE (t.organization_id, t.month) = (s.organization_id, s.month)
                   ) AS stripe_minor
            FROM stripe_month_settlements s
            LEFT JOIN billing_months m USING (organization_id, month)
            LEFT JOIN invoices i USING (organization_id, month)
            """,
            {
                "state IS DISTINCT FROM 'closed'": "'the month is not closed'",
                "due_picos <> total_picos": (
                    "concat('is ', due_picos, ' picos, the invoice is ', total_picos)"
                ),
                "settled_at IS NOT NULL AND stripe_minor <> due_minor": (
                    "concat('is ', stripe_minor, ' minor units at Stripe, and ', due_minor,"
                    " ' is due')"
                ),
            },
        ),
    ),
    Check(
        "nothing-is-exported-twice",
        "The batches of an hour are numbered without a gap, and those that are not cancelled have"
        " no more tokens than were used in it.",
        violations_sql(
            BATCH_SUBJECT,
            f"""
            SELECT *
            FROM ({EXPORTED_SQL}) AS batches
            LEFT JOIN ({rated_usage_sql()}) AS usage
                USING (organization_id, price_version_id, hour, token_kind)
            """,
            {
                "first <> 0 OR parts <> last + 1": (
                    "concat('has the parts ', first, ' to ', last, ' in ', parts, ' batches')"
                ),
                "exported > coalesce(used, 0)": (
                    "concat('exports ', exported, ' tokens of ', coalesce(used, 0), ' used')"
                ),
            },
        ),
    ),
    Check(
        "closed-hours-are-exported",
        "All usage of a closed hour is in its batches, if it was rated before the export last"
        " scanned for late usage.",
        missing_export_sql(f"""rated_at < (
              SELECT scanned_until - interval '{LATE_MARGIN}' FROM export_progress
          )"""),
        Moment.SOON,
    ),
    Check(
        "all-usage-is-exported",
        "All rated usage of closed hours is in batches.",
        missing_export_sql(),
        Moment.AT_REST,
    ),
)


SCHEMA_CHECKS = (
    Check(
        "triggers-are-enabled",
        "The triggers that keep journals append-only, holds ended and transactions balanced, and"
        " that notify processes of changes, exist and are enabled.",
        f"""
        SELECT concat('trigger ', x.name) AS subject,
               CASE WHEN t.tgname IS NULL THEN 'is missing'
                    WHEN t.tgenabled NOT IN ('O', 'A') THEN 'is disabled'
                    ELSE concat('calls ', f.proname, ' instead of ', x.function)
               END AS problem
        FROM (VALUES {TRIGGER_ROWS}) AS x (name, function)
        LEFT JOIN pg_trigger t ON t.tgname = x.name AND t.tgparentid = 0
        LEFT JOIN pg_proc f ON f.oid = t.tgfoid
        WHERE t.tgname IS NULL
           OR t.tgenabled NOT IN ('O', 'A')
           OR f.proname <> x.function
        """,
    ),
    Check(
        "constraints-are-valid",
        "Every constraint is validated for all rows, and every index is valid.",
        """
        SELECT concat('constraint ', conname, ' of ', conrelid::regclass) AS subject,
               'is not validated' AS problem
        FROM pg_constraint
        WHERE NOT convalidated
          AND connamespace = 'public'::regnamespace
        UNION ALL
        SELECT concat('index ', indexrelid::regclass), 'is not valid'
        FROM pg_index
        JOIN pg_class c ON c.oid = indexrelid
        WHERE NOT (indisvalid AND indisready)
          AND c.relnamespace = 'public'::regnamespace
        """,
    ),
    Check(
        "partitions-refuse-writes",
        "No partition of the usage events can be written directly, which would bypass the triggers"
        " of the table.",
        """
        SELECT concat('partition ', inhrelid::regclass) AS subject,
               'accepts direct writes: its trigger is missing or disabled' AS problem
        FROM pg_inherits
        WHERE inhparent = 'usage_events'::regclass
          AND NOT EXISTS (
              SELECT
              FROM pg_trigger
              WHERE tgrelid = inhrelid
                AND tgname = 'usage_events_partition'
                AND tgenabled IN ('O', 'A')
          )
        """,
    ),
    Check(
        "partitions-exist",
        "Every usage event is in the partition of its month, and this month and the next have"
        " partitions.",
        """
        SELECT concat('usage events of ', to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM'))
                   AS subject,
               concat(count(*), ' are in the default partition') AS problem
        FROM usage_events_default
        GROUP BY 1
        UNION ALL
        SELECT concat('partition ', name), 'is missing'
        FROM (
            SELECT to_char(
                       date_trunc('month', now() AT TIME ZONE 'UTC') + ahead * interval '1 month',
                       '"usage_events_"YYYY_MM'
                   ) AS name
            FROM generate_series(0, 1) AS ahead
        ) AS expected
        WHERE NOT EXISTS (
            SELECT
            FROM pg_inherits
            JOIN pg_class c ON c.oid = inhrelid
            WHERE inhparent = 'usage_events'::regclass
              AND relname = expected.name
        )
        """,
        Moment.SOON,
    ),
)


CHECKS: tuple[Check, ...] = (
    *SCHEMA_CHECKS,
    *HOLD_CHECKS,
    *COUNTER_CHECKS,
    *USAGE_CHECKS,
    *RECEIPT_CHECKS,
    *LEDGER_CHECKS,
    *INVOICE_CHECKS,
    *EXPORT_CHECKS,
)

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """Row that breaks an invariant, and the problem with it."""

    subject: str
    problem: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check. sample: the first of `violation_count` violations."""

    check: Check
    violation_count: int
    sample: tuple[Violation, ...]
    duration_s: float


def select_checks(
    names: Collection[str] = (), moments: Collection[Moment] = (Moment.ALWAYS, Moment.SOON)
) -> tuple[Check, ...]:
    """Return the checks with these names or, without names, those of these moments.

    Raises: InvalidValue if a name is unknown.
    """
    unknown = sorted(set(names) - {check.name for check in CHECKS})
    if unknown:
        raise InvalidValue(
            "check",
            f"there is no check {unknown[0]!r}: the checks are {', '.join(c.name for c in CHECKS)}",
        )
    return tuple(
        check for check in CHECKS if check.name in names or (not names and check.moment in moments)
    )


def fsck(
    database_url: str,
    checks: Sequence[Check],
    *,
    since: datetime | None = None,
    sample_max: int = SAMPLE_MAX,
) -> Iterator[Verdict]:
    """Run checks one after the other, all on the database as it is when the first begins.

    since: reads only rows written from then on; sums begin with the month or hour of that time.
    Raises: psycopg.Error.
    """
    with psycopg.connect(
        psycopg_conninfo(database_url),
        connect_timeout=CONNECT_TIMEOUT_S,
        options=connection_options(),
    ) as connection:
        connection.execute(SETTLE)
        connection.commit()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        for check in checks:
            yield run_check(connection, check, since=since, sample_max=sample_max)


def run_check(
    connection: Connection,
    check: Check,
    *,
    since: datetime | None = None,
    sample_max: int = SAMPLE_MAX,
) -> Verdict:
    """Run one check in the connection's transaction."""
    began_at = time.monotonic()
    query = f"""
        SELECT count(*) OVER (), subject, problem
        FROM ({check.sql}) AS violations
        ORDER BY subject, problem
        LIMIT {sample_max}
    """
    parameters = {"since": ALL_TIME if since is None else since.isoformat()}
    rows = connection.execute(query.encode(), parameters).fetchall()
    sample = tuple(Violation(subject, problem) for _, subject, problem in rows)
    return Verdict(check, rows[0][0] if rows else 0, sample, time.monotonic() - began_at)
