"""The OpenAPI description matches the routes and the message types."""

import asyncio
import json
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.daemon.api.openapi import api_description, api_text
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd.wire.messages import IterationReport, RankRegistered, RankRegistration, RankRelease
from tests.support.api_server import server_of
from tests.support.job_stage import Stage, registration, report


def served_routes(tmp_path: Path) -> frozenset[tuple[str, str]]:
    async def scenario() -> frozenset[tuple[str, str]]:
        server = server_of(Stage(), tmp_path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket"))
        await server.start(listener)
        routes = server.routes
        await server.close()
        return routes

    return asyncio.run(scenario())


def test_openapi_describes_exactly_the_routes(tmp_path: Path) -> None:
    described = {
        (method.upper(), path) for path, operations in api_description()["paths"].items() for method in operations
    }

    assert described == served_routes(tmp_path)


def references(value: Any) -> set[str]:
    """Return all schema references in a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(v) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(references(v) for v in value))
    return set()


def test_every_schema_reference_exists() -> None:
    document = api_description()

    found = references(document)

    assert found
    for reference in found:
        name = re.fullmatch(r"#/components/schemas/(\w+)", reference)
        assert name is not None
        assert name[1] in document["components"]["schemas"]


@pytest.mark.parametrize("message_type", [RankRegistration, RankRegistered, IterationReport, RankRelease])
def test_a_schema_has_the_fields_of_its_message(message_type: type[Any]) -> None:
    schema = api_description()["components"]["schemas"][message_type.__name__]

    assert set(schema["properties"]) == set(message_type.__dataclass_fields__)


def test_client_messages_contain_all_required_fields() -> None:
    schemas = api_description()["components"]["schemas"]

    assert set(schemas["RankRegistration"]["required"]) <= set(asdict(registration(0)))
    assert set(schemas["IterationReport"]["required"]) <= set(asdict(report("00", 0, 0, 0)))


def test_the_document_is_built_once() -> None:
    assert api_text() is api_text()
    assert json.loads(api_text()) == json.loads(encode(api_description()))
