"""KEDA's external scaler service. KEDA asks any api process, which answers for all of them.

A `ScaledObject` names in its metadata the `model`, and a target for each metric that it scales by:
the value that one replica should have. There is no API key: the service has numbers of models and
nothing about tenants. It has a port of its own, with TLS and client certificates if you set them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, NoReturn

import grpc

from api.keda import externalscaler_pb2 as pb
from inference.routing.router import ModelUnknown, Router
from metering.control.live import ModelLoad
from metering.core.errors import DatabaseUnavailable

Context = grpc.aio.ServicerContext[Any, Any]
# Names of metrics, which are also the keys of their targets in the metadata.
METRICS: Mapping[str, Callable[[ModelLoad], float]] = {
    "waitingRequests": lambda load: load.waiting_count,
    "waitingTokens": lambda load: load.waiting_token_count,
    "runningRequests": lambda load: load.running_count,
    "firstTokenWaitMs": lambda load: load.first_token_wait_ms,
}
TARGETS = {"waitingRequests": 1.0}  # without a target in the metadata
# KEDA's own keys in the metadata of a trigger, which it passes on; the third one before 2.13.
OF_KEDA = frozenset({"scalerAddress", "enableTLS", "tlsCertFile", "unsafeSsl"})
FROM_ENVIRONMENT = "FromEnv"  # suffix of keys whose values KEDA took from the workload's variables
KEPT_S = 0.5  # an answer, for all calls about the same model together
STREAM_INTERVAL_S = 1.0
Read = Callable[[str], Coroutine[Any, Any, ModelLoad]]


class Loads:
    """Loads of models: at most one query of each at a time, kept for `KEPT_S`."""

    def __init__(self, read: Read) -> None:
        """`read` reads the load of a model."""
        self._read = read
        self._locks: dict[str, asyncio.Lock] = {}
        self._found: dict[str, tuple[float, ModelLoad]] = {}

    async def of(self, model: str) -> ModelLoad:
        """Return the load of a known model. Raises: DatabaseUnavailable."""
        async with self._locks.setdefault(model, asyncio.Lock()):
            found = self._found.get(model)
            if found is None or time.monotonic() - found[0] > KEPT_S:
                found = self._found[model] = time.monotonic(), await self._read(model)
            return found[1]


class ExternalScaler:
    """Implement `externalscaler.ExternalScaler`."""

    def __init__(self, router: Router, read: Read) -> None:
        """`read` reads the load of a model in all processes."""
        self._router = router
        self._loads = Loads(read)

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        """Say whether the model needs a replica."""
        model, _ = await self._request(request, context)
        load = await self._load(model, context)
        return pb.IsActiveResponse(result=load.is_active)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Say it now, and again whenever it changes."""
        model, _ = await self._request(request, context)
        reported: bool | None = None
        while True:
            is_active = (await self._load(model, context)).is_active
            if is_active != reported:
                reported = is_active
                yield pb.IsActiveResponse(result=is_active)
            await asyncio.sleep(STREAM_INTERVAL_S)

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> pb.GetMetricSpecResponse:
        """Return the targets of the metadata."""
        _, targets = await self._request(request, context)
        return specs(targets)

    async def StreamMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        """Return the targets once: only the metadata changes them, which begins a new call."""
        _, targets = await self._request(request, context)
        yield specs(targets)
        await asyncio.Event().wait()

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Context
    ) -> pb.GetMetricsResponse:
        """Return the present value of one metric, summed over all api processes."""
        model, _ = await self._request(request.scaledObjectRef, context)
        name = request.metricName
        if name not in METRICS:
            known = ", ".join(METRICS)
            await refuse(context, f"metricName must be one of {known}, got {name!r:.80}")
        value = METRICS[name](await self._load(model, context))
        metric = pb.MetricValue(
            metricName=name, metricValue=math.ceil(value), metricValueFloat=value
        )
        return pb.GetMetricsResponse(metricValues=[metric])

    async def _request(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> tuple[str, dict[str, float]]:
        """Read the model and the targets of a request, or abort the call with the mistake."""
        metadata = {
            name.removesuffix(FROM_ENVIRONMENT): text
            for name, text in request.scalerMetadata.items()
        }
        model = metadata.pop("model", "")
        if not model:
            await refuse(context, "`model` is missing in the metadata of the ScaledObject")
        try:
            self._router.check_canonical_name(model)
        except ModelUnknown as unknown:
            await refuse(context, f"`model` in the metadata of the ScaledObject: {unknown}")
        targets = {}
        for name, text in metadata.items():
            if name in OF_KEDA:
                continue
            if name not in METRICS:
                known = ", ".join(("model", *METRICS))
                await refuse(
                    context, f"unknown key {name!r:.80} in the metadata: known are {known}"
                )
            targets[name] = await target(context, name, text)
        return model, targets or TARGETS

    async def _load(self, model: str, context: Context) -> ModelLoad:
        try:
            return await self._loads.of(model)
        except DatabaseUnavailable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database is not available")
            raise


async def target(context: Context, name: str, text: str) -> float:
    """Parse the target of a metric, or abort the call."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        await refuse(context, f"{name} in the metadata must be a number above 0, got {text!r:.80}")
    return value


def specs(targets: Mapping[str, float]) -> pb.GetMetricSpecResponse:
    """Build the specification of the metrics. KEDA before 2.11 reads whole targets only."""
    return pb.GetMetricSpecResponse(
        metricSpecs=[
            pb.MetricSpec(
                metricName=name, targetSize=max(math.ceil(value), 1), targetSizeFloat=value
            )
            for name, value in targets.items()
        ]
    )


async def refuse(context: Context, message: str) -> NoReturn:
    """Abort the call: the ScaledObject has to be corrected."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
    raise AssertionError("abort raises")
