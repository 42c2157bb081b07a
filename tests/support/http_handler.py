"""Request handler of the HTTP servers in tests: persistent connections, replies with a length, no log."""

from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """A request handler that prints nothing; subclasses define `do_GET` and `do_POST`."""

    protocol_version = "HTTP/1.1"

    def send_head(self, status: int, num_bytes: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send status and headers of a reply with a body of this length."""
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(num_bytes))):
            self.send_header(name, value)
        self.end_headers()

    def send_json(self, body: bytes, status: int = 200) -> None:
        """Send a whole reply with a JSON body."""
        self.send_head(status, len(body), [("Content-Type", "application/json")])
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name that http.server calls it by
        """Print nothing."""
