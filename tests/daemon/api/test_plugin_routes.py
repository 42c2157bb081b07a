"""API routes of plugins: served on the daemon's socket, described like its own, left out if they cannot be loaded."""

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from docs.site.house_map import ROOT
from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.daemon.api.openapi import api_description
from gpuenergyd.daemon.api.plugin_routes import PluginRoutes, plugin_routes
from gpuenergyd.daemon.api.routes import ROUTES
from tests.support.api_server import server_of
from tests.support.documents import blocks
from tests.support.installed_distribution import install_distribution, site_of
from tests.support.job_stage import Stage
from tests.support.waiting import LIMIT_S

PAGE = ROOT / "docs" / "how-to" / "write-a-plugin.md"
site = site_of(plugin_routes.cache_clear)


def install(site: Path, **routes: str) -> None:
    install_distribution(site, "plugin", "gpuenergyd.routes", routes)


def answers(folder: Path, *paths: str) -> list[tuple[int, bytes]]:
    """Return what a server answers to requests of these paths."""

    async def scenario() -> list[tuple[int, bytes]]:
        server = server_of(Stage(), folder)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "socket"))
        listener.listen()
        await server.start(listener)
        client = HttpConnection(str(folder / "socket"))
        try:
            return [await asyncio.to_thread(client.request, "GET", path, limit_s=LIMIT_S) for path in paths]
        finally:
            client.close()
            await server.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("plugin", plugin_routes(), ids=lambda plugin: plugin.__module__)
def test_a_plugin_describes_its_routes_and_errors_and_takes_no_path_of_the_daemon(plugin: type[PluginRoutes]) -> None:
    """tests/daemon/api/test_openapi.py compares what is described with what is served, of all plugins together."""
    paths = plugin.describe({"418": "A teapot."}).paths
    operations = [operation for methods in paths.values() for operation in methods.values()]

    assert operations
    assert all(operation["summary"] and "418" in operation["responses"] for operation in operations)
    assert paths.keys().isdisjoint(route.path for route in ROUTES)


def test_the_plugin_of_the_documents_answers_and_is_described(site: Path) -> None:
    (routes,) = (block.text for block in blocks(PAGE) if "PowerRoutes" in block.text and block.language == "python")
    (site / "power_routes.py").write_text(routes)
    install(site, power="power_routes:PowerRoutes")

    (answer,) = answers(site, "/power/total")

    assert answer == (200, b'{"power_w": null}')
    assert api_description()["paths"]["/power/total"]["get"]["summary"] == "Total power."


def test_routes_that_cannot_be_loaded_are_logged_and_the_daemon_serves(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, shaky="no_such_module:Routes")

    with caplog.at_level(logging.ERROR):
        found = answers(site, "/v1/status", "/discover")

    assert [status for status, _ in found] == [200, 200]
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    assert caplog.messages == [f"the API of plugin shaky is not served: {reason}"]


def test_without_plugins_the_server_has_its_own_routes_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuenergyd.daemon.api.plugin_routes.entry_points", lambda **_: ())

    assert [status for status, _ in answers(site, "/v1/status", "/discover")] == [200, 404]
    assert all(path.startswith("/v1/") for path in api_description()["paths"])
