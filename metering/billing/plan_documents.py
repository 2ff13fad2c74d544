"""The rules of a plan as they are stored: JSON of plain values, read back exactly. Pure."""

from __future__ import annotations

from typing import Any

from metering.billing.plan_rules import Allowance, PlanLineKind, PlanRules, PriceStep, Selector, TieredPrice
from metering.models import ServiceTier, TokenKind

Document = dict[str, Any]


def rules_document(rules: PlanRules) -> Document:
    """The rules, each in a fixed order: the same rules are the same document, however they were given."""
    return {
        "allowances": [
            _selector_document(each.selector) | {"token_count": each.token_count}
            for each in sorted(rules.allowances, key=lambda each: each.selector.order)
        ],
        "tiered_prices": [
            _selector_document(each.selector) | {"kind": str(each.kind), "steps": [_step_document(step) for step in each.steps]}
            for each in sorted(rules.tiered_prices, key=lambda each: each.selector.order)
        ],
        "commitment_picos": rules.commitment_picos,
    }


def rules_of(document: Document) -> PlanRules:
    """The rules of a document that `rules_document` wrote."""
    return PlanRules(
        tuple(Allowance(_selector_of(each), each["token_count"]) for each in document["allowances"]),
        tuple(
            TieredPrice(
                PlanLineKind(each["kind"]),
                _selector_of(each),
                tuple(PriceStep(step["up_to_token_count"], step["price_picos"], step["price_milli"]) for step in each["steps"]),
            )
            for each in document["tiered_prices"]
        ),
        document["commitment_picos"],
    )


def _selector_document(selector: Selector) -> Document:
    return {
        "model": selector.model,
        "token_kind": None if selector.token_kind is None else str(selector.token_kind),
        "tier": None if selector.tier is None else str(selector.tier),
    }


def _selector_of(document: Document) -> Selector:
    kind, tier = document["token_kind"], document["tier"]
    return Selector(document["model"], None if kind is None else TokenKind(kind), None if tier is None else ServiceTier(tier))


def _step_document(step: PriceStep) -> Document:
    return {"up_to_token_count": step.up_to_token_count, "price_picos": step.price_picos, "price_milli": step.price_milli}
