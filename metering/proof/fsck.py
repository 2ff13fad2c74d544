"""`weir fsck`: every check on one snapshot of a database, read-only; and the checks of its guards and constraints.

Checks use nothing of the code that they judge: windows, weights, prices and sums are written down here once more, in SQL, so
that one mistake cannot hide another. A query is set-based, reads one snapshot, and has one parameter,
`since` ('-infinity' for all).

Usage events and receipts. Each event belongs to a hold, repeats its facts, bills what was delivered, and costs what its tokens
cost. Each receipt says what its event says, names the one before, and is under the signature of its batch. Signatures themselves
are not checked here, since SQL cannot: `weir receipt verify` does, with nothing but public keys.

Holds and counters of quotas. Each hold ends once, with the usage events of its end, and is charged to nobody else's account. A
counter is a sum over holds: what a live hold claims and its extensions have posted, by calendar window; what the usage events of
a settled hold bill; the lease of an expired hold until its owner reports; nothing of a voided hold. `held` and `used` together
are within the limit.

Ledger, closed months and export. Every usage event is posted once, every transaction balances, and its legs are the tokens used,
at their prices. Invoices are what the ledger says, add up, are numbered without a gap, and are what the customer owes; they are
few beside usage, so all of them are checked whatever the time to begin with. The batches of an hour are what was used in it, each
token once."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg

from metering.core.errors import InvalidValue
from metering.store.db import CONNECT_TIMEOUT_S, psycopg_conninfo

# What each kind of token is called, how many of them a usage event has, and which column prices them.
TOKEN_KINDS = {
    "input": ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    "cached_input": ("cached_input_token_count", "cached_input_picos_per_token"),
    "output": ("billed_token_count", "output_picos_per_token"),
    "embedding": ("embedding_token_count", "embedding_picos_per_token"),
}
# Of usage events: one sum for each kind.
KIND_SUMS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in TOKEN_KINDS.items())
# Of a row with such sums: one row for each kind.
KIND_ROWS = f"LATERAL (VALUES {', '.join(f'({kind!r}, {kind})' for kind in TOKEN_KINDS)}) AS k (token_kind, token_count)"
# What the tokens of a usage event e cost by its price version p.
EVENT_COST = " + ".join(f"(e.{count.replace('- ', '- e.')}) * p.{price}" for count, price in TOKEN_KINDS.values())
SINCE = "%(since)s::timestamptz"
# Of usage events: that this one is not billed by an adjustment in place of its own cost.
NOT_CORRECTED = (
    "NOT EXISTS (SELECT FROM usage_corrections c WHERE (c.hold_id, c.part, c.settled_at) = (e.hold_id, e.part, e.settled_at))"
)


class Moment(StrEnum):
    """When a check must hold.

    always: at every commit, whatever goes on. soon: some minutes after, if the background work is done at all. at_rest: once no
    process runs, and all that they left is swept and rated.
    """

    ALWAYS = "always"
    SOON = "soon"
    AT_REST = "at_rest"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be true. sql: rows (subject, problem), one for each violation. proves: in a sentence."""

    name: str
    proves: str
    sql: str
    moment: Moment = Moment.ALWAYS


def rows_with(subject: str, source: str, problems: Mapping[str, str]) -> str:
    """SQL of a check by rows: those of `source` for which a condition (a key of `problems`) holds, with what is wrong (its value).

    The words are put together for such rows alone, so that a check costs what its conditions cost.
    """
    words = ", ".join(f"CASE WHEN {condition} THEN {problem} END" for condition, problem in problems.items())
    anything = " OR ".join(f"({condition})" for condition in problems)
    return f"SELECT {subject} AS subject, concat_ws('; ', {words}) AS problem FROM ({source}) AS judged WHERE {anything}"


USAGE_CHECKS = (
    Check(
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
    ),
    Check(
        "usage-tells-the-hold",
        "A usage event has its hold, repeats whose it is, which request, model and price version, bills what was delivered, and "
        "costs what its tokens cost at that price.",
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
    ),
    Check(
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
    ),
    Check(
        "price-of-the-admission",
        "A hold is priced by a version of its model, in its customer's currency, of the list or its customer's own, that was in "
        "force when it was admitted.",
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
                "price_currency IS DISTINCT FROM currency_code": "concat(holds, ' holds are priced in ', price_currency, ', not "
                "', currency_code)",
                "is_anothers": "concat(holds, ' holds are priced by another customer''s own price')",
                "withdrawn": "concat(holds, ' holds are priced by a row that ends a price')",
                "effective_at > first": "concat('a hold was admitted at ', first, ', before the price began at ', effective_at)",
            },
        ),
    ),
)


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
# The bytes of docs/reference/receipts.md.
ENCODED = (
    rf"'weir.receipt.v1\n'::bytea || {IDS} || ".replace(r"\n", r"\012")
    + " || ".join(f"int8send(({number})::bigint)" for number in NUMBERS)
    + f" || e.previous_receipt_hash || {TEXTS}"
)
NOTHING = "decode(repeat('00', 32), 'hex')"


RECEIPT_CHECKS = (
    Check(
        "receipt-tells-the-usage",
        "The hash of a receipt is that of what its usage event says, byte for byte as docs/reference/receipts.md has it.",
        rows_with(
            "concat('receipt ', receipt_sequence, ' of project ', project_id)",
            f"""
        SELECT e.project_id, e.receipt_sequence, e.id, e.receipt_hash, sha256({ENCODED}) AS right_hash
        FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
        WHERE e.receipt_sequence IS NOT NULL AND e.settled_at >= {SINCE}
        """,
            {"receipt_hash IS DISTINCT FROM right_hash": "concat('usage event ', id, ' says something else')"},
        ),
    ),
    Check(
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
    ),
    Check(
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
    ),
    Check(
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
    ),
)


