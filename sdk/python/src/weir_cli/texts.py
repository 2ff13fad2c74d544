"""The client's values as text, and parameters parsed from text; nothing here prints."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from weir_client import EndUserState, Money, QuotaDimension, QuotaSubject
from weir_client.money import minor_digits

if TYPE_CHECKING:
    from weir_client import (
        ApiKey,
        AppliedPrice,
        EndUser,
        LiveRequest,
        Model,
        Organization,
        Plan,
        PriceVersion,
        Project,
        QuotaStatus,
        ResalePrice,
        ResaleStatement,
        Result,
        Timings,
        Usage,
        UsageRow,
    )

T = TypeVar("T")
Cell = str | int | Money | datetime | None

TOKENS_PER_PRICE = 1_000_000  # prices are shown per million tokens
INT64_MAX = 2**63 - 1  # the wire's limit for one value
WINDOW_MINUTES_MAX = 44_640  # of a rolling window: 31 days
MONEY = (
    QuotaDimension.PREPAID_CREDIT,
    *(each for each in QuotaDimension if each.startswith("cost-")),
)
NAME_CHARS_MAX = 32  # in a table of usage
NOT_GIVEN, ERASED = "(not given)", "(erased)"
SPAN_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_span(text: str, examples: str = "90m, 12h, 30d or 4w") -> timedelta:
    """Parse a length of time such as `30d`, in a unit that `examples` use. Raises: ValueError."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip())
    if match is None or match[2] not in examples or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a length of time: write it as {examples}")
    return timedelta(**{SPAN_UNITS[match[2]]: int(match[1])})


