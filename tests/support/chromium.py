"""A headless Chromium driven over the DevTools protocol: console errors, requests and page content."""

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import LIMIT_S

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0 about:blank"
)
_LIMIT_S = LIMIT_S
SCREENSHOTS_VARIABLE = "TEST_SCREENSHOTS"


@dataclass(slots=True)
class Page:
    """One tab with its console errors and network requests so far."""

    _socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _replies: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def listen(self) -> None:
        """Sort incoming messages into replies, console errors and requests."""
        async for message in self._socket:
            reported = message.json()
            if (reply := self._replies.pop(reported.get("id", 0), None)) is not None:
                reply.set_result(reported)
            params = reported.get("params", {})
            match reported.get("method"):
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning"}:
                    self.complaints.append(str(params["args"]))
                case "Log.entryAdded":
                    self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(reply, _LIMIT_S)
        assert "error" not in answer, answer
        return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, url: str, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Load a page in a window of that size and wait until it is complete."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if is_dark else "light"
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=url)
        await self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def wait_until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_LIMIT_S):
            while not await self.evaluate(script):  # noqa: ASYNC110  a condition in another process
                await asyncio.sleep(0.05)

    async def press_tab(self) -> str:
        """Press Tab; return the label or text of the focused element."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        label = "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent || '').trim()"
        return str(await self.evaluate(label))

    async def screenshot(self, name: str, folder: Path) -> Path:
        """Write a PNG of the whole page to the folder in TEST_SCREENSHOTS, else to `folder`."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        kept = Path(os.environ.get(SCREENSHOTS_VARIABLE) or folder)
        await asyncio.to_thread(kept.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread((kept / f"{name}.png").write_bytes, base64.b64decode(shot["data"]))
        return kept / f"{name}.png"


@asynccontextmanager
async def chromium_page(profile: Path) -> AsyncIterator[Page]:
    """Start a browser and yield its tab."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={profile}"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220  returns at once
    try:
        async with asyncio.timeout(_LIMIT_S), aiohttp.ClientSession() as session:
            port_file = profile / "DevToolsActivePort"
            while not port_file.exists() or not port_file.read_text(encoding="utf-8").strip():
                assert process.poll() is None, "chromium ended"
                await asyncio.sleep(0.05)
            port = port_file.read_text(encoding="utf-8").split()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (tab,) = [each for each in await answer.json() if each["type"] == "page"]
            socket = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 * 2**20)
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page
            await socket.close()
            await listening
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def in_browser(profile: Path, look: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine with a tab of a new browser."""

    async def run() -> None:
        async with chromium_page(profile) as page:
            await look(page)

    asyncio.run(run())
