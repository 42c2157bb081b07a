"""OpenAPI description of the zeusd routes; all parameters are query parameters."""

from collections.abc import Mapping
from typing import Any

_UNSIGNED = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_BOOLEAN = {"type": "string", "enum": ["true", "false"]}
_INDICES = {"type": "string", "description": "NVML indices of this host, separated by commas.", "example": "0,1"}
_CPU_INDICES = _INDICES | {"description": "Numbers of the kernel's zones (intel-rapl:N), separated by commas."}
_PER_CPU = {"type": "object", "description": "By number of the zone."}
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
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/ZeusdRefusal"}}}
    refusals = {code: {"description": meaning, "content": refusal} for code, meaning in errors.items()}

    def get(summary: str, success: dict[str, Any] | None = None, *, selects_gpus: bool = False) -> dict[str, Any]:
        described = {"summary": summary, "responses": ({} if success is None else {"200": success}) | refusals}
        return {"get": described | ({"parameters": [_parameter("gpu_ids", _INDICES)]} if selects_gpus else {})}

    events = {"description": "Events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    paths = {
        "/discover": get("GPUs and available API groups.", _json({"type": "object"})),
        "/time": get("Wall-clock time in ms.", _json({"type": "object"})),
        "/auth/whoami": get("Always 404: clients are identified by kernel credentials."),
        "/gpu/stream_power": get(
            "Server-sent events with the power of each GPU: now, then at each change.", events, selects_gpus=True
        ),
    }
    for name, (summary, parameters) in _CHANGES.items():
        given = {"gpu_ids": _INDICES, "block": _BOOLEAN, **parameters}
        paths[f"/gpu/{name}"] = {
            "post": {
                "summary": summary,
                "responses": {"200": {"description": "Success; no body."}} | refusals,
                "parameters": [_parameter(key, schema, is_required=True) for key, schema in given.items()],
            }
        }
    for name, summary in _READINGS.items():
        paths[f"/gpu/{name}"] = get(summary, _json(_PER_GPU), selects_gpus=True)
    chosen = _parameter("cpu_ids", _CPU_INDICES)
    answers = {
        "get_cumulative_energy": ("Energy of processors and their memory in uJ.", _json(_PER_CPU), ("cpu", "dram")),
        "get_power": ("Power of processors and their memory in mW, over 0.1 s.", _json(_PER_CPU), ()),
        "stream_power": ("Server-sent events with the power of each processor, every 0.1 s.", events, ()),
    }
    for name, (summary, success, flags) in answers.items():
        described = get(f"{summary} 404 where the daemon cannot read the kernel's counters.", success)
        described["get"]["parameters"] = [chosen, *(_parameter(flag, _BOOLEAN, is_required=True) for flag in flags)]
        paths[f"/cpu/{name}"] = described
    return paths


def _parameter(name: str, schema: dict[str, Any], *, is_required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": is_required, "schema": schema}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "Success.", "content": {"application/json": {"schema": schema}}}
