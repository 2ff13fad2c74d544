"""Harness of the benchmarks: cases, rounds in turn with a baseline, noise, and one kind of table.

A driver declares its figures and, on what it has opened, its cases: each measures the same figures
in several ways, the first of which is the baseline. Each round measures every way of every case
once, in alternating order, so that a change of the machine's load affects all of them. The table
has medians over the rounds, ratios to the baseline, and the spread of the case's main figure.

Every driver has these options:

    --rounds N      rounds to measure
    --json FILE     file for all figures of all rounds; `-` prints them instead of the table
    --against TREE  another checkout of this project: each round runs this driver on the product of
                    both trees, in processes of their own; the baseline is the other tree
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.cpus import usable_cpus

ROOT = Path(__file__).resolve().parent.parent
NAME_WIDTH, VALUE_WIDTH, RATIO_WIDTH, SPREAD_WIDTH = 25, 10, 8, 8  # 79 columns for three ways
WAYS_MAX = 3  # in one table
SAMPLE_S = 1.0  # of the machine's load, before and after
OTHER_WORK_MAX = 0.1  # of the usable CPUs; more than this is noise
SPREAD_MAX = 0.15  # of a case's main figure between rounds; more than this is noise

Values = Mapping[str, float]  # figures of one measurement, by key
Measure = Callable[[], Values | Awaitable[Values]]
Results = dict[str, dict[str, list[dict[str, float]]]]  # rounds, by case and by way


@dataclass(frozen=True, slots=True)
class Figure:
    """Row of the table: its label with the unit, its format, and how ways are compared."""

    label: str
    form: str = ",.0f"
    compared: Literal["ratio", "difference", "no"] = "ratio"


@dataclass(frozen=True, slots=True)
class Case:
    """Case to measure: its ways by name, the baseline first."""

    name: str
    ways: Mapping[str, Measure]


Cases = Sequence[Case]


@dataclass(frozen=True, slots=True)
class Bench:
    """Declaration of a driver.

    `prepare` opens what is measured and yields the cases. The first figure is the main one of each
    case that has it. `ours_first` divides the first way by the others, instead of the others by
    the first. Figures of a driver that is not `is_timed` do not depend on the machine's load.
    `passed` judges the results, for the exit status. `facts` describes the run.
    """

    doc: str | None
    figures: Mapping[str, Figure]
    prepare: Callable[
        [argparse.Namespace], AbstractContextManager[Cases] | AbstractAsyncContextManager[Cases]
    ]
    add_options: Callable[[argparse.ArgumentParser], object] = lambda _: None
    rounds: int = 3
    ours_first: bool = False
    is_timed: bool = True
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    facts: Callable[[argparse.Namespace], Mapping[str, object]] = lambda _: {}
    passed: Callable[[Results], bool] = lambda _: True


class Unusable(Exception):
    """The options cannot be measured: the message names the option, and the remedy."""


def note(text: str) -> None:
    """Print a line beside the figures: progress, or what a table cannot hold."""
    print(text, file=sys.stderr, flush=True)


def processor_name() -> str:
    """Read the model of the processor, as the system names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def busy_cores(seconds: float = SAMPLE_S) -> float:
    """Measure how many CPUs of the machine are busy while this process sleeps."""

    def used_s() -> float:
        user, nice, system, _, _, *others = map(
            int, Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()[1:9]
        )
        return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")

    before_s, began_at = used_s(), time.monotonic()
    time.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - began_at)


async def measure(cases: Cases, rounds: int, figures: Mapping[str, Figure]) -> Results:
    """Measure all cases in every round; every second round begins with the last way."""
    results: Results = {case.name: {way: [] for way in case.ways} for case in cases}
    for number in range(rounds):
        for case in cases:
            ways = list(case.ways.items())
            for way, run in ways[::-1] if number % 2 else ways:
                found = run()
                values = await found if inspect.isawaitable(found) else found
                results[case.name][way].append(dict(values))
                shown = next(key for key in figures if key in values)
                form = figures[shown].form
                note(
                    f"round {number + 1}, {case.name}, {way}: {values[shown]:{form}}"
                    f" {figures[shown].label}"
                )
    return results