def parse_time(text: str | None, now: datetime, flag: str) -> datetime | None:
    """Parse a time, or a length of time that is counted back from `now`.

    Raises: typer.BadParameter naming `flag`.
    """
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        return now - parse_span(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            "write it as 90m, 12h, 7d, 2026-11-20 or 2026-11-20T18:00:00Z", param_hint=flag
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def end_user_text(row: UsageRow | ResaleStatement) -> str:
    """Name the end user of usage or of a statement; one that was erased by its id."""
    if row.end_user:
        return row.end_user
    return f"{ERASED} {row.end_user_id}" if row.end_user_id else NOT_GIVEN


def label_text(row: UsageRow) -> str:
    """Name the label of a row of usage."""
    return NOT_GIVEN if row.label_value is None else row.label_value or "(empty)"


def shortened(text: str) -> str:
    """Shorten a name that leaves no room for the numbers of a table."""
    return text if len(text) <= NAME_CHARS_MAX else f"{text[: NAME_CHARS_MAX - 1]}…"


def counted(count: int, noun: str, several: str = "") -> str:
    """Format a number of things: `1 project`, `2 projects`, `1,200 queries` with `several`."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def duration_text(seconds: float) -> str:
    """Format a wait, rounded up: `0.3 s`, `12 s`, `4 min`, `3 h`, `9 d`."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{-int(-seconds // unit_s)} {unit}"
    return f"{-int(-seconds // 86_400)} d"


def decimal_text(value: Decimal, decimals: int = 2) -> str:
    """Format an exact number with thousands separators and at least `decimals` decimals."""
    whole, _, fraction = f"{value:,f}".partition(".")
    fraction = fraction.rstrip("0").ljust(decimals, "0")
    return f"{whole}.{fraction}" if fraction else whole


def time_text(time: datetime | None, absent: str = "—") -> str:
    """Format a time in UTC, to the second; `absent` for None."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z" if time else absent


def minute_text(time: datetime | None) -> str:
    """Format a time for a column in UTC: midnight as the day, others to the minute."""
    if time is None:
        return "—"
    utc = time.astimezone(UTC)
    return f"{utc:%Y-%m-%d %H:%M}".removesuffix(" 00:00")


def per_million(picos_per_token: int) -> Decimal:
    """Convert a price per token in picos to the exact price per million, in currency units."""
    return Money("", picos_per_token * TOKENS_PER_PRICE).amount


def tightest_text(end_user: EndUser) -> str | None:
    """Say how much of its tightest limit an end user has used, running requests included."""
    if (quota := end_user.tightest_quota) is None:
        return None
    percent = 100 * (quota.used_value + quota.held_value) // (quota.limit_value or 1)
    on = f" on {quota.model}" if quota.model else ""
    if quota.window_minutes:
        on = f" of {counted(quota.window_minutes, 'minute')}{on}"
    return f"{percent if quota.limit_value else 100} % of {quota.dimension.value}{on}"


def money_text(money: Money) -> str:
    return f"{amount_text(money)} {money.currency_code}"


def amount_text(money: Money) -> str:
    """Format an exact amount with at least the decimals of its currency."""
    return decimal_text(money.amount, minor_digits(money.currency_code))


def price_text(kind: str, model: Model) -> str | None:
    """Format a model's price of a million tokens of a kind, with its currency; None without one."""
    if (price := model.price) is None:
        return None
    picos_per_token = getattr(price, f"{kind.replace(' ', '_')}_picos_per_token")
    return f"{decimal_text(per_million(picos_per_token))} {price.currency_code}"


def dimension_amount(dimension: QuotaDimension | None, value: int, currency: str = "") -> str:
    """Format a value of a limit in the unit of its dimension, money with its currency if given."""
    if dimension not in MONEY:
        return f"{value:,}"
    money = Money(currency, value)
    return money_text(money) if currency else decimal_text(money.amount)


def parsed(flag: str, parse: Callable[..., T], *values: Any) -> T:
    """Parse a parameter with `parse`. Raises: typer.BadParameter naming `flag` on a ValueError."""
    try:
        return parse(*values)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error


def labelled(texts: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` pairs. Raises: typer.BadParameter if one is malformed."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(
                f"{text!r} is not a name, an equals sign and a value, such as team=search",
                param_hint="--label",
            )
        pairs[name] = value
    return pairs


def parse_state(text: str) -> EndUserState:
    """Parse the state of an end user. Raises: ValueError."""
    known = [each for each in EndUserState if each is not EndUserState.UNSPECIFIED]
    if text not in known:
        raise ValueError(f"must be {', '.join(known[:-1])} or {known[-1]}, got {text!r}")
    return EndUserState(text)


def parse_selector(text: str) -> str:
    """Convert a selector to the one of the API. Raises: ValueError."""
    if text == "end-user":
        return "end_user"
    kind, _, name = text.partition(":")
    if kind not in ("label", "key") or not name:
        raise ValueError("give end-user, label:KEY such as label:team, or key:GROUP")
    return text


def selector_text(for_each: str) -> str:
    """Convert a selector of the API to the one of files and options."""
    return "end-user" if for_each == "end_user" else for_each


def parse_amount(text: str) -> Decimal:
    """Parse a decimal number, with separators as in `1,000.50`. Raises: ValueError."""
    try:
        amount = Decimal(text.replace(",", "").replace("_", ""))
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None
    if not amount.is_finite():
        raise ValueError(f"{text!r} is not a number")
    return amount


def parse_picos(text: str) -> int:
    """Parse an amount into whole picos. Raises: ValueError if it is too large or too fine."""
    picos = Money.of(parse_amount(text), "").picos
    if abs(picos) > INT64_MAX:
        raise ValueError(f"the largest amount is {decimal_text(Money('', INT64_MAX).amount, 0)}")
    return picos


def parse_limit(dimension: QuotaDimension, text: str) -> int:
    """Parse a limit: whole requests or tokens, or units of the currency, converted to picos.

    Raises: ValueError with the remedy.
    """
    amount = parse_amount(text)
    if amount < 0:
        raise ValueError("a limit must be 0 or more; 0 admits nothing")
    if dimension in MONEY:
        limit = Money.of(amount, "").picos
    elif amount == amount.to_integral_value():
        limit = int(amount)
    else:
        raise ValueError(f"{dimension.value} counts whole numbers")
    if limit > INT64_MAX:
        maximum = Money("", INT64_MAX).amount if dimension in MONEY else Decimal(INT64_MAX)
        raise ValueError(f"the largest limit is {decimal_text(maximum, 0)}")
    return limit


def parse_price(text: str) -> int:
    """Parse a price per million tokens into picos per token. Raises: ValueError if invalid."""
    amount = parse_amount(text)
    if amount < 0:
        raise ValueError("a price must be 0 or more")
    picos, rest = divmod(Money.of(amount, "").picos, TOKENS_PER_PRICE)
    if rest:
        raise ValueError(f"{text} per million tokens is finer than a pico per token (six decimals)")
    if picos > INT64_MAX:
        raise ValueError(f"the largest price is {decimal_text(per_million(INT64_MAX), 0)}")
    return picos


def parse_thousandths(text: str) -> int:
    """Parse a number with at most three decimals into thousandths. Raises: ValueError."""
    milli = parse_amount(text) * 1000
    if milli != milli.to_integral_value() or not 0 <= milli <= 10**9:
        raise ValueError("write a number of 0 or more with at most three decimals, such as 0.25")
    return int(milli)


def parse_thresholds(text: str) -> list[int]:
    """Parse percentages separated by commas; `none` gives an empty list. Raises: ValueError."""
    if text == "none":
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"{text!r} is not a list of whole percentages: write one such as 50,80,100, or none"
        )
    return [int(part) for part in parts]


def grouped_dimensions(dimensions: Iterable[str]) -> str:
    """List dimensions, those of one measure together: `tokens-per-{minute,day}`."""
    windows: defaultdict[str, list[str]] = defaultdict(list)
    for each in dimensions:
        measure, _, window = each.partition("-per-")
        windows[measure].append(window)
    return ", ".join(
        f"{measure}-per-{{{','.join(of)}}}" if all(of) else measure
        for measure, of in windows.items()
    )


def percents_text(values: Iterable[int]) -> str:
    text = ", ".join(map(str, values))
    return f"{text} %" if text else "none"


def thresholds_text(dimension: QuotaDimension, values: Iterable[int]) -> str:
    """Format alert thresholds: percentages of a limit, or amounts of remaining credit."""
    if dimension is not QuotaDimension.PREPAID_CREDIT:
        return percents_text(values)
    text = ", ".join(dimension_amount(dimension, value) for value in values)
    return f"{text} left" if text else "none"


def checked_month(month: str) -> str:
    """Validate a month and return it unchanged. Raises: typer.BadParameter if malformed."""
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise typer.BadParameter(
            f"{month!r} is not a month: write it as YYYY-MM", param_hint="MONTH"
        )
    return month


def printable(text: str) -> str:
    """Remove control characters except line breaks and tabs.

    The output of models and the names of objects must not control the terminal.
    """
    return "".join(
        each for each in text if each in "\n\t" or (each >= " " and not "\x7f" <= each <= "\x9f")
    )


def usage_line(
    usage: Usage, cost: Money | None, timings: Timings | None, request_id: str = ""
) -> str:
    cached = (
        f" ({usage.cached_input_token_count:,} cached)" if usage.cached_input_token_count else ""
    )
    if usage.embedding_token_count:
        parts = [f"{usage.embedding_token_count:,} embedded"]
    else:
        thinking = (
            f" ({usage.reasoning_token_count:,} thinking)" if usage.reasoning_token_count else ""
        )
        parts = [
            f"{usage.input_token_count:,} in{cached}",
            f"{usage.billed_token_count:,} out{thinking}",
        ]
    if cost is not None:
        parts.append(str(cost))
    if timings is not None and timings.ttft_ms:
        parts.append(f"TTFT {timings.ttft_ms:,.0f} ms")
    rate = tokens_per_second(usage, timings)
    if rate is not None:
        parts.append(f"{rate:,.1f} tokens/s")
    return " · ".join([*parts, request_id] if request_id else parts)


def tokens_per_second(usage: Usage, timings: Timings | None) -> float | None:
    """Compute the decode speed: tokens after the first, divided by their time. None if unknown."""
    if timings is None or timings.decode_ms <= 0 or usage.generated_token_count < 2:
        return None
    return (usage.generated_token_count - 1) / timings.decode_ms * 1000


def result_line(result: Result) -> str:
    """Format the usage of a finished request in one line."""
    return usage_line(result.usage, result.cost, result.timings, result.request_id)


def ready_text(model: Model) -> str:
    """Format the numbers of ready, existing and drained engines of a model."""
    drained = f", {model.drained_replica_count} drained" if model.drained_replica_count else ""
    return f"{model.ready_replica_count} of {model.replica_count}{drained}"


def rate(kind: str, version: PriceVersion) -> str:
    """Format the price of a million tokens of a kind."""
    picos = getattr(version, f"{kind.replace(' ', '_')}_picos_per_token")
    return decimal_text(per_million(picos))


def version_rate(kind: str, version: PriceVersion) -> str | None:
    """Format the price of a kind; None for a version that ends a customer's price."""
    return None if version.withdrawn else rate(kind, version)


def applied_rate(kind: str, applied: AppliedPrice) -> str:
    return rate(kind, applied.version)


def amount_or_none(picos: int) -> str | None:
    """Format an amount without its currency; None for 0."""
    return amount_text(Money("", picos)) if picos else None


def resale_rate(kind: str, price: ResalePrice) -> str | None:
    """Format the resale price of a million tokens of a kind; None where the markup applies."""
    picos = getattr(price, f"{kind}_picos_per_token")
    return None if picos is None else decimal_text(per_million(picos))


def prices_reasoning(version: PriceVersion) -> bool:
    """Return whether reasoning costs more or less than output."""
    return version.reasoning_picos_per_token != version.output_picos_per_token


def price_source(applied: AppliedPrice) -> str:
    """Name the owner of a price."""
    is_own = applied.source == "organization"
    return applied.version.organization_name if is_own else "list"


def allowances_text(plan: Plan) -> str | None:
    rules = plan.configuration.get("allowances", [])
    return "; ".join(f"{int(rule['token_count']):,} {_selected(rule)}" for rule in rules) or None


def tiered_prices_text(plan: Plan) -> str | None:
    return (
        "; ".join(
            f"{rule['kind']} {_selected(rule)}, {counted(len(rule['steps']), 'step')}"
            for rule in plan.configuration.get("tiered_prices", [])
        )
        or None
    )


def _selected(rule: Mapping[str, Any]) -> str:
    """Format the tokens that a rule of a plan is for: model, kind and tier."""
    selector = rule.get("selector", {})
    tier = str(selector.get("tier", "")).removeprefix("SERVICE_TIER_").lower()
    parts = (selector.get("model") or "all", selector.get("token_kind", ""), tier)
    return " ".join(filter(None, parts))


def commitment_text(plan: Plan) -> str | None:
    commitment = int(plan.configuration.get("commitment_picos", 0)) / 10**12
    return f"{commitment:,.2f}" if commitment else None


def hold_end_text(request: LiveRequest) -> str | None:
    """Format how long the hold of a request lasts, or since when it is overdue."""
    if request.expire_time is None:
        return None
    left_s = (request.expire_time - datetime.now(UTC)).total_seconds()
    return duration_text(left_s) if left_s > 0 else f"{duration_text(-left_s)} ago"


def key_state(key: ApiKey, now: datetime | None = None) -> str:
    """Describe whether a key is valid, by default at present, and until when."""
    if key.revoke_time is not None:
        return f"revoked {time_text(key.revoke_time)}"
    if key.expire_time is not None and key.expire_time <= (now or datetime.now(UTC)):
        return f"expired {time_text(key.expire_time)}"
    state = f"until {time_text(key.expire_time)}" if key.expire_time else "active"
    return (
        f"{state}, two secrets until {time_text(key.overlap_end_time)}"
        if key.overlap_end_time
        else state
    )


def suspension_text(owner: Organization | Project) -> str:
    """Describe whether an organization or project is suspended or closed, since when and why."""
    if (closure := owner.closure) is not None:
        return f"closed {time_text(closure.close_time)}: {closure.reason}"
    if (found := owner.suspension) is None:
        return "active"
    by = "" if found.by_operator else " by the organization"
    return f"suspended{by} {time_text(found.create_time)}: {found.reason}"


def use_text(key: ApiKey) -> str:
    """Format when a key was last used, as far as the server knows."""
    if key.last_use_time is not None:
        return time_text(key.last_use_time)
    if key.use_tracked_since_time is None or key.use_tracked_since_time == key.create_time:
        return "never"
    return f"not since {time_text(key.use_tracked_since_time)}"


def each_text(for_each: str) -> str:
    """Say in words what a selector gives its limit to: "end user", "label team"."""
    kind, _, name = for_each.partition(":")
    return {"end_user": "end user", "key": f"key of group {name}"}.get(kind, f"{kind} {name}")


def quota_owner(quota: QuotaStatus) -> str:
    """Name the subject of a limit."""
    scope = "new keys of " if quota.for_new_keys else ""
    if quota.for_each:
        scope = f"each {each_text(quota.for_each)} of "
    within = f" of {quota.within_name}" if quota.within_name else ""
    return f"{scope}{subject_text(quota.subject)} {quota.subject_name}{within}".rstrip()


def subject_text(subject: QuotaSubject) -> str:
    """Format the kind of object that a limit is for, such as `API key`."""
    return subject.value.replace("api-key", "API key").replace("-", " ")


def quota_remarks(quota: QuotaStatus) -> str:
    """Format the special properties of a limit in parentheses; empty if it has none."""
    notes = [counted(quota.window_minutes, "minute")] if quota.window_minutes else []
    if quota.set_by_organization:
        notes.append("of the organization")
    if quota.selector_id:
        notes.append(f"by group {quota.group}" if quota.group else "by selector")
    weights = (quota.input_weight_milli, quota.cached_input_weight_milli, quota.output_weight_milli)
    if len({*weights, 1000}) > 1 and any(weights):
        notes.append("weights " + "/".join(f"{weight / 1000:g}" for weight in weights))
    if quota.override_end_time is not None:
        regular = dimension_amount(quota.dimension, quota.base_limit_value)
        notes.append(
            f"temporary override of {regular} until {time_text(quota.override_end_time)}:"
            f" {quota.override_reason}"
        )
    if not quota.enforced:
        notes.append(f"shadow mode, would have refused {quota.would_refuse_count:,}")
    if quota.binding:
        notes.append("binds")
    if quota.narrowed_by_quota_id:
        notes.append("without effect")
    return f" ({'; '.join(notes)})" if notes else ""


def money_places(amounts: Iterable[Money]) -> int:
    """Count the decimals of a column: those of the finest amount, at least the currency's."""
    return max(
        (
            max(len(f"{each.amount:f}".partition(".")[2].rstrip("0")), minor_digits(code))
            for each in amounts
            if (code := each.currency_code) or each.picos
        ),
        default=2,
    )