OVERDUE = "10 minutes"  # sixty sweeps: whoever has not come by then does not come

# A hold with what its usage events add up to. There are two at most, which `usage-parts` proves, so nothing has to be grouped.
HOLDS_WITH_EVENTS = """
SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.model, h.price_version_id, h.state, h.quota_ids, h.admitted_at,
       h.charged_at, h.ended_at, h.input_token_count, h.cached_input_token_count, h.leased_token_count, h.delivered_token_count,
       h.posted_token_count, h.posted_minutes, h.embedding,
       num_nonnulls(first.id, second.id) AS parts,
       coalesce(first.input_token_count + first.embedding_token_count, 0)
       + coalesce(second.input_token_count + second.embedding_token_count, 0) AS event_input,
       coalesce(first.embedding_token_count, 0) + coalesce(second.embedding_token_count, 0) AS event_embedding,
       coalesce(first.delivered_token_count, 0) + coalesce(second.delivered_token_count, 0) AS event_delivered,
       coalesce(first.billed_token_count, 0) + coalesce(second.billed_token_count, 0) AS event_billed,
       first.outcome
FROM holds h
LEFT JOIN usage_events first ON first.hold_id = h.id AND first.part = 0
LEFT JOIN usage_events second ON second.hold_id = h.id AND second.part = 1
"""


NO_HOLD_IS_LEFT = Check(
    "no-hold-is-left",
    "Nothing runs, so no hold is live.",
    """
    SELECT concat('hold ', id) AS subject, concat('of owner ', owner_id, ' is still live') AS problem
    FROM holds WHERE state = 'held'
    """,
    Moment.AT_REST,
)

HOLD_CHECKS = (
    Check(
        "holds-end-once",
        "A hold is live or has ended one way, and its usage events are those of that end: none for a live or voided one, one "
        "with what was delivered for a settled one, what is known of an expired one.",
        rows_with(
            "concat('hold ', id, ' (', state, ')')",
            f"{HOLDS_WITH_EVENTS} WHERE h.ended_at IS NULL OR h.ended_at >= {SINCE}",
            {
                "(ended_at IS NULL) <> (state = 'held')": "concat('ended at ', coalesce(ended_at::text, 'no time'))",
                "state IN ('held', 'voided') AND parts > 0": "'has a usage event'",
                "state = 'settled' AND (parts <> 1 OR event_delivered <> delivered_token_count)": "concat(parts, "
                "' usage events with ', event_delivered, ' tokens of ', delivered_token_count, ' delivered')",
                "state = 'expired' AND event_delivered NOT BETWEEN delivered_token_count AND leased_token_count": "concat("
                "'usage events with ', event_delivered, ' tokens, known to be delivered ', delivered_token_count, ', leased ', "
                "leased_token_count)",
                "state = 'expired' AND parts > 1 AND delivered_token_count = 0": "concat(parts, "
                "' usage events, though nothing was known when it expired')",
                "event_embedding <> CASE WHEN embedding THEN event_input ELSE 0 END": "concat(event_embedding, ' embedded tokens "
                "of ', event_input, CASE WHEN embedding THEN ' to be embedded' ELSE ' to be continued' END)",
                # Of an embedding that was cut off, the texts that the encoder had begun with are billed.
                "event_input NOT IN (0, input_token_count) AND NOT "
                "(embedding AND event_input < input_token_count AND outcome <> 'stop')": "concat("
                "event_input, ' input tokens in usage events, ', "
                "input_token_count, ' in the request')",
            },
        ),
    ),
    Check(
        "requests-run-once",
        "A request id of a project has one hold at most, but for voided ones.",
        f"""
    SELECT concat('request ', request_id, ' of project ', project_id) AS subject,
           concat('has ', count(*), ' holds that were not voided') AS problem
    FROM holds WHERE state <> 'voided' AND admitted_at >= {SINCE} GROUP BY project_id, request_id HAVING count(*) > 1
    """,
    ),
    # Few different combinations stand in many rows: they are told apart first, and looked up then.
    Check(
        "holds-of-one-customer",
        "The key, the project and the organization of a hold belong together, and so do the quotas that it is charged to.",
        rows_with(
            "concat('hold ', one_of_them)",
            f"""
        SELECT DISTINCT ON (c.api_key_id, c.project_id, c.organization_id, c.quota_ids) c.*, k.project_id AS key_project_id,
               p.organization_id AS project_organization_id,
               NOT EXISTS (SELECT FROM unnest(c.quota_ids) AS charged(id) LEFT JOIN quotas q ON q.id = charged.id
                    AND q.subject_id IN (c.organization_id, c.project_id, c.api_key_id) AND NOT q.for_new_keys
                WHERE q.id IS NULL) AS own_quotas
        FROM (SELECT min(id::text) AS one_of_them, api_key_id, project_id, organization_id, quota_ids FROM holds
              WHERE admitted_at >= {SINCE} GROUP BY 2, 3, 4, 5) c
        LEFT JOIN api_keys k ON k.id = c.api_key_id
        LEFT JOIN projects p ON p.id = c.project_id
        """,
            {
                "(key_project_id, project_organization_id) IS DISTINCT FROM (project_id, organization_id)": "'is charged to a "
                "key, a project and an organization that do not belong together'",
                "NOT own_quotas": "'is charged to a quota of somebody else'",
            },
        ),
    ),
    Check(
        "holds-are-swept",
        f"No hold is live {OVERDUE} after its expiry: somebody sweeps.",
        f"""
    SELECT concat('hold ', id) AS subject,
           concat('of owner ', owner_id, ' has expired at ', expires_at, ' and is still live') AS problem
    FROM holds WHERE state = 'held' AND expires_at < now() - interval '{OVERDUE}'
    """,
        Moment.SOON,
    ),
    NO_HOLD_IS_LEFT,
)


