"""Quota rules as a connection has read them: built once for each version of their rows, not once for each batch."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable
from datetime import datetime

from metering.holds.exchange import Connection, Row
from metering.models import QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import QuotaRule, Weights

# The limit of the moment: a raise ends by the database's clock.
RULE_COLUMNS = """
concat(id, '.', xmin, '.', raised_until > now()) AS version, id, subject, subject_id, model, dimension,
CASE WHEN deleted_at IS NOT NULL THEN NULL WHEN raised_until > now() THEN raised_limit_value ELSE limit_value END AS in_force,
input_weight_milli, cached_input_weight_milli, output_weight_milli, enforced, limit_value AS standing_limit_value,
CASE WHEN raised_until > now() THEN raised_until END AS raised_until
"""


class RuleCache:
    """Rules by the version of their row and whether a raise holds: every batch reads the same ones, and building one is slow.

    A row's id and the transaction that wrote it are together another for each version that a server ever commits. Another server,
    or the same one restored from a backup, may come to the same with another version: so each connection has its own.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rules: dict[str, QuotaRule] = {}

    def of(self, row: Row) -> QuotaRule:
        """One row of RULE_COLUMNS; the same object for the same version."""
        rule = self._rules.get(row[0])
        if rule is None:
            if len(self._rules) >= self._count_max:
                self._rules.clear()
            rule = self._rules[row[0]] = rule_of(*row[1:])
        return rule


RULE_COUNT_MAX = 32_768  # some 15 MB
RULES: weakref.WeakKeyDictionary[Connection, RuleCache] = weakref.WeakKeyDictionary()


def rules_of_rows(connection: Connection, rows: Iterable[Row]) -> dict[int, QuotaRule]:
    """Rules by number, from rows of RULE_COLUMNS that this connection has read."""
    cache = RULES.get(connection)
    if cache is None:
        cache = RULES[connection] = RuleCache(RULE_COUNT_MAX)
    return {rule.number: rule for rule in map(cache.of, rows)}


def rule_of(
    quota_id: uuid.UUID,
    subject: str,
    subject_id: uuid.UUID,
    model: str,
    dimension: str,
    limit_value: int | None,
    input_weight: int,
    cached_input_weight: int,
    output_weight: int,
    enforced: bool,
    standing_limit_value: int,
    raised_until: datetime | None,
) -> QuotaRule:
    """One row of RULE_COLUMNS but its version."""
    weights = Weights(input_weight, cached_input_weight, output_weight)
    place = (QuotaSubject(subject), subject_id, model, QuotaDimension(dimension))
    return QuotaRule(quota_id, *place, limit_value, weights, enforced, standing_limit_value, raised_until)
