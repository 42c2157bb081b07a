"""The session with an OpenADR server: openleadr's own server over loopback, and servers that misbehave."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

openleadr = pytest.importorskip(
    "openleadr", reason="needs openleadr: pip install 'gpuenergyd[openadr]'", exc_type=ImportError
)

from gpuenergyd.errors import UsageError  # noqa: E402
from gpuenergyd_fleet.decisions.grid_event import LoadUnit  # noqa: E402
from gpuenergyd_fleet.event_input import events_of_file  # noqa: E402  after the skip
from gpuenergyd_fleet.openadr.session import MAX_REPLY_BYTES, VtnAccess, VtnError, VtnSession, check_access  # noqa: E402
from tests.plugins.carbon.sources.scripted_server import Reply, serving  # noqa: E402
from tests.support.openadr_server import PATH, VEN_ID, OpenLeadrServer  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.AppKey")  # in openleadr's server


@pytest.fixture
def vtn() -> Iterator[OpenLeadrServer]:
    server = OpenLeadrServer()
    server.start()
    yield server
    server.stop()


def _exchanged(url: str) -> list[Any]:
    async def run() -> list[Any]:
        async with aclosing(VtnSession(VtnAccess(url, "site"))) as session:
            return list(await session.exchange())

    return asyncio.run(run())


def test_events_of_a_real_server_reach_the_file_of_the_process(vtn: OpenLeadrServer, tmp_path: Path) -> None:
    out, log = tmp_path / "events.csv", tmp_path / "log"
    url = f"http://127.0.0.1:{vtn.port}{PATH}"
    vtn.add("event-1", "LOAD_CONTROL", "x-loadControlCapacity", 0.7)
    vtn.add("price-1", "ELECTRICITY_PRICE", "price", 0.3)
    command = ["--vtn-url", url, "--ven-name", "site", "--out", str(out), "--capacity-w", "10000"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "gpuenergyd.cli.main", "fleet", "openadr", *command],
            stdout=output,
            stderr=output,
        )
        try:
            wait_until(lambda: len(vtn.answers) == 2, log=log.read_text)
            (event,) = events_of_file(out, time.time())
            vtn.do(lambda server: server.cancel_event(VEN_ID, "event-1"))
            wait_until(lambda: events_of_file(out, time.time()) == (), log=log.read_text)
        finally:
            process.terminate()
            process.wait()

    assert (event.event_id, event.unit) == ("event-1", LoadUnit.W)
    assert event.value == pytest.approx(7000.0)
    assert event.end_s - event.start_s == pytest.approx(600.0)
    assert set(vtn.answers) == {("event-1", "optIn"), ("price-1", "optOut")}
    assert "event price-1 refused: signal 'ELECTRICITY_PRICE'" in log.read_text()


def test_a_server_without_events_lists_none(vtn: OpenLeadrServer) -> None:
    assert _exchanged(f"http://127.0.0.1:{vtn.port}{PATH}") == []


# --- servers that misbehave ---


BOMB = (
    b'<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb">'
    + b"".join(b'<!ENTITY %c "%s">' % (99 + k, b"&%c;" % (98 + k) * 10) for k in range(9))
    + b"]><a>&k;</a>"
)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b""),
        (200, b"\xff\xfe<"),
        (200, b"<html>not OpenADR</html>"),
        (200, BOMB),
        (200, b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>'),
        (200, b'<?xml version="1.0" encoding="UTF-7"?>' + BOMB.replace(b"<", b"+ADw-").replace(b"&", b"+ACY-")),
        (200, BOMB.decode().encode("utf-16-le")),
        (200, b"<" * (MAX_REPLY_BYTES + 1)),
        (500, b"\n\x1b[31mtrouble"),
    ],
    ids=["empty", "no text", "other XML", "entities", "external entity", "UTF-7", "UTF-16", "too large", "error"],
)
def test_a_reply_that_is_no_openadr_is_one_line_of_trouble(
    status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        serving(lambda _: Reply(body, status)) as server,
        pytest.raises(VtnError, match="the VTN") as refused,
    ):
        _exchanged(server.url + PATH)

    assert str(refused.value).isprintable()


def test_no_redirect_is_followed() -> None:
    with serving(lambda _: Reply()) as other:
        redirect = Reply(status=302, headers=(("Location", f"{other.url}/inside"),))
        with serving(lambda _: redirect) as server, pytest.raises(VtnError):
            _exchanged(server.url + PATH)

    assert other.asked == []


def test_a_server_that_is_not_there_is_trouble_and_no_error() -> None:
    with pytest.raises(VtnError):
        _exchanged("http://127.0.0.1:1/x")


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (VtnAccess("http://vtn.example/x", "site"), "http is only valid for a loopback address"),
        (VtnAccess("ftp://vtn.example/x", "site"), "must be a URL with https"),
        (VtnAccess("https:///x", "site"), "must be a URL with https"),
        (VtnAccess("https://vtn.example/x", "a\nb"), "--ven-name"),
        (VtnAccess("https://vtn.example/x", "site", cert_path=Path("cert.pem")), "--cert and --key belong together"),
    ],
)
def test_settings_that_are_unsafe_are_refused(access: VtnAccess, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_access(access)


def test_a_certificate_that_cannot_be_read_is_named() -> None:
    access = VtnAccess("https://vtn.example/x", "site", Path("/nowhere/cert.pem"), Path("/nowhere/key.pem"))

    with pytest.raises(UsageError, match="No such file"):
        VtnSession(access)
