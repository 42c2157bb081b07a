"""The protobuf encoding of OTLP metrics is read back by the official classes, and is pinned byte for byte."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpuenergyd_otlp.metrics import otlp_metrics
from gpuenergyd_otlp.protobuf import encoded_request
from tests.plugins.otlp.test_prometheus import STATUS

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_small_request_has_the_bytes_of_the_specification() -> None:
    point = {
        "attributes": [{"key": "a", "value": {"stringValue": "b"}}],
        "startTimeUnixNano": "1",
        "timeUnixNano": "258",
        "asDouble": -0.5,
    }
    total = {"dataPoints": [point], "aggregationTemporality": 2, "isMonotonic": True}
    metric = {"name": "m_total", "description": "x" * 130, "unit": "J", "sum": total}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}

    encoded_point = (
        "3a08" "0a0161" "1203" "0a0162"  # attributes: key, value
        "11" "0100000000000000" "19" "0201000000000000" "21" "000000000000e0bf"
    )  # fmt: skip
    encoded_sum = "0a25" + encoded_point + "1002" + "1801"
    encoded_metric = "0a07" + b"m_total".hex() + "128201" + "78" * 130 + "1a014a" + "3a2b" + encoded_sum
    assert len(bytes.fromhex(encoded_point)) == 0x25
    assert encoded_request(body).hex() == "0ac401" + "12c101" + "12be01" + encoded_metric


def test_the_official_classes_read_every_metric_with_its_labels() -> None:
    """The JSON form is the reference; the classes come with the development dependencies."""
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    body = otlp_metrics(STATUS, at=AT, host_name="node17")

    request = service.ExportMetricsServiceRequest.FromString(encoded_request(body))

    assert without_defaults(json_format.MessageToDict(request)) == without_defaults(body)
    (sent,) = request.resource_metrics[0].scope_metrics
    totals = [metric for metric in sent.metrics if metric.name.endswith("_total")]
    assert totals
    assert all(metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2 for metric in totals)


def without_defaults(value: Any) -> Any:
    """Return JSON without empty lists, and with enumerations as numbers."""
    if isinstance(value, dict):
        return {key: without_defaults(item) for key, item in value.items() if item != []}
    if isinstance(value, list):
        return [without_defaults(item) for item in value]
    return 2 if value == "AGGREGATION_TEMPORALITY_CUMULATIVE" else value