# What each dimension counts: how, over which window, and which tokens (input, output).
DIMENSIONS = """(VALUES
    ('concurrent_requests', 'running', NULL, 0, 0), ('requests_per_minute', 'requests', 'minute', 0, 0),
    ('tokens_per_minute', 'tokens', 'minute', 1, 1), ('input_tokens_per_minute', 'tokens', 'minute', 1, 0),
    ('output_tokens_per_minute', 'tokens', 'minute', 0, 1), ('tokens_per_day', 'tokens', 'day', 1, 1),
    ('tokens_per_month', 'tokens', 'month', 1, 1), ('cost_picos_per_day', 'money', 'day', 1, 1),
    ('cost_picos_per_month', 'money', 'month', 1, 1), ('prepaid_credit_picos', 'money', NULL, 1, 1))
    AS d (dimension, charge, unit, counts_input, counts_output)"""
USED_MAX = 2**63 - 1  # where a counter ends: it says "so much or more" from there on
MONTHS_KEPT, DAYS_KEPT = "93 days", "2 days"  # so old counters of months, and of minutes and days, get before they are deleted

# A quota counts what was used before it was there if an admin has set it, and from then on what it is charged.
RULES = f"""
SELECT q.id AS quota_id, q.subject_id, q.model, q.dimension, q.deleted_at, d.charge, d.unit, d.counts_input * q.input_weight_milli
       AS input_weight, d.counts_input * q.cached_input_weight_milli AS cached_weight,
       d.counts_output * q.output_weight_milli AS output_weight, a.subject_id IS NOT NULL AS audited,
       a.subject_id IS NOT NULL AND q.deleted_at IS NULL AND NOT q.for_new_keys AS counts_past
FROM quotas q JOIN {DIMENSIONS} USING (dimension)
LEFT JOIN (SELECT DISTINCT subject_id FROM audit_log WHERE action = 'quota.set') a ON a.subject_id = q.id::text
"""


def weighed(sent: str, cached: str, output: str) -> str:
    """SQL of what tokens count for a quota, rounded up to a whole."""
    return f"(({sent} - {cached}) * w_input + {cached} * w_cached + {output} * w_output + divisor - 1) / divisor"


def window(unit: str, at: str) -> str:
    """SQL of the start of the calendar window that a moment lies in; the epoch for one that never ends."""
    return f"CASE WHEN {unit} IS NULL THEN 'epoch' ELSE date_trunc({unit}, {at}, 'UTC') END"


def charges(moved: str, charged: str) -> str:
    """SQL of each hold beside each quota that counts it, with what its end counts: of some holds, and of some ways to charge.

    An expired hold counts its whole lease, until its owner has told by a further usage event what it delivered. OFFSET 0 keeps the
    planner from looking up the usage events of each pair: it does not see how many quotas a hold has.
    """
    return f"""
    SELECT h.*, r.quota_id, r.charge, r.unit, h.input_token_count AS sent, h.cached_input_token_count AS cached,
           h.posted_token_count AS posted, r.quota_id = ANY(h.quota_ids) AS is_charged,
           CASE WHEN r.charge <> 'money' THEN r.input_weight WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.input_picos_per_token END AS w_input,
           CASE WHEN r.charge <> 'money' THEN r.cached_weight WHEN h.embedding THEN p.embedding_picos_per_token
                ELSE p.cached_input_picos_per_token END AS w_cached,
           CASE r.charge WHEN 'money' THEN p.output_picos_per_token ELSE r.output_weight END AS w_output,
           CASE r.charge WHEN 'money' THEN 1 ELSE 1000 END AS divisor,
           h.state = 'expired' AND h.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END AS told_late
    FROM ({HOLDS_WITH_EVENTS} WHERE ({LOOKED_AT}) AND {moved} OFFSET 0) h
    CROSS JOIN unnest(ARRAY[h.organization_id, h.project_id, h.api_key_id]) AS s (subject_id)
    JOIN rules r ON r.subject_id = s.subject_id AND (r.quota_id = ANY(h.quota_ids) OR (r.counts_past AND r.model IN ('', h.model)))
        AND {charged}
    JOIN price_versions p ON p.id = h.price_version_id
    """


# Holds that may count in a window of which the counter is still kept.
LOOKED_AT = f"""h.state = 'held'
    OR h.organization_id IN (SELECT subject_id FROM quotas WHERE dimension = 'prepaid_credit_picos' AND deleted_at IS NULL)
    OR h.charged_at >= (
    SELECT least(min(window_start), now() - interval '{MONTHS_KEPT}') FROM quota_counters WHERE window_start > 'epoch')"""
# A lifetime quota (without a unit) never keeps the lease of an expired hold: that would be credit lost for ever.
TOTAL = f"""CASE WHEN state = 'settled' OR told_late OR (state = 'expired' AND unit IS NULL)
    THEN {weighed("event_input", "least(cached, event_input)", "event_billed")}
    WHEN state = 'expired' THEN {weighed("sent", "least(cached, sent)", "leased_token_count")} ELSE 0 END"""
POSTED = f"CASE WHEN posted > 0 AND state = 'held' THEN {weighed('sent', 'cached', '(posted - sent)')} ELSE 0 END"
HELD = f"""CASE WHEN state <> 'held' THEN 0 WHEN charge = 'running' THEN 1 WHEN charge = 'requests' THEN 0
    WHEN posted > 0 THEN {weighed("sent", "cached", "leased_token_count")} - {weighed("sent", "cached", "(posted - sent)")}
    ELSE greatest({weighed("sent", "0", "leased_token_count")}, {weighed("sent", "sent", "leased_token_count")}) END"""
