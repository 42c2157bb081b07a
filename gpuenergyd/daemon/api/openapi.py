"""`GET /v1/openapi.json`: the OpenAPI description of all routes, generated from the message types."""

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
from gpuenergyd.wire.pipeline_messages import MemberPlan, MemberQuery, MemberReport, PipelineReply, PipelineReport

_ERRORS = {
    "400": "The message is malformed or contains an invalid value.",
    "403": "The client lacks the right, or its job does not run on the GPU.",
    "404": "The GPU, job, rank token or resource does not exist.",
    "405": "The resource does not allow this method.",
    "408": "The body was not complete within the time limit.",
    "409": "The message conflicts with its job, or the GPU is in use or leased.",
    "413": "The message is too large.",
    "429": "Request rate limit of the user exceeded; Retry-After is in seconds.",
    "500": "Internal error of the daemon or the driver.",
    "503": "The daemon cannot do this now, for example without a GPU worker.",
}


def api_description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas = json_schemas(
        *(RankRegistration, RankRegistered, IterationReport, IterationReply, PaceReport, PaceReply, RankRelease),
        *(MemberQuery, MemberReport, MemberPlan, PipelineReport, PipelineReply),
        *(LeaseRequest, LeaseGranted, LeaseRelease, LeaseReleased),
    )
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {"type": "string", "description": "Error message, one line."}},
        "required": ["error"],
    }
    schemas |= zeusd_schemas()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuenergyd",
            "version": version("gpuenergyd"),
            "description": "HTTP/1.1 on a Unix socket; instants (`_mono_ns`) are the host's monotonic clock in ns.",
        },
        "paths": {
            "/v1/ranks": _post("Register a training process as a rank of a job.", "RankRegistration", "RankRegistered"),
            "/v1/iterations": _post(
                "Report an iteration of a rank; the reply may contain a plan.", "IterationReport", "IterationReply"
            ),
            "/v1/pace": _post("Report the pace of replicas on other hosts.", "PaceReport", "PaceReply"),
            "/v1/release": _post("Release a rank that ends normally.", "RankRelease", None),
            "/v1/members": _post("Query the state of a pipeline member.", "MemberQuery", "MemberReport"),
            "/v1/members/plan": _post("Install the plan slice of a pipeline member.", "MemberPlan", "IterationReply"),
            "/v1/pipelines": _post(
                "Report a pipeline across hosts as its leader; the reply may contain a plan.",
                "PipelineReport",
                "PipelineReply",
            ),
            "/v1/leases": _post(
                "Lock a GPU's clock or limit its power (administrators).", "LeaseRequest", "LeaseGranted"
            ),
            "/v1/leases/release": _post(
                "Release a GPU lease and restore the GPU (administrators).", "LeaseRelease", "LeaseReleased"
            ),
            "/v1/status": _get("State of the daemon: health, GPUs, jobs. Missing values are null, never 0."),
            "/v1/jobs/{job_id}": _get("One running job: plan, predictions, last measured timeline.", "job_id"),
            "/v1/metrics": _get("The status as Prometheus metrics.", content_type="text/plain"),
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
            "responses": {"200": _content("Success.", schema), **_errors(*_ERRORS)},
        }
    }


def _get(summary: str, parameter: str | None = None, *, content_type: str = "application/json") -> dict[str, Any]:
    schema = {"type": "object"} if content_type == "application/json" else {"type": "string"}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": _content("Success.", schema, content_type), **_errors(*_ERRORS)},
    }
    if parameter is not None:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"get": operation}


def _errors(*codes: str) -> dict[str, Any]:
    return {code: _content(_ERRORS[code], {"$ref": "#/components/schemas/Error"}) for code in codes}


def _content(description: str, schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}
