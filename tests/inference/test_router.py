"""Model names: requested names, billed names, and the chosen engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from inference.engine import Engine, ModelInfo
from inference.errors import RequestImpossible
from inference.routing.router import Catalog, ModelUnknown, ReplicaCounts, Router, Share, drawn

REGIONS = {"eu": ("us",), "us": ("eu", "ap"), "ap": ()}


class Named:
    """The part of an engine that a router reads."""

    def __init__(self, name: str) -> None:
        self.model = ModelInfo(name, "", "", 1, 1, "")

    def healthy(self) -> bool:
        """Return True."""
        return True


def router(own_region: str = "eu") -> Router:
    """`chat` in two versions, one in ten requests for the second; `code` in one."""
    catalog = Catalog(
        {
            "chat": (Share("v1", "chat@v1", 9.0), Share("v2", "chat@v2", 1.0)),
            "code": (Share("", "code"),),
        },
        aliases={"chat-latest": "chat", "canary": "chat@v2", "coder": "code"},
        fallbacks=REGIONS,
        own_region=own_region,
    )
    return Router(
        {name: cast(Engine, cast(Any, Named(name))) for name in ("chat@v1", "chat@v2", "code")},
        catalog=catalog,
    )


@pytest.mark.parametrize(
    ("requested", "billed", "served"),
    [
        ("code", "code", {"code"}),
        ("coder", "code", {"code"}),
        ("chat@v1", "chat", {"chat@v1"}),
        ("chat@v2", "chat", {"chat@v2"}),
        ("canary", "chat", {"chat@v2"}),
        ("chat", "chat", {"chat@v1", "chat@v2"}),
        ("chat-latest", "chat", {"chat@v1", "chat@v2"}),
    ],
)
def test_a_model_bills_by_its_canonical_name(requested: str, billed: str, served: set[str]) -> None:
    routes = [router().route(requested, f"request {index}") for index in range(200)]

    assert {route.model for route in routes} == {billed}
    assert {route.engine.model.name for route in routes} == served
    assert router().canonical_name(requested) == billed


def test_a_request_gets_the_same_version_again_and_an_alias_draws_as_its_model_does() -> None:
    ids = [f"request {index}" for index in range(500)]
    first = [router().route("chat", each).engine.model.name for each in ids]

    assert first == [router().route("chat", each).engine.model.name for each in ids]
    assert first == [router().route("chat-latest", each).engine.model.name for each in ids]


def test_shares_are_those_of_the_weights_and_a_change_moves_no_more_than_it_must() -> None:
    keys = [str(index) for index in range(20_000)]
    before = [drawn((Share("a", "a", 99.0), Share("b", "b", 1.0)), key).version for key in keys]
    after = [drawn((Share("a", "a", 95.0), Share("b", "b", 5.0)), key).version for key in keys]

    assert before.count("b") == pytest.approx(200, rel=0.3)
    assert after.count("b") == pytest.approx(1000, rel=0.15)
    assert all(new == "b" for old, new in zip(before, after, strict=True) if old == "b"), (
        "who was on the canary stays there"
    )
    assert {
        drawn((Share("a", "a", 0.0), Share("b", "b", 1.0)), key).version for key in keys[:500]
    } == {"b"}


def test_the_region_of_a_request_decides_where_it_may_run() -> None:
    assert router().route("code", "x").regions == ("eu", "us")
    assert router().route("code", "x", "ap").regions == ("ap",)
    assert router().route("code", "x", "us").regions == ("us", "eu", "ap")
    assert router(own_region="").route("code", "x").regions == ()
    with pytest.raises(
        RequestImpossible, match="region 'mars' is unknown; choose one of eu, us, ap"
    ) as refused:
        router().route("code", "x", "mars")
    assert refused.value.field == "region"
    with pytest.raises(RequestImpossible, match="leave it unset"):
        plain().route("m", "x", "eu")


def plain() -> Router:
    """Return a single model without a fleet file."""
    return Router({"m": cast(Engine, cast(Any, Named("m")))})


def test_unknown_names_are_reported_with_the_known_ones() -> None:
    for wrong in ("chat@v3", "nothing", "code@v1", "chat@", "@v1", ""):
        with pytest.raises(
            ModelUnknown, match="Use one of: canary, chat, chat-latest, code, coder"
        ):
            router().route(wrong, "x")
    with pytest.raises(ModelUnknown, match="must be given by its name 'chat'"):
        router().check_canonical_name("chat-latest")
    with pytest.raises(ModelUnknown, match="Use one of"):
        router().check_canonical_name("nothing")
    router().check_canonical_name("chat")


def test_models_are_listed_by_their_own_names_with_what_else_they_are_called() -> None:
    assert [model.name for model in router().models()] == ["chat", "code"]
    assert router().aliases("chat") == ["canary", "chat-latest"]
    assert router().versions("chat") == {"v1": 0.9, "v2": 0.1}
    assert router().versions("code") == {}
    assert router().replicas("chat") == ReplicaCounts(ready=2, total=2, drained=0)
    assert router().find("chat").model.name == "chat@v1", "most of its requests go there"
    assert router().find("canary").model.name == "chat@v2"
