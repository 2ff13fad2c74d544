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
import tempfile
from collections.abc import Iterator
from pathlib import Path

from api.core.settings import Settings, bundled_models
from bench.admission import server
from bench.admission_peers import MODEL
from bench.front import api_process, create_keys
from bench.processes import claim_cores
from bench.streams import Case, Result, run, scale
from metering.store.migrations_runner import migrate

KINDS = ("cancel", "attach", "update")
BURST_OVER_S = 6.0  # by then the flood's burst allowance is spent


@contextlib.contextmanager
def flooding(address: str, key: str, kind: str, stream_count: int) -> Iterator[None]:
    """Run a flood in a separate process, started some time before the block."""
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


def row(name: str, result: Result) -> str:
    """Return one line of the table."""
    return (
        f"{name:<28}{result.ttft_p50_ms:>9.2f} {result.ttft_p99_ms:>9.2f}"
        f" {result.late_p99_ms:>9.2f} {result.busy:>6.0%}"
    )


def measure(options: argparse.Namespace, url: str, core: int, other_core: int) -> None:
    """Measure every flood and print the table."""
    migrate(url)
    quiet, hostile = create_keys(url, 2)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="weir-bench-", dir=options.directory)
        )
        settings = Settings(
            database_url=url,
            home=Path(home),
            listen_address="127.0.0.1:0",
            models={MODEL: next(iter(bundled_models().values()))},
            engine_device="simulated",
            simulated_time_scale=scale(),
            frames_share_max=options.share,
        )
        address, processes = stack.enter_context(api_process(settings, core, other_core, None))
        print(f"{'of the quiet stream':<28}{'ttft50 ms':>9} {'99':>9} {'late 99':>9} {'api':>6}")
        print(row("alone", run(Case(1), address, processes, quiet, options.seconds)), flush=True)
        for kind in KINDS:
            for count in map(int, options.streams.split(",")):
                with flooding(address, hostile, kind, count):
                    result = run(Case(1), address, processes, quiet, options.seconds)
                print(row(f"{kind}, {count} streams", result), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per case (default: %(default)s)"
    )
    parser.add_argument(
        "--streams", default="1,50", help="numbers of flooding streams (default: %(default)s)"
    )
    parser.add_argument(
        "--share", type=float, default=0.25, help="WEIR_FRAMES_SHARE_MAX (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )
    options = parser.parse_args()
    core, other_core = claim_cores()
    with server(None, options.directory) as url:
        measure(options, url, core, other_core)


if __name__ == "__main__":
    main()
