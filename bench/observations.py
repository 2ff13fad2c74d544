"""CPU cost of observing requests and tokens: counts, against the client library's metrics; spans;
a scrape; an export by OTLP.

    python -m bench.observations

Each figure is the best of several runs in one thread, in µs of CPU. The baseline is the
straightforward way: a labelled histogram of `prometheus_client` for each stage, and a counter for
each count. Spans are made and encoded in a thread of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import timeit
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.output_buffer import FlowControl
from api.generation.parsing.start_frame import parse_start
from api.generation.request.caller import Caller
from api.metrics.operator_http import Families, request_metrics
from api.metrics.otlp import Encoder
from api.observability.observer import Ending, Gaps, Observer, record_of
from api.observability.otlp import OtlpSender
from api.observability.spans import STAGES, TraceContext
from bench.harness import Bench, Case, Cases, Figure, Values, main
from metering.core.models import Outcome
from metering.holds.operations import Settled
from metering.quotas.quota_rules import Payer

RUNS, CALLS = 9, 2000
MODEL, TIER = "demo", "interactive"
TIMINGS = {f"{stage}_ms": 3.0 for stage in STAGES} | {
    "ttft_ms": 12.0,
    "total_ms": 30.0,
    "tokens_per_second": 50.0,
}
SAMPLED, UNSAMPLED = (
    f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}" for flags in ("01", "00")
)


class EncodedSpans(SpanExporter):
    """Sink that encodes spans as an exporter does before it sends them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Implement `SpanExporter.export`."""
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def an_ending(traceparent: str = "") -> Ending:
    """Build the end of a request of the reference workload."""
    payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model=MODEL, text="a prompt"))
    settled = Settled(uuid.uuid4(), 1025, 200, 150, 150, 150, 10**8, "USD", "stop")
    caller = Caller(payer, 0.0, time.monotonic(), trace=TraceContext(traceparent))
    gaps = Gaps()
    for _ in range(settled.delivered_token_count):
        gaps.note(0)
    return Ending(caller, start, Outcome.STOP, None, TIMINGS, settled, gaps)


def by_the_library() -> Callable[[], None]:
    """Make the function that observes a request with `prometheus_client`, the baseline."""
    registry = CollectorRegistry()
    names = [*STAGES, "ttft", "inter_token", "total"]
    histograms = [
        Histogram(f"{name}_seconds", name, ("model", "tier"), registry=registry) for name in names
    ]
    counters = [
        Counter(f"count_{index}", "tokens", ("model", "kind"), registry=registry)
        for index in range(4)
    ]

    def observe() -> None:
        for histogram in histograms:
            histogram.labels(MODEL, TIER).observe(0.01)
        for counter in counters:
            counter.labels(MODEL, TIER).inc(5)

    return observe


def us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Measure the CPU time of one call, in µs."""
    return (
        min(timeit.repeat(call, number=calls, repeat=RUNS, timer=time.process_time)) / calls * 1e6
    )


def slow_write() -> float:
    """Measure the CPU time of counting a write that waits for the client, in µs."""
    flow = FlowControl(None, 60.0, lambda: None)
    times = iter(range(10**9))
    return us(lambda: flow.stalled(next(times), next(times)))


@contextlib.contextmanager
def prepare(_: argparse.Namespace) -> Iterator[Cases]:
    """Yield the calls to measure."""
    observer, ending, gaps = Observer([MODEL]), an_ending(), Gaps()
    sender = OtlpSender(uuid.uuid4(), EncodedSpans())

    def case(name: str, **ways: tuple[Callable[[], object], int]) -> Case:
        def timed(call: Callable[[], object], count: int) -> Values:
            return {"us": us(call, count)}

        named = {way.replace("_", " "): call for way, call in ways.items()}
        return Case(name, {way: partial(timed, *call) for way, call in named.items()})

    def spans(traceparent: str) -> Callable[[], object]:
        record = record_of(an_ending(traceparent))
        return lambda: sender.send([record])

    counted = (lambda: observer.ended(ending), CALLS)
    text = (lambda: generate_latest(Families([*request_metrics(observer.counts)])), 20)
    encoder = Encoder(uuid.uuid4(), "cumulative", time.time_ns())

    def encode() -> None:
        for message in encoder.messages(request_metrics(observer.counts), time.time_ns()):
            message.request.SerializeToString()

    yield [
        case("the gap before a token", Weir=(lambda: gaps.note(0), 100 * CALLS)),
        Case("the stall of a slow write, per request", {"Weir": lambda: {"us": slow_write()}}),
        case(
            "a request counted, with all its stages",
            Weir=counted,
            client_library=(by_the_library(), CALLS),
        ),
        case("noted for its spans, on the event loop", Weir=(lambda: record_of(ending), CALLS)),
        case(
            "its spans made and encoded, in a thread",
            sampled=(spans(SAMPLED), 100),
            not_sampled=(spans(UNSAMPLED), 100),
        ),
        case("counts of a model copied for a scrape", event_loop=(observer.counts.copy, 200)),
        case("their text", thread=text),
        case("their messages by OTLP", thread=(encode, 20)),
    ]


BENCH = Bench(__doc__, {"us": Figure("CPU, µs", ".2f")}, prepare)

if __name__ == "__main__":
    main(BENCH)
