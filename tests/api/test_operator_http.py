"""Metrics port, and the counts behind it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from api.core.settings import ListenSettings, Settings
from api.metrics import operator_http as scrape
from api.metrics.operator_http import MetricsListener
from api.observability import observer
from api.observability.observer import (
    COLD_START_MS_MIN,
    GAPS_EXACT_MAX,
    TOKEN_BOUNDS_MS,
    Gaps,
    Histogram,
    LoopLag,
    Observer,
    RequestCounts,
)
from api.serving import warn_of_open_metrics
from metering.core.errors import DatabaseUnavailable
from metering.core.models import ServiceTier
from metering.holds.journal import Delivered, UsageJournal, journal_backlog
from tests.api.endings import TIMINGS, ending
from tests.service import until

SERIES = "m", ServiceTier.BATCH, "chat", ""


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, ("127.0.0.1", 10_443)),
        ({"WEIR_LISTEN": "0.0.0.0:8450"}, ("127.0.0.1", 10_450)),
        ({"WEIR_LISTEN": "127.0.0.1:0"}, ("127.0.0.1", 0)),
        ({"WEIR_LISTEN": "127.0.0.1:65000"}, ("127.0.0.1", 63_000)),
        ({"WEIR_LISTEN": "unix:/tmp/weir.sock"}, None),
        ({"WEIR_METRICS_LISTEN": "off"}, None),
        ({"WEIR_METRICS_LISTEN": "0.0.0.0:9100"}, ("0.0.0.0", 9100)),
        ({"WEIR_METRICS_LISTEN": "[::1]:9100"}, ("::1", 9100)),
    ],
)
def test_the_address_of_the_metrics(given: dict[str, str], address: tuple[str, int] | None) -> None:
    assert Settings.from_environment(given).listen.metrics_address() == address


async def test_processes_that_share_a_port_take_metrics_ports_side_by_side() -> None:
    with listening() as first:
        port = port_of(first)
        with listening(port, port_count=64) as second:
            assert port < port_of(second) < port + 64


async def test_a_taken_port_is_refused_with_the_setting_that_names_another() -> None:
    with (
        listening() as first,
        pytest.raises(OSError, match="set WEIR_METRICS_LISTEN to another address, or to off"),
    ):
        MetricsListener(("127.0.0.1", port_of(first)))


async def test_a_client_that_never_reads_blocks_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "IDLE_MAX_S", 0.2)
    asks = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"

    requested = set()

    async def much(request: web.BaseRequest) -> web.Response:
        requested.add(request.protocol)
        return web.Response(body=bytes(8 << 20))

    server = scrape.MetricsServer(much)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    silent = [socket.create_connection((host, port)) for _ in range(scrape.CONNECTIONS_MAX)]
    for each in silent:
        each.sendall(asks * 20)
    await until(lambda: len(requested) == scrape.CONNECTIONS_MAX, "all connections to be taken")

    await until(lambda: not server.connections, "those that read nothing to be closed")

    reader, writer = await asyncio.open_connection(host, port)
    writer.write(asks)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    for each in silent:
        each.close()
    listening.close()
    await server.shutdown(1.0)


async def test_without_an_address_nothing_listens() -> None:
    listener = MetricsListener(None)

    assert listener.url == ""
    await listener.stop()


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_a_histogram_counts_a_value_in_each_bucket_above_it(values: list[float]) -> None:
    bounds = (1, 10, 100)
    histogram = Histogram(bounds)

    for value in values:
        histogram.observe(value)

    expected = [(f"{bound:g}", sum(value <= bound for value in values)) for bound in bounds]
    assert histogram.buckets() == [*expected, ("+Inf", len(values))]
    assert histogram.sum == pytest.approx(sum(values))
    assert bisect_left(bounds, 10) == 1, "a value at the bound is within it"


def gaps_of(monkeypatch: pytest.MonkeyPatch, *messages: tuple[float, int]) -> Gaps:
    """Return the gaps of messages, each at a time in ms and with a choice."""
    gaps = Gaps()
    for at_ms, choice_index in messages:
        monkeypatch.setattr(observer, "monotonic", partial(float, 100.0 + at_ms / 1000))
        gaps.note(choice_index)
    return gaps


def test_every_gap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms, then 150 ms, then 30 ms: the pause is visible."""
    counts = RequestCounts(["m"])
    gaps = gaps_of(monkeypatch, (0, 0), (20, 0), (170, 0), (200, 0))

    counts.finished(SERIES, "length", TIMINGS, None, gaps)

    pace = counts.times[SERIES].inter_token
    values = {bound: count for bound, count in zip(pace.bounds, pace.counts, strict=False) if count}
    assert gaps.facts() == pytest.approx({"itl_p50_ms": 30, "itl_p99_ms": 150, "itl_max_ms": 150})
    assert sum(values.values()) == 3
    assert [bisect_left([25, 100], bound) for bound in values] == [0, 1, 2]
    assert pace.sum == pytest.approx(200.0)


def test_the_gaps_of_several_choices_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = gaps_of(monkeypatch, (0, 0), (1, 1), (40, 0), (41, 1))

    assert gaps.facts() == pytest.approx({"itl_p50_ms": 40, "itl_p99_ms": 40, "itl_max_ms": 40})
    assert gaps_of(monkeypatch, (0, 0), (1, 1)).facts() == {}


