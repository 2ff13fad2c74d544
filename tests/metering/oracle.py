"""Record of everything that a test did, and the sums that follow from it.

Plain Python, independent of the product on purpose: choice of prices, months of bills, rounding,
groups and statements are implemented here a second time.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime

KINDS = ("input", "cached_input", "output", "reasoning", "embedding")
ENDED_BY = {
    "cancelled": ("cancelled", "deadline"),
    "limited": ("quota_exhausted", "cost_limit", "slow_consumer", "filtered"),
    "failed": ("failed",),
}
CENT = 10**10
Key = tuple[Hashable, ...]


@dataclass(eq=False, slots=True)
class Person:
    """End user. `name` is empty once it is erased; `id` is read from the database before."""

    name: str
    id: str = ""

    @property
    def shown(self) -> str:
        """Name, or the id of an erased one."""
        return self.name or self.id


@dataclass(frozen=True, slots=True)
class Price:
    """Price version: picos per token by kind; `organization` is empty for the list."""

    version: int
    model: str
    organization: str
    tier: str
    begins: datetime
    picos: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Resale:
    """Version of a resale price; `picos` has the kinds with a price of their own."""

    version: int
    organization: str
    model: str
    begins: datetime
    withdrawn: bool
    markup_milli: int
    request_picos: int
    picos: Mapping[str, int]


@dataclass(slots=True)
class Use:
    """One usage event. `month` is the month of its bill; None until it is rated."""

    hold_id: uuid.UUID
    part: int
    organization: str
    project: str
    key: str
    price: Price
    person: Person | None
    labels: dict[str, str]
    admitted_at: datetime
    settled_at: datetime
    tokens: Mapping[str, int]
    outcome: str
    migration_count: int = 0
    month: date | None = None

    @property
    def cost(self) -> int:
        """Exact cost in picos."""
        return sum(self.cost_of(kind) for kind in KINDS)

    def cost_of(self, kind: str) -> int:
        """Exact cost of one kind of token in picos."""
        return self.tokens[kind] * self.price.picos[kind]

    @property
    def used_in(self) -> date:
        """First day of the month of use."""
        return month_of(self.settled_at)


def tokens_of(
    sent: int, cached: int, output: int, reasoning: int, *, embedding: bool
) -> dict[str, int]:
    """Split counts into kinds of token."""
    if embedding:
        return dict.fromkeys(KINDS, 0) | {"embedding": sent}
    counts = sent - cached, cached, output - reasoning, reasoning, 0
    return dict(zip(KINDS, counts, strict=True))


def month_of(at: datetime | date) -> date:
    """Return the first day of a month."""
    return date(at.year, at.month, 1)


def next_month(month: date) -> date:
    """Return the first day of the next month."""
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def rounded(exact: int, carried: int) -> int:
    """Round a total to whole cents, half away from zero; nothing is charged for a sum of zero."""
    total = exact + carried
    whole = (abs(total) + CENT // 2) // CENT * CENT
    return 0 if exact == 0 else whole if total >= 0 else -whole


# How rows of reports are grouped.
GROUPINGS: Mapping[str, Callable[[Use], Hashable]] = {
    "organization": lambda use: use.organization,
    "day": lambda use: use.settled_at.date(),
    "hour": lambda use: use.settled_at.replace(minute=0, second=0, microsecond=0),
    "project": lambda use: use.project,
    "api_key": lambda use: use.key,
    "model": lambda use: use.price.model,
    "end_user": lambda use: use.person and use.person.shown,
}


def grouping(name: str, label_key: str) -> Callable[[Use], Hashable]:
    """Return the key of a use in a grouping."""
    return (lambda use: use.labels.get(label_key)) if name == "label" else GROUPINGS[name]


def row_of(uses: Iterable[Use], begins: date) -> Key:
    """Sum uses in the fields of a report's row. `begins`: first day of the report."""
    tokens = Counter[str]()
    sums = Counter[str]()
    for use in uses:
        tokens.update(use.tokens)
        request, all_tokens = int(use.part == 0), sum(use.tokens.values())
        sums["requests"] += request
        sums["migrations"] += use.migration_count
        sums["pending" if use.month is None else "posted"] += use.cost
        for name, outcomes in ENDED_BY.items():
            if use.outcome in outcomes:
                sums[f"{name} requests"] += request
                sums[f"{name} tokens"] += all_tokens
                sums[f"{name} cost"] += use.cost
        if use.settled_at.date() < begins:
            sums["late"] = 1
    shares = [
        tuple(sums[f"{name} {what}"] for what in ("requests", "tokens", "cost"))
        for name in ENDED_BY
    ]
    counts = tuple(tokens[kind] for kind in KINDS)
    facts = tuple(sums[each] for each in ("requests", "migrations", "posted", "pending"))
    return (counts, facts, *shares, bool(sums["late"]))


