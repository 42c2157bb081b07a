"""OpenAPI description of the zeusd routes; all parameters are query parameters."""

from collections.abc import Mapping
from typing import Any

_UNSIGNED = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_BOOLEAN = {"type": "string", "enum": ["true", "false"]}
_INDICES = {"type": "string", "description": "NVML indices of this host, separated by commas.", "example": "0,1"}
_PER_GPU = {"type": "object", "description": "By GPU index."}
_CLOCK_RANGE = {"min_clock_mhz": _UNSIGNED, "max_clock_mhz": _UNSIGNED}

_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "set_power_limit": ("Set the power limit.", {"power_limit_mw": _UNSIGNED}),
    "set_persistence_mode": ("Accepted and recorded, but not applied.", {"enabled": _BOOLEAN}),
    "set_gpu_locked_clocks": ("Limit the SM clock to max_clock_mhz.", _CLOCK_RANGE),
    "set_mem_locked_clocks": ("Accepted and recorded, but not applied.", _CLOCK_RANGE),
    "reset_gpu_locked_clocks": ("Remove the SM clock limit.", {}),
    "reset_mem_locked_clocks": ("Accepted and recorded, but not applied.", {}),
    "reset_locked_clocks": ("Remove the SM clock limit.", {}),
}
_READINGS = {
    "get_cumulative_energy": "Energy counters in mJ.",
    "get_power": "Power in mW.",
    "get_power_limit": "Power limits in mW.",
    "get_power_limit_constraints": "Lowest and highest power limits in mW.",
    "get_persistence_mode": "Persistence modes.",
}


SCHEMAS: Mapping[str, Any] = {
    "ZeusdRefusal": {
        "type": "object",
        "properties": {
            "error": {"type": "string", "description": "Error message about the request, one line."},
            "errors": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Error messages by GPU index; the status is the highest of theirs.",
            },
        },
        "minProperties": 1,
        "additionalProperties": False,
    }
}
"""Schemas that the paths use."""


def zeusd_paths(errors: Mapping[str, str]) -> dict[str, Any]:
    """Return the paths; `errors` are the descriptions of the error statuses."""
    paths = {
        "/discover": _operation("get", "GPUs and available API groups.", {}, _json({"type": "object"}), errors),
        "/time": _operation("get", "Wall-clock time in ms.", {}, _json({"type": "object"}), errors),
        "/auth/whoami": _operation(
            "get", "Always 404: clients are identified by kernel credentials.", {}, None, errors
        ),
        "/gpu/stream_power": _operation(
            "get",
            "Server-sent events with the power of each GPU: now, then at each change.",
            {"gpu_ids": (_INDICES, False)},
            {"description": "Events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
            errors,
        ),
    }
    for name, (summary, parameters) in _CHANGES.items():
        all_parameters = {
            key: (schema, True) for key, schema in {"gpu_ids": _INDICES, "block": _BOOLEAN, **parameters}.items()
        }
        paths[f"/gpu/{name}"] = _operation(
            "post", summary, all_parameters, {"description": "Success; no body."}, errors
        )
    for name, summary in _READINGS.items():
        paths[f"/gpu/{name}"] = _operation("get", summary, {"gpu_ids": (_INDICES, False)}, _json(_PER_GPU), errors)
    for name in ("get_cumulative_energy", "get_power", "stream_power"):
        paths[f"/cpu/{name}"] = _operation("get", "Always 404: CPU readings are not available.", {}, None, errors)
    return paths


def _operation(
    method: str,
    summary: str,
    parameters: dict[str, tuple[dict[str, Any], bool]],
    success: dict[str, Any] | None,
    errors: Mapping[str, str],
) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/ZeusdRefusal"}}}
    responses = {code: {"description": meaning, "content": refusal} for code, meaning in errors.items()}
    if success is not None:
        responses = {"200": success, **responses}
    described: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameters:
        described["parameters"] = [
            {"name": name, "in": "query", "required": is_required, "schema": schema}
            for name, (schema, is_required) in parameters.items()
        ]
    return {method: described}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "Success.", "content": {"application/json": {"schema": schema}}}
