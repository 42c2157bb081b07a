"""openleadr's own OpenADR server over loopback, for tests of the receiver; importing it needs openleadr."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import openleadr
from openleadr.objects import Interval

from tests.support.waiting import LIMIT_S

VEN_ID = "ven-1"
PATH = "/OpenADR2/Simple/2.0b"


class OpenLeadrServer:
    """openleadr's server in a thread of its own, with what sites answered."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.answers: list[tuple[str, str]] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._is_ready, self._is_over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    def start(self) -> None:
        """Start the server; its port is known then."""
        self._thread.start()
        assert self._is_ready.wait(LIMIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def do(self, action: Callable[[Any], None]) -> None:
        """Change the server's events in its thread."""

        async def acted() -> None:
            action(self._server)

        asyncio.run_coroutine_threadsafe(acted(), self._loop).result(60)

    def add(self, event_id: str, name: str, kind: str, payload: float, *, seconds: float = 600.0) -> None:
        """Add an event that begins in a minute."""
        begin = datetime.now(tz=UTC) + timedelta(seconds=60)
        interval = Interval(begin, timedelta(seconds=seconds), payload)
        self.do(
            lambda server: server.add_event(VEN_ID, name, kind, [interval], event_id=event_id, callback=self._answered)
        )

    async def _answered(self, ven_id: str, event_id: str, opt_type: str) -> None:
        del ven_id
        self.answers.append((event_id, opt_type))

    async def _run(self) -> None:
        self._server = openleadr.OpenADRServer(
            "vtn", http_port=0, requested_poll_freq=timedelta(seconds=1), show_fingerprint=False, **self._options
        )
        self._server.add_handler("on_create_party_registration", self._registered)
        await self._server.run()
        self.port = self._server.app_runner.addresses[0][1]
        self._is_ready.set()
        await self._is_over.wait()
        await self._server.stop()

    async def _registered(self, info: Any) -> tuple[str, str]:
        del info
        return VEN_ID, "registration-1"
