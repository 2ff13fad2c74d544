"""Preview of a limit: the recorded requests of a past time, admitted again as if it had been set.

Admissions, extensions and ends are decided by `quotas.py`, on counters in memory. Requests that
began before the time only count, as past usage does when a limit is set. A request that the limit
refuses counts nothing, and one that it ends early counts up to there.

What is not recorded plays no part: requests that were refused, and when within a minute a request
asked for more output. Such a request gets the slices of this server. Reads only.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import (
    ApiKey,
    HoldState,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    UsageSubject,
    record_of,
)
from metering.core.retained import check_details
from metering.pricing.prices import TOKEN_PRICES, TokenPrices, embedding_terms
from metering.quotas import quotas
from metering.quotas.quota_admin import OF_CREDIT, check_key, checked_terms, find_subject
from metering.quotas.quota_rules import (
    FOR_END_USERS,
    FOR_LABEL,
    MINUTE,
    NO_WINDOW,
    Charge,
    CounterKey,
    QuotaRule,
    Tokens,
)
from metering.quotas.quota_states import weights_of
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.store.db import database_now
from metering.tenants.key_groups import FOR_KEYS
from metering.tenants.usage_subjects import checked_end_user, checked_label

USUAL_TIME = timedelta(days=7)
TIME_MAX = timedelta(days=31)
REQUESTS_MAX = 1_000_000  # half a minute of one core
ROWS_AT_ONCE = 200  # replayed between two turns of the event loop, in some milliseconds
MEMBERS_MAX = 100

# Settled requests that counted at :since or later, and those that are not settled. A settled hold
# has one usage event; an expired one is charged its lease until its owner reports the tokens
# (`quota_recount.CHARGES`).
REQUESTS = """
WITH recorded AS (
    SELECT h.*, e.settled_at AS ends_at, true AS is_reported,
           e.input_token_count + e.embedding_token_count AS reported_input,
           e.billed_token_count AS reported_output,
           e.billed_reasoning_token_count AS reported_reasoning
    FROM usage_events e
    JOIN holds h ON h.id = e.hold_id
    WHERE e.organization_id = :organization_id
      AND e.settled_at >= :since
      AND e.part = 0
      AND h.state = 'settled'
    UNION ALL
    SELECT h.*, h.ended_at,
           h.state = 'expired'
               AND e.parts > CASE WHEN h.delivered_token_count > 0 THEN 1 ELSE 0 END,
           e.input, e.billed, e.billed_reasoning
    FROM holds h,
    LATERAL (
        SELECT count(*) AS parts,
               coalesce(sum(input_token_count + embedding_token_count), 0)::bigint AS input,
               coalesce(sum(billed_token_count), 0)::bigint AS billed,
               coalesce(sum(billed_reasoning_token_count), 0)::bigint AS billed_reasoning
        FROM usage_events
        WHERE hold_id = h.id AND settled_at >= h.ended_at
    ) e
    WHERE h.organization_id = :organization_id
      AND (h.state = 'held' OR h.state = 'expired' AND h.ended_at >= :since)
      AND h.request_id <> h.id
), concerned AS (
    SELECT *
    FROM recorded
    WHERE admitted_at < :ends_at
      AND :subject_id IN (organization_id, project_id, api_key_id)
      AND (:model = '' OR model = :model)
      AND (CAST(:end_user_id AS uuid) IS NULL OR end_user_id = :end_user_id)
      AND (CAST(:label_key AS text) IS NULL OR labels ->> :label_key = :label_value)
      AND (CAST(:key_ids AS uuid[]) IS NULL OR api_key_id = ANY(CAST(:key_ids AS uuid[])))
)
"""
MEMBER = """CASE
    WHEN :for_each = '' THEN ''
    WHEN :for_each = 'end_user' THEN end_user_id::text
    WHEN :for_each LIKE 'key:%' THEN api_key_id::text
    ELSE labels ->> substr(:for_each, 7)
END"""
COUNTED = text(f"""{REQUESTS}
SELECT count(*) FROM (SELECT FROM concerned LIMIT {REQUESTS_MAX + 1}) counted
""")
READ = text(f"""{REQUESTS}
SELECT admitted_at, charged_at, ends_at, state, input_token_count, cached_input_token_count,
       leased_token_count, posted_token_count, posted_minutes, reasoning_token_count,
       price_version_id, embedding, is_reported, reported_input, reported_output,
       reported_reasoning, {MEMBER} AS member
