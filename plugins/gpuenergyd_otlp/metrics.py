"""The metrics as an OTLP/HTTP request in its JSON form, for OpenTelemetry collectors; names as for Prometheus.

GPU energy, power and temperature are also exported under the names and with the attributes of OpenTelemetry's semantic
conventions for hardware, for example `hw.energy` with `hw.id` and `hw.type="gpu"`; not the energy of superchip modules.

Counters are cumulative sums since the start of the daemon, all other metrics are gauges; unknown values are omitted.
The encoding is specified at opentelemetry.io/docs/specs/otlp, so no OpenTelemetry package is needed.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from prometheus_client.core import Metric

from gpuenergyd import __version__
from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd_otlp.prometheus import StatusCollector

_UNITS = {"joules": "J", "watts": "W", "seconds": "s", "hertz": "Hz", "celsius": "Cel", "grams": "g"}
"""UCUM unit by the last word of a metric name; other metrics are dimensionless."""
_CUMULATIVE = 2
_TEMPERATURE = "gpuenergyd_gpu_temperature_celsius"
_HARDWARE = {
    "gpuenergyd_gpu_energy_joules": "hw.energy",
    "gpuenergyd_gpu_power_watts": "hw.power",
    _TEMPERATURE: "hw.temperature",
}
"""Name in the semantic conventions, by name of the metric family."""
_VENDOR = "NVIDIA"


def otlp_metrics(status: Mapping[str, Any], *, at: datetime, host_name: str) -> dict[str, Any]:
    """Return the body of a POST to a collector's `/v1/metrics`, for a status of the instant `at`."""
    at_ns = round(at.timestamp() * 1e9)
    started_ns = at_ns - round(status["uptime_s"] * 1e9)
    metrics: list[dict[str, Any] | None] = []
    modules = {gpu["gpu_uuid"] for gpu in status["gpus"] if gpu.get("energy_scope") == EnergyScope.MODULE}
    for family in StatusCollector(status).collect():
        metric = _metric(family, at_ns=at_ns, started_ns=started_ns)
        metrics.append(metric)
        if metric is not None and family.name in _HARDWARE:
            metrics.append(_by_convention(metric, family, set() if family.name == _TEMPERATURE else modules))
    return {
        "resourceMetrics": [
            {
                "resource": {
                    "attributes": _attributes(
                        {"service.name": "gpuenergyd", "service.version": __version__, "host.name": host_name}
                    )
                },
                "scopeMetrics": [
                    {
                        "scope": {"name": "gpuenergyd", "version": __version__},
                        "metrics": [metric for metric in metrics if metric is not None],
                    }
                ],
            }
        ]
    }


def _metric(family: Metric, *, at_ns: int, started_ns: int) -> dict[str, Any] | None:
    is_counter = family.type == "counter"
    points = [
        {
            "attributes": _attributes(sample.labels),
            # OTLP's JSON encoding writes 64-bit integers as strings.
            **({"startTimeUnixNano": str(started_ns)} if is_counter else {}),
            "timeUnixNano": str(at_ns),
            "asDouble": sample.value,
        }
        for sample in family.samples
        if isfinite(sample.value)
    ]
    if not points:
        return None
    named = {
        "name": f"{family.name}_total" if is_counter else family.name,
        "description": family.documentation,
        "unit": _UNITS.get(family.name.rpartition("_")[2], "1"),
    }
    if is_counter:
        return {**named, "sum": {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}}
    return {**named, "gauge": {"dataPoints": points}}


def _by_convention(metric: Mapping[str, Any], family: Metric, left_out: Collection[str]) -> dict[str, Any] | None:
    """Return a metric of other GPUs under the name and with the attributes of OpenTelemetry's hardware conventions."""
    kind = "sum" if "sum" in metric else "gauge"
    samples = [sample for sample in family.samples if isfinite(sample.value)]
    points = [
        {
            **point,
            "attributes": _attributes(
                {
                    "hw.id": sample.labels["gpu_uuid"],
                    "hw.type": "gpu",
                    "hw.name": f"GPU {sample.labels['index']}",
                    "hw.model": sample.labels["model_name"],
                    "hw.vendor": _VENDOR,
                }
            ),
        }
        for point, sample in zip(metric[kind]["dataPoints"], samples, strict=True)
        if sample.labels["gpu_uuid"] not in left_out
    ]
    named = {**metric, "name": _HARDWARE[family.name], kind: {**metric[kind], "dataPoints": points}}
    return named if points else None


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in labels.items()]
