"""OpenTelemetry's variables that name a collector, for spans and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from common.settings import SettingInvalid

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
OTLP, NONE, PROMETHEUS = "otlp", "none", "prometheus"
Signal = Literal["TRACES", "METRICS"]
# Prometheus can scrape the metrics in any case.
EXPORTERS: Mapping[Signal, tuple[str, ...]] = {
    "TRACES": (OTLP, NONE),
    "METRICS": (OTLP, NONE, PROMETHEUS),
}


def collector_of(signal: Signal, environment: Mapping[str, str]) -> str:
    """Return the URL of the collector of a signal; empty if the signal is not exported.

    Raises SettingInvalid if the variables ask for an exporter or a protocol that Weir lacks.
    """
    endpoint = environment.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environment.get(ENDPOINT)
    if not endpoint or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    variable = f"OTEL_{signal}_EXPORTER"
    chosen = [each.strip() for each in environment.get(variable, "").split(",") if each.strip()]
    if unknown := [each for each in chosen if each not in EXPORTERS[signal]]:
        raise SettingInvalid(
            f"{variable}={environment[variable]!r}: must be {' or '.join(EXPORTERS[signal])}, got"
            f" {unknown[0]}"
        )
    if chosen and OTLP not in chosen:
        return ""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(variable, "grpc") not in ("", "grpc"):
            raise SettingInvalid(
                f"{variable}={environment[variable]!r}: must be grpc, which collectors take on port"
                " 4317"
            )
    return endpoint