# What may be missing in the counter: it was given back while the quota was made.
DOUBTFUL = f"""CASE WHEN told_late AND NOT is_charged AND charge IN ('tokens', 'money')
    THEN {weighed("sent", "0", "leased_token_count")} ELSE 0 END"""
# A hold that never left the minute of its admission has all in one window, which is nearly every hold.
PLAIN = f"""
SELECT quota_id, {window("unit", "CASE WHEN charge = 'requests' THEN admitted_at ELSE charged_at END")} AS window_start,
       CASE charge WHEN 'requests' THEN (state <> 'voided')::int WHEN 'running' THEN 0 ELSE greatest({TOTAL}, {POSTED}) END AS used,
       {HELD} AS held, {DOUBTFUL} AS doubtful
FROM ({charges("true", "(cardinality(h.posted_minutes) = 0 OR r.charge IN ('requests', 'running'))")}) AS charges
"""
# The others have left in each minute that they were extended in what they had delivered by then.
MOVED = f"""
SELECT quota_id, {window("unit", "left_at")} AS window_start, so_far - lag(so_far, 1, 0) OVER story AS used,
       CASE WHEN number = 0 THEN held ELSE 0 END AS held, CASE WHEN number = 0 THEN doubtful ELSE 0 END AS doubtful
FROM (
    SELECT id, quota_id, unit, number,
           CASE WHEN number = 0 THEN charged_at ELSE to_timestamp(posted_minutes[number] * 60) END AS left_at,
           {HELD} AS held, {DOUBTFUL} AS doubtful, CASE WHEN number = 0 THEN greatest({TOTAL}, {POSTED})
           WHEN state <> 'voided' AND posted_minutes[number + 1] > 0 AND NOT (state = 'expired' AND unit IS NULL)
           THEN {weighed("sent", "cached", "(posted_minutes[number + 1] - sent)")}
           ELSE 0 END AS so_far
    FROM ({charges("cardinality(h.posted_minutes) > 0", "r.charge IN ('tokens', 'money')")}) AS charges,
         LATERAL (SELECT generate_series(1, cardinality(posted_minutes), 2) UNION ALL SELECT 0) AS mark (number)
) AS marks
WINDOW story AS (PARTITION BY id, quota_id ORDER BY number = 0, number)
"""


# What an admin made tighter may be over its limit until the windows of then have ended. A lifetime quota may be over it by what
# owners of expired holds reported later: their leases had been given back.
LIMITS_HOLD = Check(
    "limits-hold",
    "Used and held together are within the limit of every enforced quota, unless it was made tighter while the window ran.",
    rows_with(
        "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
        """
        SELECT c.*, q.dimension, reported_late.picos AS late,
               CASE WHEN q.raised_until IS NOT NULL AND q.dimension = 'prepaid_credit_picos'
                                        OR q.raised_until > coalesce(nullif(c.window_start, 'epoch'), running.since)
                                      THEN q.raised_limit_value ELSE q.limit_value END AS bound
        FROM quota_counters c JOIN quotas q ON q.id = c.quota_id,
        LATERAL (SELECT min(admitted_at) AS since FROM holds
                 WHERE c.window_start = 'epoch' AND state = 'held' AND q.id = ANY(quota_ids)) AS running,
        LATERAL (SELECT coalesce(sum(e.cost_picos), 0) AS picos FROM holds h JOIN usage_events e ON e.hold_id = h.id
                 WHERE q.dimension = 'prepaid_credit_picos' AND h.organization_id = q.subject_id AND h.state = 'expired'
                   AND e.part = (h.delivered_token_count > 0)::int) AS reported_late
        WHERE q.deleted_at IS NULL AND q.enforced AND NOT EXISTS (
            SELECT FROM audit_log a WHERE a.action IN ('quota.set', 'quota.raise') AND a.subject_id = q.id::text
                AND a.created_at >= c.window_start AND (
                greatest((after->>'limit_value')::numeric, (after->>'raised_limit_value')::numeric)
                < greatest((before->>'limit_value')::numeric, (before->>'raised_limit_value')::numeric)
                OR (after->>'enforced')::bool > (before->>'enforced')::bool))
        """,
        {"used + held > bound + late": "concat('used ', used, ' + held ', held, ' exceed the limit ', bound)"},
    ),
)


