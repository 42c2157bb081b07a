"""A status shows what a client has changed, and is not built anew for what it does not show."""

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.daemon.api import snapshots
from tests.support.api_server import server_of
from tests.support.job_stage import Stage
from tests.support.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("method", "path", "body", "is_shown"),
    [
        ("PUT", "/v1/power-budget", {"power_budget_w": None}, True),
        ("PUT", "/v1/power-budget", {"power_budget_w": "much"}, False),
        ("POST", "/v1/past-jobs/forget", {}, False),
        ("GET", "/v1/power-budget", None, False),
    ],
)
def test_a_request_has_the_status_built_anew_if_it_may_have_changed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, method: str, path: str, body: object, is_shown: bool
) -> None:
    monkeypatch.setattr(snapshots, "BURST_S", 0.0)
    monkeypatch.setattr(snapshots, "LIFETIME_S", float("inf"))
    num_built = 0

    def status() -> Mapping[str, Any]:
        nonlocal num_built
        num_built += 1
        return {"num_built": num_built}

    def ask(client: HttpConnection) -> list[int]:
        seen = []
        for _ in range(2):
            seen.append(json.loads(client.request("GET", "/v1/status", limit_s=LIMIT_S)[1])["num_built"])
            client.request(method, path, None if body is None else json.dumps(body).encode(), limit_s=LIMIT_S)
        client.close()
        return seen

    async def scenario() -> list[int]:
        server = server_of(Stage(), tmp_path, status=status)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        await server.start(listener)
        try:
            return await asyncio.to_thread(ask, HttpConnection(str(tmp_path / "socket")))
        finally:
            await server.close()

    assert asyncio.run(scenario()) == [1, 2 if is_shown else 1]
