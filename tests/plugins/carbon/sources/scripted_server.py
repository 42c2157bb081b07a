"""A local HTTP server that answers from a script: what providers are documented to send, and everything worse."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_handler import QuietHandler


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; `drip` sends the body byte by byte until the server stops or the client leaves."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    drip: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


Script = Callable[[Asked], Reply]


@dataclass(slots=True)
class ScriptedServer:
    """The server's address and what it was asked."""

    url: str
    asked: list[Asked] = field(default_factory=list)


def json_reply(value: Any, status: int = 200) -> Reply:
    """Return a reply with a JSON body; NaN is written as Python writes it."""
    return Reply(json.dumps(value).encode(), status, (("Content-Type", "application/json"),))


@contextmanager
def serving(script: Script) -> Iterator[ScriptedServer]:
    """Serve until the block ends; no thread outlives it."""
    ended = threading.Event()

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  the name that http.server calls it by
            parts = urlsplit(self.path)
            asked = Asked(parts.path, parse_qs(parts.query), {k.lower(): v for k, v in self.headers.items()})
            server.asked.append(asked)
            reply = script(asked)
            self.send_head(reply.status, len(reply.body), [*reply.headers, ("Connection", "close")])
            try:
                if reply.drip:
                    for k in range(len(reply.body)):
                        self.wfile.write(reply.body[k : k + 1])
                        self.wfile.flush()
                        if ended.wait(0.02):
                            return
                else:
                    self.wfile.write(reply.body)
            except OSError:
                self.close_connection = True

        def do_POST(self) -> None:  # noqa: N802  as above
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = False
    server = ScriptedServer(f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        ended.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()
