"""Targets that stand for the ready endpoints of a Kubernetes service, against a strict double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from api.fleet import endpoint_slices, target_names
from api.fleet.endpoint_slices import EndpointSlices, SlicesTerms, ready_addresses
from api.fleet.fleet_document import document_of
from api.fleet.fleet_file import Fleet, parse_document
from api.fleet.target_names import TargetNames
from tests.api.test_kubernetes_launcher import config
from tests.kubernetes_double import SlicesApi, endpoint, endpoint_slice, served
from tests.service import until

PORT = 8001
TARGET = f"vllm://vllm.models.svc:{PORT}"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param(
            [endpoint_slice("a", endpoint("10.0.0.2"), endpoint("10.0.0.1", ready=None))],
            ["10.0.0.1:8001", "10.0.0.2:8001"],
            id="unknown readiness is ready",
        ),
        pytest.param(
            [
                endpoint_slice(
                    "a",
                    endpoint("10.0.0.1", ready=False),
                    endpoint("10.0.0.2", ready=False, serving=True, terminating=True),
                    endpoint("10.0.0.3", ready=True, serving=True, terminating=True),
                    endpoint("10.0.0.4", ready=True, serving=True, terminating=False),
                )
            ],
            ["10.0.0.4:8001"],
            id="readiness",
        ),
        pytest.param(
            [
                endpoint_slice("a", endpoint("10.0.0.1")),
                endpoint_slice("b", endpoint("10.0.0.2"), endpoint("10.0.0.1")),
            ],
            ["10.0.0.1:8001", "10.0.0.2:8001"],
            id="several slices, an endpoint that moves between them",
        ),
        pytest.param(
            [
                endpoint_slice("a", endpoint("10.0.0.1", uid="p1"), endpoint("10.0.0.2", uid="p2")),
                endpoint_slice(
                    "b", endpoint("fd00::1", uid="p1"), endpoint("fd00::3", uid="p3"), family="IPv6"
                ),
            ],
            ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::3]:8001"],
            id="two families, one pod of IPv6 only",
        ),
        pytest.param(
            [
                endpoint_slice("a", endpoint("10.0.0.1")),
                endpoint_slice("b", endpoint("fd00::1"), family="IPv6"),
            ],
            ["10.0.0.1:8001"],
            id="two families without pods",
        ),
        pytest.param(
            [endpoint_slice("b", endpoint("fd00::1"), family="IPv6")],
            ["[fd00::1]:8001"],
            id="IPv6",
        ),
        pytest.param(
            [
                endpoint_slice("a", endpoint("10.0.0.1"), port=9000),
                endpoint_slice("b", endpoint("10.0.0.2"), port=None),
            ],
            ["10.0.0.2:8001"],
            id="other port, any port",
        ),
        pytest.param(
            [
                endpoint_slice("a", endpoint("vllm.test"), family="FQDN"),
                endpoint_slice("b", {"addresses": []}, {"addresses": ["x"]}, endpoint("10.0.0.1")),
            ],
            ["10.0.0.1:8001"],
            id="names and unreadable addresses",
        ),
    ],
)
def test_ready_endpoints_count_once(slices: list[dict[str, Any]], expected: list[str]) -> None:
    assert list(ready_addresses(slices, PORT)) == expected


class Followed:
    """Slices of a double, while a task follows them."""

    def __init__(self, api: SlicesApi, slices: EndpointSlices) -> None:
        self.api = api
        self.slices = slices

    async def until(self, *hosts: str) -> None:
        """Wait until exactly these hosts are known."""
        expected = tuple(f"{host}:{PORT}" for host in hosts)
        await until(lambda: self.slices.addresses(PORT) == expected, f"{expected}")


@asynccontextmanager
async def followed(api: SlicesApi, directory: Path) -> AsyncIterator[Followed]:
    """Serve the double and follow its slices while the block runs."""
    async with served(api.handle) as url, asyncio.TaskGroup() as tasks:
        terms = SlicesTerms("models", "vllm", config(directory, url))
        slices = EndpointSlices(terms, lambda: None)
        running = tasks.create_task(slices.run())
        yield Followed(api, slices)
        running.cancel()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "PAUSE_S_MIN", 0.02)
    monkeypatch.setattr(endpoint_slices, "PAUSE_S_MAX", 0.05)


async def test_changes_are_followed_from_the_list_on(tmp_path: Path) -> None:
    api = SlicesApi()
    api.page_size = 2
    for number in range(5):
        api.put(endpoint_slice(f"s{number}", endpoint(f"10.0.0.{number}")))
    api.put(endpoint_slice("other", endpoint("10.9.9.9"), service="other"))
    async with followed(api, tmp_path) as each:
        await each.until(*(f"10.0.0.{number}" for number in range(5)))
        for number in range(1, 5):
            api.delete(f"s{number}")
        await each.until("10.0.0.0")
        api.put(endpoint_slice("s0", endpoint("10.0.0.0", ready=False), endpoint("10.0.0.7")))
        await each.until("10.0.0.7")
        api.put(endpoint_slice("new", endpoint("10.0.0.8")))
        await each.until("10.0.0.7", "10.0.0.8")

    assert api.requests == ["list"] * 3 + ["watch 106"]


async def test_a_watch_that_ends_goes_on_from_its_bookmark(tmp_path: Path) -> None:
    """Changes of other services are forgotten meanwhile, without harm."""
    api = SlicesApi()
    api.watch_s = 0.05
    api.put(endpoint_slice("s", endpoint("10.0.0.1")))
    async with followed(api, tmp_path) as each:
        await each.until("10.0.0.1")
        for _ in range(5):
            api.put(endpoint_slice("other", endpoint("10.9.9.9"), service="other"))
            await until(lambda: api.requests[-1] == f"watch {api.version}", "the next watch")
            api.forget()
        api.put(endpoint_slice("s", endpoint("10.0.0.2")))
        await each.until("10.0.0.2")

    assert api.requests.count("list") == 1


@pytest.mark.parametrize("by_status", [True, False])
async def test_slices_are_listed_again_once_the_api_has_forgotten(
    tmp_path: Path, by_status: bool
) -> None:
    api = SlicesApi()
    api.answers_gone_by_status = by_status
    api.put(endpoint_slice("a", endpoint("10.0.0.1")))
    api.put(endpoint_slice("b", endpoint("10.0.0.2")))
    async with followed(api, tmp_path) as each:
        await each.until("10.0.0.1", "10.0.0.2")
        api.verbs.discard("watch")  # the connection is lost meanwhile
        api.refuses = 503
        api.changed.set()
        await asyncio.sleep(0)
        api.delete("b")
        api.put(endpoint_slice("c", endpoint("10.0.0.3")))
        api.forget()
        api.refuses = 0
        api.verbs.add("watch")
        await each.until("10.0.0.1", "10.0.0.3")

    assert api.requests.count("list") == 2


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [(403, "verbs list and watch on endpointslices"), (401, "renew the token"), (500, "see its")],
)
async def test_an_api_that_refuses_leaves_the_last_answer(
    tmp_path: Path, fault: int, remedy: str
) -> None:
    api = SlicesApi()
    api.watch_s = 0.05
    api.put(endpoint_slice("a", endpoint("10.0.0.1")))
    with structlog.testing.capture_logs() as logs:
        async with followed(api, tmp_path) as each:
            await each.until("10.0.0.1")
            api.refuses = fault
            await until(lambda: len(logs) > 0, "the log")
            api.put(endpoint_slice("a", endpoint("10.0.0.2")))
            assert each.slices.addresses(PORT) == ("10.0.0.1:8001",)
            api.refuses = 0
            await each.until("10.0.0.2")
            await until(lambda: len(logs) > 1, "the log")

    assert [each["event"] for each in logs] == [
        "endpoint_slices_not_followed",
        "endpoint_slices_followed_again",
    ]
    assert remedy in logs[0]["cause"]


async def test_an_api_that_starts_later_or_moves_is_found(tmp_path: Path) -> None:
    api = SlicesApi()
    api.put(endpoint_slice("a", endpoint("10.0.0.1")))
    terms = SlicesTerms("models", "vllm", config(tmp_path, "http://127.0.0.1:9"))
    slices = EndpointSlices(terms, lambda: None)
    each = Followed(api, slices)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(slices.run())
        for _ in range(2):
            async with AsyncExitStack() as stack:
                config(tmp_path, await stack.enter_async_context(served(api.handle)))
                await until(slices.listed.is_set, "the list")
                await each.until(f"10.0.0.{len(api.slices)}")
            api.put(endpoint_slice("b", endpoint("10.0.0.2")))
            api.put(endpoint_slice("a", endpoint("10.0.0.2")))
        running.cancel()


def fleet_of(kubeconfig: Path, target: str = TARGET, service: str = "vllm") -> Fleet:
    slices = {"namespace": "models", "service": service, "kubeconfig": str(kubeconfig)}
    targets = [{"address": target, "endpoint_slices": slices}, "vllm://10.1.1.1:1"]
    return parse_document(
        yaml.safe_dump({"models": {"m": {"engine": "remote", "targets": targets}}}), None
    )


async def test_a_target_has_the_addresses_of_its_slices_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address and none count too. Targets that left are not watched any more."""
    monkeypatch.setattr(target_names, "SETTLE_S", 0.0)
    api, names = SlicesApi(), TargetNames(lambda host, port: [])
    api.put(endpoint_slice("a", endpoint("10.0.0.1")))
    async with served(api.handle) as url, asyncio.TaskGroup() as tasks:
        fleet = fleet_of(config(tmp_path, url))
        assert not await names.poll(fleet), "not before the process serves"
        names.begin(tasks)
        assert await names.poll(fleet)
        assert names.addresses == {TARGET: ("10.0.0.1:8001",)}

        api.put(endpoint_slice("b", endpoint("10.0.0.2")))
        async with asyncio.timeout(60):
            await names.wait(3600)
        assert await names.poll(fleet)
        assert names.addresses == {TARGET: ("10.0.0.1:8001", "10.0.0.2:8001")}

        api.slices.clear()
        assert await names.poll(fleet_of(config(tmp_path, url), service="none"))
        assert names.addresses == {TARGET: ()}
        names.close()


def test_the_document_of_a_fleet_has_its_slices(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path / "kubeconfig")

    assert parse_document(document_of(fleet), None) == fleet