COUNTER_CHECKS = (
    Check(
        "counters-equal-holds",
        "Of every counter, held is the sum of what live holds claim, and used what usage events bill and live holds have posted "
        "in its window, besides leases of expired holds; no charge is without a counter. Always looks at whole windows.",
        "WITH rules AS ("
        + RULES
        + ") "
        + rows_with(
            "concat('counter of quota ', quota_id, ' (', dimension, ') from ', window_start)",
            f"""
        SELECT quota_id, window_start, r.dimension, c.used, c.held, c.quota_id IS NOT NULL AS stands,
               coalesce(x.used, 0) AS least, coalesce(x.held, 0) AS claimed,
               -- Of a quota that an admin set and removed again nobody knows any more what it counted when it was made.
               CASE WHEN r.deleted_at IS NOT NULL AND r.audited THEN greatest(coalesce(x.used, 0), c.used)
                    ELSE coalesce(x.used + x.doubtful, 0) END AS most,
               -- One that an admin has set has no counters of the windows before it.
               window_start = {window("r.unit", "now()")} OR (NOT r.audited AND window_start >= now()
                    - CASE r.unit WHEN 'month' THEN interval '{MONTHS_KEPT}' ELSE interval '{DAYS_KEPT}' END) AS kept
        FROM (SELECT quota_id, window_start, sum(used) AS used, sum(held) AS held, sum(doubtful) AS doubtful
              FROM ({PLAIN} UNION ALL {MOVED}) AS charged GROUP BY 1, 2) x
        FULL JOIN quota_counters c USING (quota_id, window_start)
        JOIN rules r USING (quota_id)
        """,
            {
                "stands AND held <> claimed": "concat('held ', held, ', but live holds claim ', claimed)",
                f"stands AND used < {USED_MAX} AND used NOT BETWEEN least AND most": "concat('used ', used, ', but holds left ', "
                "least, ' to ', most)",
                "NOT stands AND (claimed > 0 OR (least > 0 AND kept))": "concat('is missing: holds claim ', claimed, ' and left "
                "', least)",
            },
        ),
    ),
    LIMITS_HOLD,
    # Exact: usage that an adjustment bills in place of its own cost was counted at its price, and is rated nowhere.
    Check(
        "lifetime-quotas-equal-the-ledger",
        "Of a prepaid organization's credit, used is what the ledger and usage events that are not rated yet bill, and what "
        "extensions of live holds have posted. Always looks at all time.",
        rows_with(
            "concat('prepaid credit of organization ', organization_id)",
            f"""
        SELECT o.organization_id, coalesce(c.used, 0) AS used, coalesce(posted.picos, 0) AS billed,
               coalesce(waiting.picos, 0) AS waiting, coalesce(running.picos, 0) AS running,
               coalesce(posted.picos, 0) + coalesce(waiting.picos, 0) + coalesce(running.picos, 0) AS explained
        FROM prepaid_organizations o LEFT JOIN quota_counters c USING (quota_id),
        LATERAL (SELECT -sum(l.amount_picos) AS picos FROM ledger_transactions t
                 JOIN ledger_entries l ON l.transaction_id = t.id AND l.token_kind IS NOT NULL
                 WHERE t.organization_id = o.organization_id AND t.kind = 'usage') AS posted,
        LATERAL (SELECT sum({EVENT_COST}) AS picos FROM usage_events e JOIN price_versions p ON p.id = e.price_version_id
                 WHERE e.organization_id = o.organization_id AND e.ledger_transaction_id IS NULL) AS waiting,
        LATERAL (SELECT sum(posted_cost_picos) AS picos FROM holds
                 WHERE state = 'held' AND organization_id = o.organization_id) AS running
        """,
            {
                f"used < {USED_MAX} AND used <> explained": "concat('used ', used, ' picos, but ', billed, ' are in the ledger, "
                "', waiting, ' wait to be rated and ', running, ' are posted by live holds')",
            },
        ),
    ),
)


UNRATED_FOR = "10 minutes"  # rating runs every second
POSTED_EVENTS = "usage_events e JOIN ledger_transactions t ON t.id = e.ledger_transaction_id"
PRICES = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in TOKEN_KINDS.items())
PRICE = f"CASE token_kind {PRICES} END"
DIFFERENT = "(used_tokens, used_picos) IS DISTINCT FROM (posted_tokens, posted_picos)"
USED_AND_POSTED = """concat(coalesce(used_tokens, 0), ' tokens for ', coalesce(used_picos, 0), ' picos used, ',
    coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted')"""


LEDGER_CHECKS = (
    Check(
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
    ),
    Check(
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
                "kind <> 'usage' OR NOT is_own": "concat('stands in transaction ', transaction_id, ', which is another "
                "customer''s, ', 'of another day, or not for usage')",
            },
        ),
    ),
    Check(
        "postings-are-their-usage",
        "The legs of a transaction are the tokens of the usage events behind it, by price version and kind, at exactly their "
        "price.",
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
    ),
    Check(
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
    ),
    Check(
        "transactions-balance",
        "Every ledger transaction has legs that sum to zero in each currency, on accounts of its own customer, in the currency "
        "of their price.",
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
    ),
    Check(
        "usage-is-rated",
        f"No usage event is unrated {UNRATED_FOR} after it was written: somebody rates, and nothing stands in the way.",
        f"""
    SELECT concat('usage event ', id) AS subject, concat('was settled at ', settled_at, ' and is not rated') AS problem
    FROM usage_events e WHERE rated_at IS NULL AND settled_at < now() - interval '{UNRATED_FOR}' AND {NOT_CORRECTED}
    """,
        Moment.SOON,
    ),
    Check(
        "all-is-rated",
        "Nothing is waiting to be rated.",
        f"SELECT concat('usage event ', id) AS subject, 'is not rated' AS problem FROM usage_events e WHERE rated_at IS NULL "
        f"AND {NOT_CORRECTED}",
        Moment.AT_REST,
    ),
)


MONTH = "concat('organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))"


