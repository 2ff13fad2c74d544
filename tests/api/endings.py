"""Ends of requests, for tests of logs and metrics about them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.start_frame import parse_start
from api.generation.request.caller import Caller
from api.observability.observer import Ending
from api.observability.spans import NO_TRACE, STAGES, TraceContext
from metering.core.models import Outcome
from metering.quotas.quota_rules import Payer

TIMINGS = {f"{stage}_ms": 1.0 for stage in STAGES} | {"total_ms": 10.0}


def ending(
    *, timings: Mapping[str, float] = TIMINGS, trace: TraceContext = NO_TRACE, **values: Any
) -> Ending:
    """Return the end of a request to the model "m" that stopped by itself."""
    payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="m", text="a secret of theirs"))
    caller = Caller(payer, 0.0, time.monotonic(), trace=trace)
    usual: dict[str, Any] = {"outcome": Outcome.STOP, "broken": None, "settled": None}
    return Ending(caller, start, timings=timings, **(usual | values))
