"""Effect of clients that send frames at full rate on a quiet one: TTFT and gaps between tokens.

Measured alone and during floods of each kind, from one stream and from many.

    python -m bench.flood [--seconds 4] [--streams 1,50] [--share 0.25] [--directory /dev/shm]

Cores and engine are those of `bench.streams`. The flood uses its own key, and sends cancels and
attaches of unknown requests, and impossible limits: 1,000 in a message, the next one as soon as
gRPC accepts it. Without pacing (`--share 1`) it takes all available CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from bench.harness import Site, Table, create_keys, new_site, options_of
from bench.streams import Case, Result, run, scale

KINDS = ("cancel", "attach", "update")
TABLE = Table(
    28,
    (
        ("ttft50 ms", "{:>9.2f}"),
        ("99", "{:>9.2f}"),
        ("late 99", "{:>9.2f}"),
        ("api", "{:>6.0%}"),
    ),
)
BURST_OVER_S = 6.0  # by then the flood's burst allowance is spent


@contextlib.contextmanager
def flooding(address: str, key: str, kind: str, stream_count: int) -> Iterator[None]:
    """Run a flood in a separate process, which has begun before the block does."""
    command = [
        sys.executable,
        "-m",
        "bench.flood_load",
        json.dumps([address, key, kind, stream_count]),
    ]
    with subprocess.Popen(command) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(BURST_OVER_S)
            yield
        finally:
            process.kill()


def print_row(name: str, result: Result) -> None:
    """Print one line of the table."""
    TABLE.print_row(name, result.ttft_p50_ms, result.ttft_p99_ms, result.late_p99_ms, result.busy)


def measure(options: argparse.Namespace, site: Site) -> None:
    """Measure every flood and print the table."""
    quiet, hostile = create_keys(site.database_url, 2)
    with site.simulated(scale(), frames_share_max=options.share) as weir:
        TABLE.print_head("of the quiet stream")
        print_row("alone", run(Case(1), weir, quiet, options.seconds))
        for kind in KINDS:
            for count in map(int, options.streams.split(",")):
                with flooding(weir.address, hostile, kind, count):
                    result = run(Case(1), weir, quiet, options.seconds)
                print_row(f"{kind}, {count} streams", result)


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 4.0)
    parser.add_argument(
        "--streams", default="1,50", help="numbers of flooding streams (default: %(default)s)"
    )
    parser.add_argument(
        "--share", type=float, default=0.25, help="WEIR_FRAMES_SHARE_MAX (default: %(default)s)"
    )
    options = parser.parse_args()
    with new_site(options.directory) as site:
        measure(options, site)


if __name__ == "__main__":
    main()