INVOICE_CHECKS = (
    Check(
        "closed-months-are-frozen",
        "Every closed month has its digests, and only a closed one.",
        rows_with(
            MONTH,
            """
        SELECT coalesce(b.organization_id, c.organization_id) AS organization_id, coalesce(b.month, c.month) AS month, b.state,
               c.json_sha256 FROM billing_months b FULL JOIN month_closings c USING (organization_id, month)
        """,
            {
                "state = 'closed' AND json_sha256 IS NULL": "'is closed, and nothing was frozen'",
                "state IS DISTINCT FROM 'closed' AND json_sha256 IS NOT NULL": "concat('is ', coalesce(state, 'open'), "
                "', and was frozen')",
            },
        ),
    ),
    Check(
        "invoices-are-the-ledger",
        "The usage lines of an invoice are the tokens and amounts that the ledger has for the month, by price version, kind and "
        "month of use.",
        rows_with(
            f"concat({MONTH}, ', price version ', price_version_id, ', ', token_kind, ' of ', usage_month)",
            """
        SELECT * FROM (
            SELECT organization_id, t.billing_month AS month, price_version_id, token_kind,
                   to_char(t.effective_at AT TIME ZONE 'UTC', 'YYYY-MM') AS usage_month, sum(token_count) AS posted_tokens,
                   -sum(amount_picos) AS posted_picos
            FROM month_closings c JOIN ledger_transactions t USING (organization_id)
            JOIN ledger_entries l ON l.transaction_id = t.id
            WHERE t.billing_month = c.month AND t.kind = 'usage' AND token_kind IS NOT NULL GROUP BY 1, 2, 3, 4, 5
        ) posted FULL JOIN (
            SELECT organization_id, month, price_version_id, token_kind, usage_month, sum(token_count) AS invoiced_tokens,
                   sum(l.exact_picos) AS invoiced_picos
            FROM invoices i JOIN invoice_lines l ON l.invoice_id = i.id WHERE kind IN ('usage', 'late_usage') GROUP BY 1, 2, 3, 4, 5
        ) invoiced USING (organization_id, month, price_version_id, token_kind, usage_month)
        """,
            {
                "(posted_tokens, posted_picos) IS DISTINCT FROM (invoiced_tokens, invoiced_picos)": "concat("
                "coalesce(posted_tokens, 0), ' tokens for ', coalesce(posted_picos, 0), ' picos posted, ', "
                "coalesce(invoiced_tokens, 0), ' for ', coalesce(invoiced_picos, 0), ' invoiced')"
            },
        ),
    ),
    Check(
        "invoices-are-owed",
        "What a closed month has moved on the customer's account is the total of its invoice, less the credit notes of the month.",
        rows_with(
            MONTH,
            """
        SELECT c.organization_id, c.month, coalesce(i.total_picos, 0) + (
                   SELECT coalesce(sum(a.amount_picos), 0) FROM adjustment_decisions d JOIN adjustments a ON a.id = d.adjustment_id
                   WHERE d.approved AND a.invoice_id IS NOT NULL AND a.organization_id = c.organization_id
                     AND d.billing_month = c.month
               ) AS owed, (
                   SELECT coalesce(sum(l.amount_picos), 0) FROM ledger_transactions t
                   JOIN ledger_entries l ON l.transaction_id = t.id
                   JOIN ledger_accounts r ON r.id = l.account_id AND r.kind = 'receivable'
                   WHERE t.organization_id = c.organization_id AND t.billing_month = c.month) AS posted
        FROM month_closings c LEFT JOIN invoices i USING (organization_id, month)
        """,
            {"owed <> posted": "concat(posted, ' picos are on the account, invoice and credit notes say ', owed)"},
        ),
    ),
    Check(
        "invoices-add-up",
        "An invoice has as many lines as it says, they add up to it, exactly and rounded, and what rounding left of the "
        "customer's invoice before is carried into it.",
        rows_with(
            "concat('invoice ', number)",
            """
        SELECT i.*, lines.count, lines.exact, lines.rounded,
               coalesce(lag(carried_out_picos) OVER (PARTITION BY organization_id ORDER BY month), 0) AS carried_before
        FROM invoices i, LATERAL (
            SELECT count(*) AS count, coalesce(sum(l.exact_picos), 0) AS exact, coalesce(sum(l.amount_picos), 0) AS rounded
            FROM invoice_lines l WHERE l.invoice_id = i.id) AS lines
        """,
            {
                "count <> line_count": "concat('has ', count, ' lines of ', line_count)",
                "exact <> exact_picos OR rounded <> total_picos": "concat('is ', exact_picos, ' picos, rounded ', total_picos, "
                "'; its lines are ', exact, ', rounded ', rounded)",
                "total_picos + carried_out_picos <> exact_picos + carried_in_picos": "'loses picos by rounding'",
                "carried_in_picos <> carried_before": "concat('carries in ', carried_in_picos, ' picos, the one before carried "
                "out ', carried_before)",
            },
        ),
    ),
    Check(
        "numbers-have-no-gaps",
        "Invoices and credit notes are numbered from 1 on without a gap, as far as their series has counted.",
        rows_with(
            "concat('series ', series)",
            """
        SELECT series, count(ordinal) AS count, coalesce(min(ordinal), 1) AS first, coalesce(max(ordinal), 0) AS last,
               coalesce((SELECT last_ordinal FROM document_series s WHERE s.series = numbered.series), 0) AS counted
        FROM (SELECT 'INV' AS series, ordinal FROM invoices
              UNION ALL SELECT 'CN', credit_note_ordinal FROM adjustment_decisions) AS numbered GROUP BY series
        """,
            {
                "count <> last OR first <> 1 OR last <> counted": "concat('has ', count, ' numbers from ', first, ' to ', last, "
                "', and has counted to ', counted)"
            },
        ),
    ),
)


FIRST_RUN_LOOKS_BACK = "35 days"  # no batch is made of an hour that was older when the export was switched on
LATE_MARGIN = "150 seconds"  # usage that was rated so shortly before the last look may not have been visible to it
FROM_HOUR = f"date_trunc('hour', {SINCE}, 'UTC')"
PLACE = "concat('organization ', organization_id, ', price version ', price_version_id, ', ', token_kind, ', hour ', hour)"


def used_by_hour(condition: str) -> str:
    """SQL of rated tokens by customer, price version, hour and kind."""
    return f"""SELECT organization_id, price_version_id, hour, token_kind, token_count AS used FROM (
        SELECT organization_id, price_version_id, date_trunc('hour', settled_at, 'UTC') AS hour, {KIND_SUMS}
        FROM usage_events WHERE rated_at IS NOT NULL AND settled_at >= {FROM_HOUR} {condition} GROUP BY 1, 2, 3
    ) sums, {KIND_ROWS} WHERE token_count <> 0"""


