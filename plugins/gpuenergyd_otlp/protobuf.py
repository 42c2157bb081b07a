"""Protobuf encoding of an OTLP/HTTP metrics request, for collectors that do not accept JSON.

The messages are those of opentelemetry-proto 1 (`collector/metrics/v1`, `metrics/v1`, `common/v1`), with their JSON
names. Only the fields that `otlp_metrics` sets are listed; this table avoids two more dependencies.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

_VARINT, _FIXED64, _LENGTH_DELIMITED = 0, 1, 2


def _varint(number: int) -> bytes:
    """Return a non-negative integer, seven bits per byte, lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SCALARS: Mapping[str, tuple[int, Callable[[Any], bytes]]] = {
    "string": (_LENGTH_DELIMITED, lambda text: _with_length(text.encode())),
    "fixed64": (_FIXED64, lambda number: struct.pack("<Q", int(number))),
    "double": (_FIXED64, lambda number: struct.pack("<d", number)),
    "varint": (_VARINT, lambda number: _varint(int(number))),
}
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Request": {"resourceMetrics": (1, "ResourceMetrics")},
    "ResourceMetrics": {"resource": (1, "Resource"), "scopeMetrics": (2, "ScopeMetrics")},
    "Resource": {"attributes": (1, "KeyValue")},
    "ScopeMetrics": {"scope": (1, "Scope"), "metrics": (2, "Metric")},
    "Scope": {"name": (1, "string"), "version": (2, "string")},
    "Metric": {
        "name": (1, "string"),
        "description": (2, "string"),
        "unit": (3, "string"),
        "gauge": (5, "Gauge"),
        "sum": (7, "Sum"),
    },
    "Gauge": {"dataPoints": (1, "DataPoint")},
    "Sum": {"dataPoints": (1, "DataPoint"), "aggregationTemporality": (2, "varint"), "isMonotonic": (3, "varint")},
    "DataPoint": {
        "startTimeUnixNano": (2, "fixed64"),
        "timeUnixNano": (3, "fixed64"),
        "asDouble": (4, "double"),
        "attributes": (7, "KeyValue"),
    },
    "KeyValue": {"key": (1, "string"), "value": (2, "AnyValue")},
    "AnyValue": {"stringValue": (1, "string")},
}
"""Number and type of each field of each message. Lists are repeated fields."""


def encoded_request(body: Mapping[str, Any]) -> bytes:
    """Return the protobuf encoding of what `otlp_metrics` returns."""
    return _encoded(body, "Request")


def _encoded(value: Mapping[str, Any], message: str) -> bytes:
    parts = []
    for name, content in value.items():
        number, kind = _MESSAGES[message][name]
        for item in content if isinstance(content, list) else [content]:
            if kind in _SCALARS:
                wire_type, encode = _SCALARS[kind]
                encoded = encode(item)
            else:
                wire_type, encoded = _LENGTH_DELIMITED, _with_length(_encoded(item, kind))
            parts.append(_varint(number << 3 | wire_type) + encoded)
    return b"".join(parts)


def _with_length(content: bytes) -> bytes:
    return _varint(len(content)) + content