@contextmanager
def product_of(tree: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a working directory and an environment: these benchmarks on the product of a tree."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        Path(folder, "bench").symlink_to(ROOT / "bench", target_is_directory=True)
        paths = [folder, str(tree), str(tree / "sdk/python/src")]
        yield folder, os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def measure_trees(module: str, arguments: Sequence[str], other: Path, rounds: int) -> Results:
    """Run a driver's rounds on the product of another tree and of this one, in turn."""
    results: Results = {}
    for number in range(rounds):
        trees = [("before", other), ("now", ROOT)]
        for name, tree in trees[::-1] if number % 2 else trees:
            note(f"round {number + 1}: {tree}")
            command = [sys.executable, "-m", module, *arguments]
            command += ["--against=", "--rounds=1", "--json=-"]
            with product_of(tree) as (folder, environment):
                ended = subprocess.run(
                    command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
                )
            if not ended.stdout:
                raise Unusable(f"--against {other}: {module} gives no figures on {tree}")
            for case, ways in json.loads(ended.stdout)["rounds"].items():
                for way, rows in ways.items():
                    both = results.setdefault(f"{case}: {way}", {"before": [], "now": []})
                    both[name] += rows
    return results


def medians(rows: Sequence[Values]) -> dict[str, float]:
    """Compute the median of each figure over the rounds."""
    return {key: statistics.median(row[key] for row in rows if key in row) for key in rows[0]}


def spread(values: Sequence[float]) -> float:
    """Compute the distance of the extremes, as a share of the median."""
    return (max(values) - min(values)) / max(abs(statistics.median(values)), 1e-12)


def compare(ways: Mapping[str, list[dict[str, float]]], key: str, way: str, ours: bool) -> Any:
    """Return the ratio of a way to the baseline in each round; `ours` inverts it."""
    base = next(iter(ways.values()))
    pairs = zip(ways[way], base, strict=True)
    ratios = [one[key] / (two[key] or 1e-12) for one, two in pairs if key in one and key in two]
    return [1 / (ratio or 1e-12) for ratio in ratios] if ours else ratios


def spread_of(ways: Mapping[str, list[dict[str, float]]], key: str, ours: bool) -> float:
    """Compute the spread of a figure: of its ratios, or of its values if there is one way."""
    found = [compare(ways, key, way, ours) for way in list(ways)[1:]]
    if not any(found):
        found = [[row[key] for row in rows if key in row] for rows in ways.values()]
    return max(spread(each) for each in found if each)


def table(
    name: str, ways: Mapping[str, list[dict[str, float]]], bench: Bench, ours: bool
) -> Iterator[str]:
    """Format a case: figures as rows, ways as columns, each with its ratio to the baseline."""
    base, *others = ways
    for start in range(0, max(len(others), 1), WAYS_MAX - 1):
        shown = others[start : start + WAYS_MAX - 1]
        head = "".join(f"{way:>{VALUE_WIDTH + RATIO_WIDTH}}" for way in shown)
        yield f"\n{name}"
        yield f"{base:>{NAME_WIDTH + VALUE_WIDTH}}{head}{'spread':>{SPREAD_WIDTH}}"
        values = {way: medians(ways[way]) for way in (base, *shown)}
        part = {way: ways[way] for way in values}
        for key, figure in bench.figures.items():
            if not any(key in each for each in values.values()):
                continue
            line = f"  {figure.label:{NAME_WIDTH - 2}}"
            for way, each in values.items():
                value = each.get(key)
                line += f"{'' if value is None else format(value, figure.form):>{VALUE_WIDTH}}"
                if way != base:
                    line += f"{compared(part, key, way, figure, ours):>{RATIO_WIDTH}}"
            if len(next(iter(ways.values()))) > 1:
                line += f"{spread_of(part, key, ours):>{SPREAD_WIDTH}.0%}"
            yield line.rstrip()


def compared(
    ways: Mapping[str, list[dict[str, float]]], key: str, way: str, figure: Figure, ours: bool
) -> str:
    """Format a comparison of a way with the baseline: the median of the rounds' ratios."""
    base = next(iter(ways))
    if figure.compared == "no" or not (ratios := compare(ways, key, way, ours)):
        return ""
    if figure.compared == "difference":
        return f"{medians(ways[way])[key] - medians(ways[base])[key]:+{figure.form}}"
    return f"{statistics.median(ratios):.2f}x"


def noise(
    results: Results, bench: Bench, ours: bool, other_work: Sequence[float], cpu_count: int
) -> list[str]:
    """List the reasons why the figures of a run are not to be relied on."""
    found, limit = list[str](), OTHER_WORK_MAX * cpu_count
    if not bench.is_timed:
        return found
    if max(other_work) > limit:
        found.append(f"other work took up to {max(other_work):.1f} CPUs, above {limit:.1f}")
    for name, ways in results.items():
        first = next(iter(ways.values()))
        key = next(key for key in bench.figures if key in first[0])
        if len(first) > 1 and (share := spread_of(ways, key, ours)) > SPREAD_MAX:
            found.append(f"{name}: {bench.figures[key].label} spreads by {share:.0%}")
    return found


async def collect(bench: Bench, options: argparse.Namespace) -> Results:
    """Open what a driver measures, and measure it."""
    async with AsyncExitStack() as stack:
        prepared = bench.prepare(options)
        if isinstance(prepared, AbstractAsyncContextManager):
            cases = await stack.enter_async_context(prepared)
        else:
            cases = stack.enter_context(prepared)
        return await measure(cases, options.rounds, bench.figures)


def without_own_options(arguments: Sequence[str]) -> list[str]:
    """Leave out the options that the runs on two trees do not get."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--against", "--rounds", "--json"):
        own.add_argument(name)
    return own.parse_known_args(arguments)[1]


def program_name() -> str:
    """Return the name of the driver that runs, as `python -m` takes it."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "a driver is run by python -m"
    return spec.name


def main(bench: Bench) -> None:
    """Parse the command line, measure, print the tables, and exit with the driver's verdict."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program_name()}",
        description=bench.doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_options(parser)
    parser.add_argument(
        "--rounds", type=int, default=bench.rounds, help="to measure (default: %(default)s)"
    )
    parser.add_argument("--json", help="file for the figures of all rounds; - prints them instead")
    parser.add_argument(
        "--against",
        metavar="TREE",
        help="another checkout: measures its product and this one's in turn",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.against and not Path(options.against, "api").is_dir():
        parser.error(f"--against must be a checkout of this project, got {options.against}")
    try:
        cpu_count = usable_cpus().count  # before this process is pinned to one
        facts = {"processor": processor_name(), "cpu_count": cpu_count, **bench.facts(options)}
        other_work = [busy_cores()]
        if options.against:
            other, arguments = Path(options.against).resolve(), without_own_options(sys.argv[1:])
            results = measure_trees(program_name(), arguments, other, options.rounds)
        else:
            with asyncio.Runner(loop_factory=bench.loop_factory) as runner:
                results = runner.run(collect(bench, options))
        other_work.append(busy_cores())
    except Unusable as error:
        parser.error(str(error))
    facts["other_work"] = "{:.1f} CPUs before, {:.1f} after".format(*other_work)
    ours = bench.ours_first and not options.against
    report(bench, options, facts, results, noise(results, bench, ours, other_work, cpu_count))
    sys.exit(not bench.passed(results))


def report(
    bench: Bench,
    options: argparse.Namespace,
    facts: Mapping[str, object],
    results: Results,
    noisy: Sequence[str],
) -> None:
    """Print the tables with the load of the machine, and write the figures as JSON."""
    ours = bench.ours_first and not options.against
    written = {
        "facts": dict(facts),
        "options": {name: str(value) for name, value in vars(options).items()},
        "noise": noisy,
        "rounds": results,
        "medians": {
            case: {way: medians(rows) for way, rows in ways.items()}
            for case, ways in results.items()
        },
    }
    text = json.dumps(written, indent=2) + "\n"
    if options.json == "-":
        print(text, end="")
        return
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(textwrap.fill(f"{name.replace('_', ' ')}: {shown}", 80, subsequent_indent="  "))
    print(f"medians of {options.rounds} rounds; a spread is that of the ratios of the rounds")
    for case, ways in results.items():
        for line in table(case, ways, bench, ours):
            print(line)
    print()
    for reason in noisy:
        print(f"NOISY: {reason}")
    if noisy:
        print("Do not publish these figures: run the command again on a quiet machine.")