EXPORTED = f"""SELECT organization_id, price_version_id, hour, token_kind, count(*) AS parts, min(part) AS first, max(part) AS last,
    coalesce(sum(token_count) FILTER (WHERE state <> 'cancelled'), 0) AS exported
    FROM meter_batches WHERE hour >= {FROM_HOUR} GROUP BY 1, 2, 3, 4"""


def short_hours(rated: str) -> str:
    """SQL of closed hours of which less is exported than was used."""
    return rows_with(
        PLACE,
        f"""
        SELECT * FROM (
            SELECT closed_until,
                   least((SELECT min(hour) FROM meter_batches), closed_until - interval '{FIRST_RUN_LOOKS_BACK}') AS since
            FROM export_progress
        ) progress,
        ({used_by_hour(rated)}) usage LEFT JOIN ({EXPORTED}) batches USING (organization_id, price_version_id, hour, token_kind)
        WHERE hour >= since AND hour < closed_until
        """,
        {"coalesce(exported, 0) < used": "concat('exports only ', coalesce(exported, 0), ' tokens of ', used, ' used')"},
    )


EXPORT_CHECKS = (
    Check(
        "stripe-settles-the-invoices",
        "What is settled with Stripe is the invoice of a closed month, and usage, late usage and items there come to it.",
        rows_with(
            "concat('settlement of organization ', organization_id, ', ', to_char(month, 'YYYY-MM'))",
            """
        SELECT s.*, m.state, coalesce(i.total_picos, 0) AS total_picos,
               (SELECT coalesce(sum(amount_minor), 0) FROM stripe_month_items t
                WHERE (t.organization_id, t.month) = (s.organization_id, s.month)) AS item_minor
        FROM stripe_month_settlements s LEFT JOIN billing_months m USING (organization_id, month)
        LEFT JOIN invoices i USING (organization_id, month)
        """,
            {
                "state IS DISTINCT FROM 'closed'": "'the month is not closed'",
                "due_picos <> total_picos": "concat('is of ', due_picos, ' picos, the invoice of ', total_picos)",
                "settled_at IS NOT NULL AND invoiced_minor + late_minor + item_minor <> due_minor": "concat('comes to ', "
                "invoiced_minor + late_minor + item_minor, ' there, and ', due_minor, ' is due')",
            },
        ),
    ),
    Check(
        "nothing-is-exported-twice",
        "The parts of an hour are numbered without a gap, and those that are not cancelled have no more tokens than were used in "
        "it.",
        rows_with(
            PLACE,
            f"SELECT * FROM ({EXPORTED}) batches LEFT JOIN ({used_by_hour('')}) usage "
            "USING (organization_id, price_version_id, hour, token_kind)",
            {
                "first <> 0 OR parts <> last + 1": "concat('has the parts ', first, ' to ', last, ' in ', parts, ' batches')",
                "exported > coalesce(used, 0)": "concat('exports ', exported, ' tokens of ', coalesce(used, 0), ' used')",
            },
        ),
    ),
    Check(
        "closed-hours-are-exported",
        "All that was used in an hour that is closed stands in its batches, if it was rated before the export last looked for "
        "late usage.",
        short_hours(f"AND rated_at < (SELECT scanned_until - interval '{LATE_MARGIN}' FROM export_progress)"),
        Moment.SOON,
    ),
    Check(
        "all-is-exported",
        "All rated usage of closed hours stands in batches.",
        short_hours(""),
        Moment.AT_REST,
    ),
)


# Tables with a trigger `TABLE_append_only`. Rows of those that have a guard of their own as well may change as that allows.
APPEND_ONLY = """
    adjustment_decisions adjustments alerts audit_log billing_months credit_applications credit_grants document_series
    invoice_letterheads invoice_lines invoices ledger_accounts ledger_entries ledger_transactions meter_batches month_closings
    plan_assignments plan_versions price_versions receipt_batches receipt_keys stripe_events stripe_late_items
    stripe_month_items stripe_month_settlements usage_corrections usage_events
"""
# Each guard with its function. A migrated database has exactly these; a test compares them.
GUARDS = {f"{table}_append_only": "refuse_change" for table in APPEND_ONLY.split()} | {
    "api_keys_are_kept": "refuse_deletion",
    "api_keys_update_told": "api_keys_update_told",
    "billing_months_close_in_order": "billing_months_close_in_order",
    "billing_months_close_once": "billing_month_closes_once",
    "document_series_count_on": "document_series_counts_on",
    "credit_applications_within_grant": "credit_within_grant",
    "holds_are_kept": "refuse_deletion",
    "holds_belong_together": "holds_belong_together",
    "holds_end_once": "hold_ends_once",
    "invoice_lines_add_up": "invoice_adds_up",
    "ledger_entries_balanced": "ledger_balanced",
    "ledger_months_open": "ledger_months_open",
    "meter_batches_guarded": "meter_batch_keeps_tokens",
    "meter_batches_invoiced_once": "meter_batch_invoiced_once",
    "organizations_are_kept": "refuse_deletion",
    "price_versions_insert_told": "price_versions_insert_told",
    "projects_are_kept": "refuse_deletion",
    "projects_have_receipt_chains": "create_receipt_chain",
    "quotas_delete_told": "quotas_delete_told",
    "quotas_insert_told": "quotas_insert_told",
    "quotas_tell_when": "quotas_tell_when",
    "quotas_update_told": "quotas_update_told",
    "receipt_chains_go_forward": "refuse_chain_going_back",
    "receipt_chains_kept": "refuse_change",
    "stripe_events_guarded": "stripe_event_keeps_payload",
    "stripe_late_items_guarded": "stripe_late_item_keeps_amount",
    "stripe_month_items_guarded": "stripe_month_item_keeps_amount",
    "stripe_month_settlements_guarded": "stripe_month_settled_once",
    "usage_events_are_of_their_holds": "usage_events_are_of_their_holds",
    "usage_events_partition": "refuse_partition",
    "usage_events_posted": "usage_events_posted",
    "usage_events_rated_once": "usage_event_changed",
}
EXPECTED = ", ".join(f"('{trigger}', '{function}')" for trigger, function in GUARDS.items())