@dataclass(slots=True)
class Oracle:
    """All that happened, of all organizations."""

    uses: list[Use] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    resale: list[Resale] = field(default_factory=list)
    last_closed: dict[str, date] = field(default_factory=dict)
    adjusted: dict[tuple[str, date], int] = field(default_factory=lambda: defaultdict(int))
    # First and last month and the rest of each grant, in the order in which they are spent.
    grants: dict[str, list[tuple[date, date, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    carried: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    # Remainders of statements, by organization and end user.
    carried_by: dict[tuple[str, Person | None], int] = field(
        default_factory=lambda: defaultdict(int)
    )

    def price_at(self, organization: str, model: str, tier: str, at: datetime) -> Price:
        """Choose the price: the customer's own before the list's, the tier's before interactive."""
        for owner in (organization, ""):
            for wanted in dict.fromkeys((tier, "interactive")):
                found = [
                    each
                    for each in self.prices
                    if (each.organization, each.model, each.tier) == (owner, model, wanted)
                    and each.begins <= at
                ]
                if found:
                    return max(found, key=lambda each: (each.begins, each.version))
        raise LookupError(model)

    def resale_at(self, use: Use) -> Resale | None:
        """Choose the resale price of a request when it started."""
        for model in (use.price.model, ""):
            found = [
                each
                for each in self.resale
                if (each.organization, each.model) == (use.organization, model)
                and each.begins <= use.admitted_at
            ]
            last = max(found, key=lambda each: each.begins, default=None)
            if last is not None and not last.withdrawn:
                return last
        return None

    def rate(self) -> None:
        """Post all usage to its month, or to the first open one."""
        for use in self.uses:
            if use.month is None:
                closed = self.last_closed.get(use.organization)
                is_late = closed is not None and use.used_in <= closed
                use.month = next_month(closed) if is_late and closed else use.used_in

    def charged(self, organization: str, month: date) -> list[Use]:
        """Return the usage that a month's bill charges, posted or not."""
        closed = self.last_closed.get(organization)
        is_open = closed is None or month > closed
        return [
            use
            for use in self.uses
            if use.organization == organization
            and (use.month == month or (use.month is None and use.used_in == month and is_open))
        ]

    def posted(self, organization: str, month: date) -> list[Use]:
        """Return the rated usage of a month's bill."""
        return [use for use in self.charged(organization, month) if use.month is not None]

    def lines(self, organization: str, month: date) -> dict[Key, Key]:
        """Return the usage lines of an invoice: requests, tokens, those cancelled, amount."""
        lines: dict[Key, list[Use]] = defaultdict(list)
        for use in self.posted(organization, month):
            for kind in KINDS:
                if use.tokens[kind]:
                    lines[late(use, month), use.price.version, kind].append(use)
        return {
            key: (
                len({use.hold_id for use in uses}),
                sum(use.tokens[str(key[2])] for use in uses),
                sum(use.tokens[str(key[2])] for use in uses if use.outcome in CANCELLED),
                sum(use.cost_of(str(key[2])) for use in uses),
            )
            for key, uses in lines.items()
        }

    def charges(self, organization: str, month: date) -> tuple[int, int]:
        """Return adjustments and applied credit of a month."""
        adjusted = self.adjusted[organization, month]
        owed = adjusted + sum(use.cost for use in self.posted(organization, month))
        usable = sum(
            left for first, last, left in self.grants[organization] if first <= month <= last
        )
        return adjusted, -min(max(owed, 0), usable)

    def close(self, organization: str, month: date) -> tuple[int, int]:
        """Close a month; return the exact total and the rounded one."""
        adjusted, credit = self.charges(organization, month)
        exact = adjusted + credit + sum(use.cost for use in self.posted(organization, month))
        total = rounded(exact, self.carried[organization])
        self.carried[organization] += exact - total
        left, grants = -credit, []
        for first, last, picos in sorted(self.grants[organization], key=lambda each: each[1]):
            spent = min(left, picos) if first <= month <= last else 0
            left -= spent
            if last > month:
                grants.append((first, last, picos - spent))
        self.grants[organization] = grants
        self.last_closed[organization] = month
        return exact, total

    def carry(self, organization: str, person: Person | None, amount: int) -> None:
        """Carry the remainder of a statement to the next one of the end user."""
        carried = self.carried_by[organization, person]
        self.carried_by[organization, person] += amount - rounded(amount, carried)

    def statements(
        self, organization: str, month: date
    ) -> dict[Person | None, dict[Key, tuple[int, int, int]]]:
        """Return quantity, cost and amount of each line of each end user's statement."""
        sums: dict[Person | None, dict[Key, list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0])
        )
        versions = {0: None} | {each.version: each for each in self.resale}
        for use in self.posted(organization, month):
            resale = self.resale_at(use)
            number = 0 if resale is None else resale.version
            items = {kind: (use.tokens[kind], use.cost_of(kind)) for kind in KINDS}
            items["requests"] = int(use.part == 0), 0
            for item, (quantity, cost) in items.items():
                if quantity:
                    line = sums[use.person][late(use, month), use.price.model, item, number]
                    line[0] += quantity
                    line[1] += cost
        return {
            person: {
                key: (
                    quantity,
                    cost,
                    resold(versions[int(str(key[3]))], str(key[2]), quantity, cost),
                )
                for key, (quantity, cost) in lines.items()
            }
            for person, lines in sums.items()
        }

    def focus(
        self, organization: str, month: date, label_keys: Iterable[str]
    ) -> dict[Key, tuple[int, int, int]]:
        """Return cost, tokens and cancelled tokens of each charge with tags in a FOCUS file."""
        rows: dict[Key, list[int]] = defaultdict(lambda: [0, 0, 0])
        for use in self.posted(organization, month):
            tags = {key: use.labels[key] for key in label_keys if key in use.labels}
            if use.person is not None:
                name = "end_user" if use.person.name else "end_user_id"
                tags[f"weir/{name}"] = use.person.shown
            for kind in KINDS:
                if use.tokens[kind]:
                    text = json.dumps(tags, sort_keys=True) if tags else ""
                    row = rows[use.settled_at.date(), use.key, use.price.version, kind, text]
                    row[0] += use.cost_of(kind)
                    row[1] += use.tokens[kind]
                    row[2] += use.tokens[kind] if use.outcome in CANCELLED else 0
        return {key: (row[0], row[1], row[2]) for key, row in rows.items()}

    def erase(self, organization: str, person: Person | None, name: str, id_: str) -> None:
        """Forget a name: of an end user, and of all labels with it as value."""
        if person is not None:
            person.name, person.id = "", id_
        for use in self.uses:
            if use.organization == organization:
                use.labels = without(use.labels, name)


CANCELLED = ENDED_BY["cancelled"]


def without(labels: Mapping[str, str], value: str) -> dict[str, str]:
    """Remove labels with a value."""
    return {key: each for key, each in labels.items() if each != value}


def late(use: Use, month: date) -> str:
    """Return the month of use if it is before that of the bill, else nothing."""
    return "" if use.used_in == month else f"{use.used_in:%Y-%m}"


def resold(price: Resale | None, item: str, quantity: int, cost: int) -> int:
    """Return the resale amount of a line, rounded to the pico, half up."""
    if price is None:
        return cost
    if item == "requests":
        return quantity * price.request_picos
    own = price.picos.get(item)
    if item == "reasoning" and own is None:
        own = price.picos.get("output")
    return (cost * price.markup_milli + 500) // 1000 if own is None else quantity * own
