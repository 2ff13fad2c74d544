"""Entry point of an api process: starts the first engine worker, and imports the rest meanwhile.

The worker needs seconds to import torch, this process as long for its own modules.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Mapping

import uvloop

from inference.workers.process import SpareWorkers


def starts_torch(environment: Mapping[str, str]) -> bool:
    """Return whether the process certainly loads a model in a torch worker when it starts.

    Reads few variables only, since reading all of the settings takes half of the imports.
    """
    return (
        environment.get("WEIR_ENGINE", "torch") == "torch"
        and environment.get("WEIR_MIN_REPLICAS", "1") != "0"
        and not environment.get("WEIR_FLEET")
    )


def main(environment: Mapping[str, str] = os.environ) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spares = SpareWorkers()
        try:
            if starts_torch(environment):
                runner.run(spares.add())
            gc.disable()  # imports leave little garbage: collecting takes an eighth of their time
            from api.serving import run

            gc.enable()
            run(runner, spares, environment)
        finally:
            runner.run(spares.close())


if __name__ == "__main__":
    main()
