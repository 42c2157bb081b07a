"""Valid and invalid requests generated from the OpenAPI document: each response is documented."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.daemon.api.openapi import api_description
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.tools_environment import API_TEST_TOOLS, tools_environment

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NUM_EXAMPLES = 3


@contextlib.contextmanager
def loopback_port_to(socket_path: Path) -> Iterator[int]:
    """Forward a TCP port of this host to a Unix socket: schemathesis supports TCP only."""
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        daemon_reader, daemon_writer = await asyncio.open_unix_connection(str(socket_path))
        await asyncio.gather(pump(reader, daemon_writer), pump(daemon_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(serve, sock=listener))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    try:
        yield int(listener.getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
        loop.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path, max_requests_per_user_per_s=1e6) as daemon:
        yield daemon


@pytest.mark.thorough
def test_every_answer_to_generated_requests_is_documented(daemon: DaemonProcess, tmp_path: Path) -> None:
    programs = tools_environment(API_TEST_TOOLS)
    description = tmp_path / "openapi.json"
    description.write_text(json.dumps(api_description()))
    restarts = daemon.status()["worker"]["num_restarts"]

    with loopback_port_to(daemon.socket_path) as port:
        done = subprocess.run(
            [
                *(programs / "schemathesis", "run", description, "--url", f"http://127.0.0.1:{port}"),
                *("--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES)),
                *("--seed", "1", "--no-color", "--suppress-health-check", "all"),
                # A stream never ends; tests/plugins/zeusd/test_routes.py covers it.
                *("--exclude-path", "/gpu/stream_power"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None, done.stdout[-3000:]
    assert int(counted[1]) > 100
    assert daemon.status()["worker"]["num_restarts"] == restarts
    assert "Traceback" not in daemon.log
    assert daemon.stop() == 0
    assert daemon.is_as_found()
