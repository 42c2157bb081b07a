"""`GET /v1/openapi.json`: the OpenAPI description of all routes, generated from the message types."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from gpuenergyd.daemon.api.plugin_routes import ApiPart, plugin_routes
from gpuenergyd.daemon.api.routes import JSON_TYPE, ROUTES, Route
from gpuenergyd.wire import MAX_REPORTS
from gpuenergyd.wire.daemon_codec import encode, json_schemas

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


@cache
def api_text() -> bytes:
    """Return the OpenAPI document as JSON; built once, since it takes longer than other replies."""
    return encode(api_description())


def api_description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for part in (describe_routes(ROUTES, _ERRORS), *(plugin.describe(_ERRORS) for plugin in plugin_routes())):
        paths |= part.paths
        schemas |= part.schemas
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {"type": "string", "description": "Error message, one line."}},
        "required": ["error"],
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuenergyd",
            "version": version("gpuenergyd"),
            "description": "HTTP/1.1 on a Unix socket; instants (`_mono_ns`) are the host's monotonic clock in ns.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def describe_routes(routes: Iterable[Route], errors: Mapping[str, str]) -> ApiPart:
    """Return the description of routes from their message types; `errors` are the meanings of the error statuses."""
    paths: dict[str, Any] = {}
    messages: list[type] = []
    for route in routes:
        paths.setdefault(route.path, {}).update(_path(route, errors))
        messages += [message for message in (route.request, route.reply) if message is not None]
    return ApiPart(paths, json_schemas(*dict.fromkeys(messages)))


def _path(route: Route, errors: Mapping[str, str]) -> dict[str, Any]:
    schema = {"type": "object"} if route.content_type == JSON_TYPE else {"type": "string"}
    if route.reply is not None:
        schema = _reference(route.reply.__name__)
    refusals = {code: _content(meaning, _reference("Error")) for code, meaning in errors.items()}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": _content("Success.", schema, route.content_type), **refusals},
    }
    if route.request is not None:
        body: dict[str, Any] = _reference(route.request.__name__)
        if route.takes_several:
            body = {"oneOf": [body, {"type": "array", "items": body, "minItems": 1, "maxItems": MAX_REPORTS}]}
        content = {JSON_TYPE: {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    if parameters := re.findall(r"{(\w+)}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return {route.method.lower(): operation}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(description: str, schema: dict[str, Any], content_type: str = JSON_TYPE) -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}