FROM concerned
ORDER BY admitted_at
""")
ALL_PRICES = text(f"SELECT {TOKEN_PRICES} FROM price_versions p")


@dataclass(slots=True)
class Previewed:
    """Numbers of requests of a day or a member: all, and what the limit would have done to them.

    `name` is the day, `YYYY-MM-DD` in UTC, or that of the member; an erased end user has none.
    """

    name: str
    request_count: int = 0
    refused_count: int = 0
    shortened_count: int = 0


@dataclass(frozen=True, slots=True)
class Preview:
    """Requests from `starts_at` to `ends_at`, and those that the limit would have refused.

    `members` are the most refused ones of a selector, at most `MEMBERS_MAX`.
    """

    starts_at: datetime
    ends_at: datetime
    request_count: int
    refused_count: int
    shortened_count: int
    first_refused_at: datetime | None
    days: tuple[Previewed, ...]
    members: tuple[Previewed, ...] = ()
    member_count: int = 0
    refused_member_count: int = 0


@dataclass(frozen=True, slots=True)
class Slices:
    """Output tokens that a request is leased at once, and the fewest with which it starts."""

    token_count: int
    least_token_count: int


@dataclass(slots=True, eq=False)
class Running:
    """An admitted request. `moves` are its extensions to come: time, delivered tokens, lease."""

    rule: QuotaRule
    charge: Charge
    tokens: Tokens
    is_known: bool  # whether the consumption of an ended request is
    moves: list[tuple[datetime, int, int]]
    ends_at: datetime | None
    day: str  # empty before the time
    member: str
    is_shortened: bool = False


@dataclass(slots=True, eq=False)
class Replay:
    """Counters of a limit, or of each member of a selector, while requests are admitted again.

    `rule` is the limit. Requests admitted before `starts_at` are not refused.
    """

    rule: QuotaRule
    starts_at: datetime
    slices: Slices
    prices: Mapping[tuple[int, bool], TokenPrices]
    first_refused_at: datetime | None = None
    days: dict[str, Previewed] = field(default_factory=dict)
    members: dict[str, Previewed] = field(default_factory=dict)
    _counters: Counters = field(default_factory=lambda: Counters(NO_WINDOW))
    _rules: dict[str, QuotaRule] = field(default_factory=dict)
    _keys: dict[int, list[CounterKey]] = field(default_factory=dict)  # by number of the rule
    _due: list[tuple[datetime, int, Running]] = field(default_factory=list)  # a heap
    _count: int = 0

    def admit(self, row: Row[Any]) -> None:
        """Admit a request, the next by time, after what has happened since the last one."""
        now: datetime = row.admitted_at
        self.pass_to(now)
        rule = self._rule_of(row.member)
        is_counted = now >= self.starts_at
        day = f"{now.astimezone(UTC):%Y-%m-%d}" if is_counted else ""
        if is_counted:
            self._count_in(day, row.member, "request_count")
        else:
            rule = replace(rule, limit_value=None)
        moves = list(moves_of(row, self.slices.token_count))
        first = min(self.slices.token_count, row.leased_token_count)
        first = first if moves else row.leased_token_count
        charge = Charge(
            self.prices[row.price_version_id, row.embedding],
            row.input_token_count,
            row.cached_input_token_count,
            0,
            0,
            now,
            now,
        )
        self._open(rule, now)
        try:
            charge = quotas.admit(
                self._counters, (rule,), charge, first, min(self.slices.least_token_count, first)
            )
        except QuotaExceeded:
            self._count_in(day, row.member, "refused_count")
            self.first_refused_at = self.first_refused_at or now
            return
        tokens = row.reported_input, row.reported_output, row.reported_reasoning
        is_known = row.state == HoldState.SETTLED or row.is_reported
        running = Running(rule, charge, tokens, is_known, moves, row.ends_at, day, row.member)
        self._expect(running)

    def pass_to(self, until: datetime) -> None:
        """Extend and end the requests that did so before a time."""
        while self._due and self._due[0][0] <= until:
            at, _, running = heapq.heappop(self._due)
            self._counters.now = at
            if running.moves:
                _, delivered, lease = running.moves.pop(0)
                if not running.is_shortened:
                    self._extend(running, min(delivered, running.charge.leased_token_count), lease)
                self._expect(running)
            else:
                self._end(running)

    def _expect(self, running: Running) -> None:
        """Note when the request moves or ends next; one that still runs never does."""
        at = running.moves[0][0] if running.moves else running.ends_at
        if at is not None:
            self._count += 1
            heapq.heappush(self._due, (at, self._count, running))

    def _extend(self, running: Running, delivered: int, lease: int) -> None:
        """Lease output up to `lease` tokens in total, or less: then the request ends early."""
        now, charge = self._counters.now, running.charge
        self._open(running.rule, now)
        wanted = max(lease - charge.leased_token_count, 1)
        try:
            running.charge = quotas.extend(
                self._counters, (running.rule,), charge, delivered, wanted, running.tokens[2]
            )
        except QuotaExceeded:
            self._shorten(running)
            return

    def _shorten(self, running: Running) -> None:
        """End the request with its leased output, if it had more."""
        sent, output, reasoning = running.tokens
        leased = running.charge.leased_token_count
        if running.is_shortened or output <= leased:
            return
        running.is_shortened = True
        running.tokens = sent, leased, min(reasoning, leased)
        self._count_in(running.day, running.member, "shortened_count")

    def _end(self, running: Running) -> None:
        output = running.tokens[1]
        if output > running.charge.leased_token_count:
            self._extend(running, running.charge.leased_token_count, output)
            self._shorten(running)
        if running.is_known:
            quotas.settle(self._counters, (running.rule,), running.charge, running.tokens)
        else:
            quotas.expire(self._counters, (running.rule,), running.charge, running.tokens)

    def _rule_of(self, member: str) -> QuotaRule:
        if (rule := self._rules.get(member)) is None:
            rule = self._rules[member] = replace(self.rule, id=uuid.uuid4())
        return rule

    def _open(self, rule: QuotaRule, now: datetime) -> None:
        """Make the counter of the present window, and forget past ones that hold nothing."""
        counters, key = self._counters, rule.key(now)
        counters.now = now
        keys = self._keys.setdefault(rule.number, [])
        if keys and keys[-1] == key:
            return
        if (opened := counters.opened.pop(rule.number, None)) is not None:
            counters.rows[opened[0]].used -= counters.carried.pop(opened[0])
        first = rule.counted_from(now) if rule.window_minutes else key[1]
        for each in keys:
            if each[1] < first and not counters.rows[each].held:
                del counters.rows[each]
        keys[:] = [each for each in keys if each in counters.rows and each != key]
        keys.append(key)
        counters.rows.setdefault(key, Counter(0, 0))
        counters.changed.clear()
        counters.rolled.clear()
        if rule.window_minutes:
            counters.open(rule, dict.fromkeys(keys, 0))

    def _count_in(self, day: str, member: str, name: str) -> None:
        if not day:
            return
        for all_of, each in ((self.days, day), (self.members, member)):
            counted = all_of.setdefault(each, Previewed(each))
            setattr(counted, name, getattr(counted, name) + 1)


def moves_of(row: Row[Any], slice_token_count: int) -> Iterator[tuple[datetime, int, int]]:
    """Yield the extensions of a request: time, delivered tokens, and tokens leased in total.

    Of all but the last one, only the minute and the delivered tokens are recorded.
    """
    if not row.posted_token_count:
        return
    sent, leased, minutes = row.input_token_count, row.leased_token_count, row.posted_minutes
    entered = [*minutes[2::2], int(row.charged_at.timestamp()) // 60]
    for posted, minute in zip(minutes[1::2], entered, strict=False):
        at = max(NO_WINDOW + minute * MINUTE, row.admitted_at)
        delivered = posted - sent
        yield min(at, row.charged_at), delivered, min(leased, delivered + slice_token_count)
    yield row.charged_at, row.posted_token_count - sent, leased


async def preview_quota(
    session: AsyncSession,
    *,
    subject: QuotaSubject,
    subject_ref: str,
    key: QuotaKey,
    terms: QuotaTerms,
    slices: Slices,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
) -> Preview:
    """Admit the requests of a past time again under a limit, described as for `set_quota`.

    Raises: NotFound; InvalidValue for a limit that cannot be set, and for too much to replay.
    """
    if key.dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
        raise InvalidValue("dimension", OF_CREDIT)
    check_key(key, subject)
    checked_terms(key.dimension, terms)
    now = await database_now(session)
    ends_at = min(ends_at or now, now)
    starts_at = starts_at or ends_at - USUAL_TIME
    if not ends_at - TIME_MAX <= starts_at < ends_at:
        raise InvalidValue(
            "start_time",
            f"must be before end_time, which is {ends_at.isoformat()}, by {TIME_MAX.days} days at"
            " most",
        )
    subject_id, organization_id = await find_subject(session, subject, subject_ref)
    rule = QuotaRule(
        uuid.uuid4(),
        subject,
        subject_id,
        key.model,
        key.dimension,
        terms.limit_value,
        weights_of(terms),
        window_minutes=key.window_minutes,
    )
    since = rule.counted_from(starts_at) if key.window_minutes else rule.key(starts_at)[1]
    if rule.unit is None:  # concurrent requests: those that run at the beginning
        since = starts_at
    await check_details(session, since, "dimension", "single requests")
    chosen = await _chosen(session, organization_id, key)
    parameters = {
        "organization_id": organization_id,
        "subject_id": subject_id,
        "model": key.model,
        "for_each": key.for_each,
        "since": since,
        "ends_at": ends_at,
    } | chosen
    if (count := await session.scalar(COUNTED, parameters)) and count > REQUESTS_MAX:
        raise InvalidValue(
            "start_time",
            f"more than {REQUESTS_MAX:,} requests since {since:%Y-%m-%d %H:%M} UTC count in this"
            " limit: preview a later time, a shorter window, or the limit of one project or key",
        )
    prices: dict[tuple[int, bool], TokenPrices] = {}
    for row in await session.execute(ALL_PRICES):
        each = record_of(TokenPrices, row)
        prices[each.version, False], prices[each.version, True] = each, embedding_terms(each)
    replay = Replay(rule, starts_at, slices, prices)
    found = await session.stream(READ, parameters)
    async for rows in found.partitions(ROWS_AT_ONCE):
        for row in rows:
            if row.member is not None:
                replay.admit(row)
    replay.pass_to(ends_at)
    return await _result(session, replay, key, ends_at)


async def _chosen(
    session: AsyncSession, organization_id: uuid.UUID, key: QuotaKey
) -> dict[str, object]:
    """Find the end user, label or keys that the limit concerns; None for all."""
    chosen: dict[str, object] = dict.fromkeys(
        ("end_user_id", "label_key", "label_value", "key_ids")
    )
    if key.end_user:
        of_name = select(UsageSubject.id).where(
            UsageSubject.organization_id == organization_id,
            UsageSubject.kind == QuotaSubject.END_USER,
            UsageSubject.name == checked_end_user(key.end_user),
        )
        # Of an unknown one nothing is recorded.
        chosen["end_user_id"] = await session.scalar(of_name) or uuid.UUID(int=0)
    elif key.label:
        chosen["label_key"], chosen["label_value"] = checked_label(key.label)
    elif key.for_each.startswith(FOR_KEYS):
        of_group = select(ApiKey.id).where(ApiKey.group == key.for_each.removeprefix(FOR_KEYS))
        chosen["key_ids"] = list(await session.scalars(of_group))
    return chosen


async def _result(
    session: AsyncSession, replay: Replay, key: QuotaKey, ends_at: datetime
) -> Preview:
    days = sorted(replay.days.values(), key=lambda each: each.name)
    members = list(replay.members.values()) if key.for_each else []
    most = sorted(members, key=lambda each: (-each.refused_count, each.name))[:MEMBERS_MAX]
    names = await _names(session, key.for_each, [each.name for each in most])
    return Preview(
        starts_at=replay.starts_at,
        ends_at=ends_at,
        request_count=sum(each.request_count for each in days),
        refused_count=sum(each.refused_count for each in days),
        shortened_count=sum(each.shortened_count for each in days),
        first_refused_at=replay.first_refused_at,
        days=tuple(days),
        members=tuple(
            sorted(
                (replace(each, name=names.get(each.name, "")) for each in most),
                key=lambda each: (-each.refused_count, each.name),
            )
        ),
        member_count=len(members),
        refused_member_count=sum(each.refused_count > 0 for each in members),
    )


async def _names(session: AsyncSession, for_each: str, members: list[str]) -> dict[str, str]:
    """Find the names of a selector's members: of end users and keys by their ids."""
    if for_each.startswith(FOR_LABEL):
        return {each: each for each in members}
    ids = [uuid.UUID(each) for each in members]
    if for_each == FOR_END_USERS:
        found = select(UsageSubject.id, UsageSubject.name).where(UsageSubject.id.in_(ids))
    else:
        found = select(ApiKey.id, ApiKey.prefix).where(ApiKey.id.in_(ids))
    return {str(number): name or "" for number, name in await session.execute(found)}