@given(
    gaps_ms=st.lists(
        st.sampled_from(TOKEN_BOUNDS_MS) | st.floats(0.001, 30_000),
        min_size=1,
        max_size=3 * GAPS_EXACT_MAX,
    )
)
@settings(deadline=None, max_examples=20)
def test_many_gaps_are_counted_as_few_in_fixed_memory(gaps_ms: list[float]) -> None:
    gaps, one_by_one, summed = Gaps(), Histogram(TOKEN_BOUNDS_MS), Histogram(TOKEN_BOUNDS_MS)
    gaps._found = array("d")
    for gap_ms in gaps_ms:
        gaps._found.append(gap_ms / 1000)
        if len(gaps._found) >= GAPS_EXACT_MAX:
            gaps._fold()
        one_by_one.observe(gap_ms / 1000 * 1000)
    facts = gaps.facts()
    gaps.add_to(summed)

    ordered = sorted(gaps_ms)
    rank_99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    assert summed.counts == one_by_one.counts
    assert summed.sum == pytest.approx(one_by_one.sum)
    assert facts["itl_max_ms"] == pytest.approx(max(gaps_ms))
    assert rank_99 * 0.999 - 0.01 <= facts["itl_p99_ms"] <= max(rank_99 * 1.1, 0.011)
    assert len(gaps._found) < GAPS_EXACT_MAX


def test_a_copy_of_the_counts_does_not_change() -> None:
    counts = RequestCounts(["m"])
    counts.finished(SERIES, "stop", TIMINGS, None)

    copied = counts.copy()
    counts.finished(SERIES, "stop", TIMINGS, None)
    unknown = ("other", *SERIES[1:])
    counts.failed(unknown, DatabaseUnavailable("away"), None, TIMINGS)

    assert copied.ends["m", "batch", "stop"] == 1
    assert sum(copied.times[SERIES].total.counts) == 1
    assert not copied.broken_times
    assert counts.refusals == {("", "DATABASE_UNAVAILABLE", "", ""): 1}, "no model of a client"


def test_a_fault_in_counting_is_logged_and_breaks_no_request() -> None:
    with capture_logs() as logs:
        Observer(["m"]).ended(ending(timings={}))

    assert [entry["event"] for entry in logs] == ["request_not_counted"]


def test_journals_of_the_living_are_no_backlog(tmp_path: Path) -> None:
    living, dead = UsageJournal(tmp_path, uuid.uuid4()), UsageJournal(tmp_path, uuid.uuid4())
    for journal in (living, dead):
        journal.record([Delivered(uuid.uuid4(), 1, 0, 1, 1)])
    assert journal_backlog(tmp_path).abandoned_count == 0

    dead.close()
    (tmp_path / "x.refused").touch()
    backlog = journal_backlog(tmp_path)

    assert (backlog.abandoned_count, backlog.refused_count) == (1, 1)
    assert 0 <= backlog.oldest_age_s < time.time()
    living.close()


@contextlib.contextmanager
def listening(port: int = 0, port_count: int = 1) -> Iterator[MetricsListener]:
    """Yield a listener that has its port."""
    listener = MetricsListener(("127.0.0.1", port), port_count)
    try:
        yield listener
    finally:
        assert listener._socket is not None
        listener._socket.close()


def port_of(listener: MetricsListener) -> int:
    """Return the port of its URL."""
    return int(listener.url.rpartition(":")[2].partition("/")[0])


async def test_the_loop_is_late_by_what_a_timer_comes_later_than_requested() -> None:
    class Enough(Exception):
        pass

    # Two timers of a millisecond: one on time, one 30 ms late.
    times_s = [10.0, 10.001, 11.0, 11.031]

    def clock() -> float:
        if not times_s:
            raise Enough
        return times_s.pop(0)

    lag = LoopLag(clock)
    with pytest.raises(Enough):
        await lag.measure(interval_s=0.001)

    assert sum(lag.lags.counts) == 2
    assert lag.lags.sum == pytest.approx(30.0)


def test_only_those_that_waited_for_an_engine_count_as_cold_starts() -> None:
    counts = RequestCounts(["m"])

    for cold_start_ms in (0.0, COLD_START_MS_MIN - 0.1, COLD_START_MS_MIN, 2000.0):
        counts.finished(SERIES, "stop", TIMINGS | {"cold_start_ms": cold_start_ms}, None)

    cold_starts = counts.times[SERIES].stages["cold_start"]
    assert (sum(cold_starts.counts), cold_starts.sum) == (2, COLD_START_MS_MIN + 2000.0)


@pytest.mark.parametrize(
    ("address", "is_open"),
    [
        ("", False),
        ("off", False),
        ("127.0.0.1:10443", False),
        ("[::1]:10443", False),
        ("localhost:10443", False),
        ("0.0.0.0:10443", True),
        ("[::]:10443", True),
        ("192.0.2.1:10443", True),
    ],
)
def test_metrics_that_other_machines_can_read_are_warned_of(address: str, is_open: bool) -> None:
    with capture_logs() as logs:
        warn_of_open_metrics(ListenSettings(metrics=address))

    assert [entry["event"] for entry in logs] == ["metrics_reachable_from_other_machines"] * is_open
    assert all("WEIR_METRICS_LISTEN" in entry["remedy"] for entry in logs)