SCHEMA_CHECKS = (
    Check(
        "guards-stand",
        "The triggers that keep journals append-only, holds ended and transactions balanced, and tell of changes, are there and "
        "on.",
        f"""
    SELECT concat('trigger ', g.name) AS subject,
           CASE WHEN t.tgname IS NULL THEN 'is missing' WHEN t.tgenabled NOT IN ('O', 'A') THEN 'is switched off'
                ELSE concat('calls ', f.proname, ' instead of ', g.function) END AS problem
    FROM (VALUES {EXPECTED}) AS g (name, function)
    LEFT JOIN pg_trigger t ON t.tgname = g.name AND t.tgparentid = 0 LEFT JOIN pg_proc f ON f.oid = t.tgfoid
    WHERE t.tgname IS NULL OR t.tgenabled NOT IN ('O', 'A') OR f.proname <> g.function
    """,
    ),
    Check(
        "constraints-apply",
        "Every constraint holds for the rows that were there before it, and every index covers them all.",
        """
    SELECT concat('constraint ', conname, ' of ', conrelid::regclass) AS subject, 'is not validated' AS problem
    FROM pg_constraint WHERE NOT convalidated AND connamespace = 'public'::regnamespace
    UNION ALL
    SELECT concat('index ', indexrelid::regclass), 'is not valid' FROM pg_index JOIN pg_class c ON c.oid = indexrelid
    WHERE NOT (indisvalid AND indisready) AND c.relnamespace = 'public'::regnamespace
    """,
    ),
    Check(
        "partitions-are-guarded",
        "No partition of the usage events can be written by its own name, past the guards of the whole.",
        """
    SELECT concat('partition ', inhrelid::regclass) AS subject, 'has no guard, or it is switched off' AS problem
    FROM pg_inherits WHERE inhparent = 'usage_events'::regclass AND NOT EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = inhrelid AND tgname = 'usage_events_partition' AND tgenabled IN ('O', 'A'))
    """,
    ),
    Check(
        "partitions-are-ahead",
        "Every usage event is in the partition of its month, and there is one for this month and the next.",
        """
    SELECT concat('usage events of ', to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM')) AS subject,
           concat(count(*), ' are in the default partition') AS problem FROM usage_events_default GROUP BY 1
    UNION ALL
    SELECT concat('partition usage_events_', to_char(month, 'YYYY_MM')), 'is missing'
    FROM (SELECT date_trunc('month', now() AT TIME ZONE 'UTC') + ahead * interval '1 month' AS month
          FROM generate_series(0, 1) ahead) m
    WHERE NOT EXISTS (SELECT FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
                      WHERE inhparent = 'usage_events'::regclass AND relname = 'usage_events_' || to_char(month, 'YYYY_MM'))
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
SAMPLE_MAX = 10  # violations told of each check; their number is always told
# Sums over millions of rows: in memory as far as it goes, and for as long as they take. Nothing waits for a reader.
SETTINGS = {"work_mem": "256MB", "statement_timeout": "0", "jit": "off", "max_parallel_workers_per_gather": "4"}
EVERYTHING = "-infinity"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and of what."""

    subject: str
    problem: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check found. sample: the first of `violation_count` violations."""

    check: Check
    violation_count: int
    sample: tuple[Violation, ...]
    duration_s: float


def chosen_checks(names: Collection[str] = (), moments: Collection[Moment] = (Moment.ALWAYS, Moment.SOON)) -> tuple[Check, ...]:
    """The checks of these names, whatever their moment; without names all of these moments. Raises: InvalidValue."""
    unknown = sorted(set(names) - {check.name for check in CHECKS})
    if unknown:
        raise InvalidValue("check", f"there is no check {unknown[0]!r}: the checks are {', '.join(c.name for c in CHECKS)}")
    return tuple(check for check in CHECKS if check.name in names or (not names and check.moment in moments))


def fsck(
    database_url: str, checks: Sequence[Check], *, since: datetime | None = None, sample_max: int = SAMPLE_MAX
) -> Iterator[Verdict]:
    """Run checks one after the other, all on the database as it is when the first begins.

    since: looks only at what was written from then on; sums begin with the month or hour of that time.
    Raises: psycopg.Error.
    """
    with psycopg.connect(psycopg_conninfo(database_url), connect_timeout=CONNECT_TIMEOUT_S) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        for check in checks:
            yield judge(connection, check, since=since, sample_max=sample_max)


def judge(connection: Connection, check: Check, *, since: datetime | None = None, sample_max: int = SAMPLE_MAX) -> Verdict:
    """Run one check as the connection's transaction sees the database."""
    began_at = time.monotonic()
    query = f"SELECT count(*) OVER (), subject, problem FROM ({check.sql}) AS found ORDER BY subject, problem LIMIT {sample_max}"
    parameters = {"since": EVERYTHING if since is None else since.isoformat()}
    rows = connection.execute(query.encode(), parameters).fetchall()
    sample = tuple(Violation(subject, problem) for _, subject, problem in rows)
    return Verdict(check, rows[0][0] if rows else 0, sample, time.monotonic() - began_at)
