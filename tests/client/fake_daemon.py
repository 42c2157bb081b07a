"""A daemon for tests: a real HTTP server on a Unix socket and a real SEQPACKET listener, with scripted answers."""

import contextlib
import json
import queue
import socket
import socketserver
import threading
from pathlib import Path
from typing import Any, Self

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.wire.clock_request import RankClockRequest, decode_clock_request
from tests.support.http_handler import QuietHandler
from tests.support.waiting import LIMIT_S

WAIT_LIMIT_S = LIMIT_S


def drain(waiting: "queue.Queue[Any]") -> list[Any]:
    """Return what is in a queue now."""
    items = []
    while not waiting.empty():
        items.append(waiting.get())
    return items


class _UnixHttpServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fake: "FakeDaemon"


class _RequestHandler(QuietHandler):
    @property
    def _fake(self) -> "FakeDaemon":
        assert isinstance(self.server, _UnixHttpServer)
        return self.server.fake

    def setup(self) -> None:
        super().setup()
        self._fake.connections.append(self.connection)

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls it by
        self._answer(*self._fake.answer("GET", self.path, {}))

    def do_POST(self) -> None:  # noqa: N802  the name that http.server calls it by
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        bodies = sent if isinstance(sent, list) else [sent]
        answers = [self._fake.answer("POST", self.path, body) for body in bodies]
        status, last = next((answer for answer in answers if answer[0] != 200), answers[-1])
        if "plans" in last:
            last = {**last, "plans": [plan for _, answer in answers for plan in answer.get("plans", ())]}
        self._fake.num_messages += 1
        self._answer(status, last)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_json(json.dumps(body).encode(), status)


class FakeDaemon:
    """Answers registrations with a fresh token each; `plans` are given out once, with the next report."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = str(folder / "daemon.sock")
        self.clock_socket_path = str(folder / "clock.sock")
        self.registrations: queue.Queue[dict[str, Any]] = queue.Queue()
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.releases: queue.Queue[dict[str, Any]] = queue.Queue()
        self.clock_requests: queue.Queue[RankClockRequest] = queue.Queue()
        self.joined_message = self.ended_message = ""
        self.num_messages = 0
        """POST requests so far."""
        self.takes_several, self.takes_untimed = True, False
        self.takes_together = self.takes_spans = False
        self.plans: list[dict[str, Any]] = []
        self.figures: dict[str, float] = {}
        """What replies to reports tell of the newest measured iteration."""
        self.plans_by_pp_rank: dict[int, list[dict[str, Any]]] = {}
        self.plans_after: dict[tuple[int, int], tuple[int, list[dict[str, Any]]]] = {}
        """By replica and pipeline rank: plans, and the iteration with whose report they are given out."""
        self.places: dict[str, tuple[int, int]] = {}
        """Replica and pipeline rank by token."""
        self.tokens: dict[str, int] = {}
        self._lock = threading.Lock()
        self._reported: set[tuple[int, int]] = set()
        self._has_reported = threading.Condition()
        self.connections: list[socket.socket] = []
        self.refusal: str | None = None
        """Error with which registrations are refused."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on both sockets, knowing no rank."""
        for path in (self.socket_path, self.clock_socket_path):
            Path(path).unlink(missing_ok=True)
        self.tokens.clear()
        self._clock_listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._clock_listener.bind(self.clock_socket_path)
        self._clock_listener.listen()
        threading.Thread(target=self._accept_clock_connections, daemon=True).start()
        self._server = _UnixHttpServer(self.socket_path, _RequestHandler)
        self._server.fake = self
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Go away as a killed daemon does: every connection breaks."""
        self._server.shutdown()
        self._server.server_close()
        for connection in [*self.connections, self._clock_listener]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and body of a reply, and keep what was said."""
        if path.startswith("/reported/"):
            pp_rank, iteration_index = map(int, path.split("/")[2:])
            with self._has_reported:
                has_come = self._has_reported.wait_for(
                    lambda: (pp_rank, iteration_index) in self._reported, timeout=WAIT_LIMIT_S
                )
            return (200, {}) if has_come else (408, {})
        with self._lock:
            match method, path:
                case "POST", "/v1/ranks" if self.refusal is not None:
                    return 400, {"error": self.refusal}
                case "POST", "/v1/ranks":
                    token = f"{len(self.tokens) + 0xA0:032x}"
                    self.tokens[token] = body["pp_rank"]
                    self.places[token] = body["dp_rank"], body["pp_rank"]
                    self.registrations.put(body)
                    return 200, {
                        "job_id": "job-1",
                        "rank_token": token,
                        "clock_socket_path": self.clock_socket_path,
                        "protocol_version": 1,
                        "message": self.joined_message,
                    }
                case "POST", "/v1/iterations":
                    if body["rank_token"] not in self.tokens:
                        return 404, {"error": "unknown rank token"}
                    plans = self.plans + self.plans_by_pp_rank.pop(self.tokens[body["rank_token"]], [])
                    self.plans = []
                    from_iteration, later = self.plans_after.get(self.places[body["rank_token"]], (0, []))
                    if body["iteration_index"] == from_iteration:
                        plans = plans + later
                    self.reports.put(body)
                    with self._has_reported:
                        self._reported.add((self.tokens[body["rank_token"]], body["iteration_index"]))
                        self._has_reported.notify_all()
                    takes = {name: own for name, own in vars(self).items() if name.startswith("takes_")}
                    return 200, {"plans": plans, **self.figures, **takes}
                case "POST", "/v1/release":
                    self.releases.put(body)
                    return 200, {"message": self.ended_message} if self.ended_message else {}
                case "GET", "/v1/status":
                    return 200, {"jobs": []}
                case _:
                    return 404, {"error": f"no {method} {path}"}

    def _accept_clock_connections(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._clock_listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._read_records, args=(connection,), daemon=True).start()

    def _read_records(self, connection: socket.socket) -> None:
        # Accepted while the daemon stops, a connection is closed here and nowhere else.
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(4096):
                self.clock_requests.put(decode_clock_request(data))


def wait_for_report(socket_path: str, pp_rank: int, iteration_index: int) -> None:
    """Return when a rank's report of an iteration has come; from any process."""
    connection = HttpConnection(socket_path)
    status, _ = connection.request("GET", f"/reported/{pp_rank}/{iteration_index}", limit_s=2 * WAIT_LIMIT_S)
    connection.close()
    assert status == 200, f"no report of iteration {iteration_index} of rank {pp_rank}"


def plan_slice(
    epoch: int, apply_at_iteration: int, changes: list[tuple[str, int, int, int, int]] | None = None
) -> dict[str, Any]:
    return {
        "plan_id": f"plan-{epoch}",
        "plan_epoch": epoch,
        "apply_at_iteration": apply_at_iteration,
        "changes": changes or [],
    }


def covered(reports: list[dict[str, Any]]) -> list[int]:
    """Return the iterations that reports are on, in their order."""
    spans = [(report["iteration_index"], report.get("num_together", 1)) for report in reports]
    return [index for last, number in spans for index in range(last - number + 1, last + 1)]
