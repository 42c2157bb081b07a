"""The webhook for grid events: only signed messages count, and floods are refused."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from gpuenergyd.errors import StoreError, UsageError
from gpuenergyd_fleet.decisions.grid_event import GridEvent
from gpuenergyd_fleet.webhook import (
    MAX_AGE_S,
    MAX_EVENTS_PER_MINUTE,
    PATH,
    SIGNATURE_HEADER,
    TIME_HEADER,
    EventReceiver,
    WebhookServer,
    signature,
)
from tests.plugins.fleet.test_event_input import GIVEN, NOW_S, MemoryStore
from tests.support.waiting import LIMIT_S

KEY = "k" * 32
BODY = json.dumps(GIVEN).encode()


class _FailingStore(MemoryStore):
    def put_event(self, event: GridEvent) -> bool:
        del event
        raise StoreError("the disk is full")


def _receiver(store: MemoryStore | None = None) -> EventReceiver:
    return EventReceiver(store or MemoryStore(), KEY, clock=lambda: NOW_S)


def _sent(receiver: EventReceiver, body: bytes = BODY, *, at_s: float = NOW_S, key: str = KEY) -> int:
    text = f"{at_s:.0f}"
    return receiver.receive(text, signature(key, text, body), body)[0]


def test_a_signed_event_is_stored_once() -> None:
    store = MemoryStore()
    receiver = _receiver(store)
    assert _sent(receiver) == 200
    assert _sent(receiver) == 200
    (event,) = store.events()
    assert (event.event_id, event.issued_s, event.source) == ("event-17", NOW_S, "webhook")


def test_a_message_that_was_recorded_cannot_undo_a_newer_one() -> None:
    store = MemoryStore()
    receiver = _receiver(store)
    assert _sent(receiver, at_s=NOW_S - 100) == 200
    assert _sent(receiver, json.dumps(GIVEN | {"value": 50}).encode(), at_s=NOW_S - 50) == 200
    assert _sent(receiver, at_s=NOW_S - 100) == 200
    assert store.kept["event-17"].value == 50.0


@pytest.mark.fault(32)
def test_nothing_counts_without_a_signature_that_is_right_and_recent() -> None:
    store = MemoryStore()
    receiver = _receiver(store)
    assert _sent(receiver, key="x" * 32) == 401
    assert _sent(receiver, at_s=NOW_S - MAX_AGE_S - 1) == 401
    assert _sent(receiver, at_s=NOW_S + MAX_AGE_S + 1) == 401
    right = signature(KEY, f"{NOW_S:.0f}", BODY)
    for time_text, given, body in (
        (f"{NOW_S:.0f}", right, BODY + b" "),
        (f"{NOW_S + 1:.0f}", right, BODY),
        (f"{NOW_S:.0f}", "", BODY),
        (f"{NOW_S:.0f}", "\udcff", BODY),
        ("nan", signature(KEY, "nan", BODY), BODY),
        ("", signature(KEY, "", BODY), BODY),
    ):
        assert receiver.receive(time_text, given, body)[0] == 401
    assert store.kept == {}


def test_a_flood_of_signed_events_is_refused_and_the_next_minute_is_open() -> None:
    now_s = [NOW_S]
    receiver = EventReceiver(MemoryStore(), KEY, clock=lambda: now_s[0])
    statuses = [_sent(receiver) for _ in range(MAX_EVENTS_PER_MINUTE + 5)]
    assert statuses == [200] * MAX_EVENTS_PER_MINUTE + [429] * 5
    now_s[0] += 61
    assert _sent(receiver) == 200


def test_impossible_events_and_a_failing_database_are_reported() -> None:
    assert _sent(_receiver(), b"{}") == 400
    assert _sent(_receiver(_FailingStore())) == 503


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    store = MemoryStore()
    server = WebhookServer("127.0.0.1", 0, EventReceiver(store, KEY, clock=lambda: NOW_S))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _post(server: WebhookServer, body: bytes, headers: dict[str, str], path: str = PATH) -> tuple[int, object]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)) as connection:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_events_arrive_over_http(server: WebhookServer) -> None:
    text = f"{NOW_S:.0f}"
    signed = {TIME_HEADER: text, SIGNATURE_HEADER: signature(KEY, text, BODY)}
    assert _post(server, BODY, signed) == (200, {"event_id": "event-17", "changed": True})
    assert _post(server, BODY, {})[0] == 401
    assert _post(server, BODY, signed, "/other")[0] == 404
    assert _post(server, b"x" * 20_000, signed)[0] == 413


@pytest.mark.fault(32)
@pytest.mark.parametrize("length", ["", "-1", "0", "1e9", "99999999999999999999", "²", "x"])
def test_a_wrong_length_is_refused(server: WebhookServer, length: str) -> None:
    with closing(socket.create_connection(("127.0.0.1", server.server_port), timeout=LIMIT_S)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode("utf-8"))
        assert b" 413 " in connection.recv(4096)


def test_an_address_that_cannot_be_used_is_reported_in_one_line() -> None:
    with pytest.raises(UsageError, match="cannot serve on nowhere:0"):
        WebhookServer("nowhere", 0, _receiver())
    with pytest.raises(UsageError, match=r"cannot serve on 192\.0\.2\.1:0: Cannot assign requested address$"):
        WebhookServer("192.0.2.1", 0, _receiver())  # of no host: reserved for documents
