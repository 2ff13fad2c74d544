"""Entry point of an api process: starts the first engine worker, then imports the other modules.

The worker takes seconds to import torch; this process imports its own modules meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Mapping

import uvloop

from api.core.endpoint import HELD
from inference.workers.process import SpareWorkers


def starts_torch(environment: Mapping[str, str]) -> bool:
    """Return True if this process is certain to load a model in a torch worker at startup.

    With a directory of shared workers another process may have loaded it. Reads only a few
    variables: reading all settings takes half as long as all imports.
    """
    return (
        environment.get("WEIR_ENGINE", "torch") == "torch"
        and environment.get("WEIR_MIN_REPLICAS", "1") != "0"
        and not environment.get("WEIR_FLEET")
        and not environment.get("WEIR_ENGINE_DIRECTORY")
    )


def released(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Wait for the settings that `weir up` sends when the database is prepared, if it holds us."""
    if HELD not in environment:
        return environment
    sent = sys.stdin.read()
    if not sent:
        sys.exit("weir up ended before the database was prepared")
    os.environ.pop(HELD, None)  # children are not held
    os.environ.update(json.loads(sent))
    return os.environ


def main(environment: Mapping[str, str] = os.environ) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spares = SpareWorkers()
        try:
            if starts_torch(environment):
                runner.run(spares.add())
            gc.disable()  # imports leave little garbage: collecting takes an eighth of their time
            from api.serving import run

            gc.enable()
            run(runner, spares, released(environment))
        finally:
            runner.run(spares.close())


if __name__ == "__main__":
    main()
