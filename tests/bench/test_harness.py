"""Harness of the benchmarks: rounds in turn, ratios of the rounds, noise, tables, two trees."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from bench import harness
from bench.harness import ROOT, Bench, Case, Cases, Figure, Results, Values, product_of

FIGURES = {"rate": Figure("requests/s"), "ttft": Figure("TTFT, ms", ".1f", "difference")}
DRIVERS = [
    path.stem
    for path in sorted((ROOT / "bench").glob("*.py"))
    if "\nBENCH = Bench(" in path.read_text()
]


def quiet(monkeypatch: pytest.MonkeyPatch, busy_cpus: float = 0.0) -> None:
    monkeypatch.setattr(harness, "busy_cores", lambda: busy_cpus)


def run(
    monkeypatch: pytest.MonkeyPatch, cases: Cases, *arguments: str, bench: Bench | None = None
) -> int:
    """Run a driver with these cases. Return its exit status."""

    @contextlib.contextmanager
    def prepare(_: argparse.Namespace) -> Iterator[Cases]:
        yield cases

    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    monkeypatch.setattr(harness, "program_name", lambda: "bench.test")
    with pytest.raises(SystemExit) as ended:
        harness.main(bench or Bench("Test.", FIGURES, prepare))
    return int(ended.value.code or 0)


def two_ways(calls: list[str], rates: dict[str, Iterator[float]]) -> Case:
    def way(name: str) -> Values:
        calls.append(name)
        return {"rate": next(rates[name]), "ttft": {"bare": 1.0, "ours": 3.5}[name]}

    async def ours() -> Values:
        return way("ours")

    def called() -> Values | Awaitable[Values]:
        return ours()

    return Case("a case", {"bare": lambda: way("bare"), "ours": called})


def test_ways_take_turns_and_ratios_are_those_of_a_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is twice as fast in the last round: the ratios are the same, and not noisy."""
    quiet(monkeypatch)
    calls = list[str]()
    case = two_ways(calls, {"bare": iter((10.0, 10.0, 20.0)), "ours": iter((5.0, 5.0, 10.0))})

    assert run(monkeypatch, [case]) == 0

    assert calls == ["bare", "ours", "ours", "bare", "bare", "ours"]
    printed = capsys.readouterr().out
    [row] = [line for line in printed.splitlines() if line.startswith("  requests/s")]
    assert row.split() == ["requests/s", "10", "5", "0.50x", "0%"]
    assert "+2.5" in printed
    assert "NOISY" not in printed


@pytest.mark.parametrize(
    ("busy_cpus", "rates", "reason"),
    [(50.0, (5.0, 5.0), "other work took up to 50.0 CPUs"), (0.0, (5.0, 9.0), "spreads by")],
)
def test_a_noisy_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    busy_cpus: float,
    rates: tuple[float, float],
    reason: str,
) -> None:
    quiet(monkeypatch, busy_cpus)
    case = two_ways([], {"bare": iter((10.0, 10.0)), "ours": iter(rates)})

    run(monkeypatch, [case], "--rounds", "2")

    [noisy] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOISY")]
    assert reason in noisy


def test_json_has_every_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(monkeypatch)
    case = two_ways([], {"bare": iter((10.0, 12.0)), "ours": iter((5.0, 7.0))})

    run(monkeypatch, [case], "--rounds=2", "--json=-")

    written = json.loads(capsys.readouterr().out)
    assert [row["rate"] for row in written["rounds"]["a case"]["ours"]] == [5.0, 7.0]
    assert written["medians"]["a case"]["bare"]["rate"] == 11.0


def test_a_driver_judges_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Results) -> bool:
        return False

    @contextlib.contextmanager
    def prepare(_: argparse.Namespace) -> Iterator[Cases]:
        yield [two_ways([], {"bare": iter((1.0,)), "ours": iter((1.0,))})]

    quiet(monkeypatch)
    bench = Bench("Test.", FIGURES, prepare, rounds=1, passed=none)
    assert run(monkeypatch, [], bench=bench) == 1


def test_another_tree_gives_the_product_and_this_one_the_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api/__init__.py").write_text("")
    program = "import os, api, bench; print(api.__file__, os.path.realpath(bench.__file__))"

    with product_of(tmp_path) as (folder, environment):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )

    api, bench = map(Path, ended.stdout.split())
    assert api == tmp_path / "api/__init__.py"
    assert bench == ROOT / "bench/__init__.py"


def test_a_folder_without_the_product_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [], "--against", str(tmp_path)) == 2
    assert "--against must be a checkout of this project" in capsys.readouterr().err


@pytest.mark.parametrize("name", DRIVERS)
def test_tables_of_every_driver_fit_80_columns(name: str) -> None:
    bench: Bench = importlib.import_module(f"bench.{name}").BENCH
    row = dict.fromkeys(bench.figures, 1234.5)
    ways = {way: [row, row] for way in ("one", "another", "third", "fourth")}

    lines = list(harness.table("a case", ways, bench, ours=bench.ours_first))

    assert max(map(len, lines)) <= 80
    assert sum("spread" in line for line in lines) == 2, "three ways, then two"
