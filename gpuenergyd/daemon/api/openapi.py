"""`GET /v1/openapi.json`: what the socket serves, described from the very types that are decoded."""

from importlib.metadata import version
from typing import Any

from gpuenergyd.daemon.zeusd.openapi import zeusd_paths, zeusd_schemas
from gpuenergyd.wire.daemon_codec import json_schemas
from gpuenergyd.wire.messages import (
    IterationReply,
    IterationReport,
    LeaseGranted,
    LeaseRelease,
    LeaseReleased,
    LeaseRequest,
    PaceReply,
    PaceReport,
    RankRegistered,
    RankRegistration,
    RankRelease,
)
from gpuenergyd.wire.part_messages import PartPlan, PartQuestion, PartState, PipelineReply, PipelineReport

_ERRORS = {
    "400": "The message is malformed, or asks for what does not exist.",
    "403": "The peer may not have that changed, or its job does not run on the GPU.",
    "404": "No such GPU, job, token or resource.",
    "405": "The resource takes another method.",
    "408": "The body was not complete in time.",
    "409": "It contradicts the job it belongs to, or the GPU works for another job or is leased.",
    "413": "The message is too large.",
    "429": "Too many requests of one user; Retry-After says how many seconds to wait.",
    "500": "The daemon or the driver failed.",
    "503": "The daemon cannot do that now.",
}


def api_description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas = json_schemas(
        *(RankRegistration, RankRegistered, IterationReport, IterationReply, PaceReport, PaceReply, RankRelease),
        *(PartQuestion, PartState, PartPlan, PipelineReport, PipelineReply),
        *(LeaseRequest, LeaseGranted, LeaseRelease, LeaseReleased),
    )
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {"type": "string", "description": "One line."}},
        "required": ["error"],
    }
    schemas |= zeusd_schemas()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuenergyd",
            "version": version("gpuenergyd"),
            "description": "HTTP/1.1 on a Unix socket; instants are the host's monotonic clock in ns.",
        },
        "paths": {
            "/v1/ranks": _post("A training process joins a job.", "RankRegistration", "RankRegistered"),
            "/v1/iterations": _post("A rank reports an iteration.", "IterationReport", "IterationReply"),
            "/v1/pace": _post("A rank says how slow the replicas elsewhere are.", "PaceReport", "PaceReply"),
            "/v1/release": _post("A rank leaves its job in order.", "RankRelease", None),
            "/v1/parts": _post("A part of a pipeline asks what is known of it.", "PartQuestion", "PartState"),
            "/v1/parts/plan": _post("A part has its slice of a plan installed.", "PartPlan", "IterationReply"),
            "/v1/pipelines": _post("The leading rank has its pipeline planned.", "PipelineReport", "PipelineReply"),
            "/v1/leases": _post("An administrator locks a clock or limits power.", "LeaseRequest", "LeaseGranted"),
            "/v1/leases/release": _post("An administrator gives a GPU back.", "LeaseRelease", "LeaseReleased"),
            "/v1/status": _get("The whole daemon: health, GPUs, jobs. Missing is null, never 0."),
            "/v1/jobs/{job_id}": _get("One running job: plan, predictions, last measured timeline.", "job_id"),
            "/v1/metrics": _get("The status for Prometheus.", content_type="text/plain"),
            "/v1/openapi.json": _get("This document."),
            **zeusd_paths(_ERRORS),
        },
        "components": {"schemas": schemas},
    }


def _post(summary: str, request: str, reply: str | None) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{reply}"} if reply else {"type": "object"}
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}},
            },
            "responses": {"200": _content("Done.", schema), **_errors(*_ERRORS)},
        }
    }


def _get(summary: str, parameter: str | None = None, *, content_type: str = "application/json") -> dict[str, Any]:
    schema = {"type": "object"} if content_type == "application/json" else {"type": "string"}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": _content("As asked.", schema, content_type), **_errors(*_ERRORS)},
    }
    if parameter is not None:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"get": operation}


def _errors(*codes: str) -> dict[str, Any]:
    return {code: _content(_ERRORS[code], {"$ref": "#/components/schemas/Error"}) for code in codes}


def _content(description: str, schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}
