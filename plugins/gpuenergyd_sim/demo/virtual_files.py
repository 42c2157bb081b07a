"""Files by which the command line and the demo's process in virtual time talk: request, progress, release."""

import json
from pathlib import Path
from typing import Any

from gpuenergyd.atomic_file import replace_file
from gpuenergyd_sim.demo.request import DemoRequest
from gpuenergyd_sim.demo.session import Progress


class VirtualFiles:
    """The files in the demo's folder, as the command line uses them."""

    def __init__(self, folder: Path) -> None:
        self._request, self._progress, self._release = _paths(folder)
        self._num_announced = 0

    def write_request(self, request: DemoRequest) -> None:
        """Write what the demo is asked for."""
        self._request.write_text(request.to_json(), encoding="utf-8")

    def show(self, progress: Progress) -> None:
        """Show the steps that are new, and the daemon's status if it is newer than the last one."""
        found = self._read()
        for step in found.get("steps", ())[self._num_announced :]:
            progress.announce(step)
            self._num_announced += 1
        if found.get("status") is not None:
            progress.show(found["status"])

    def reason(self) -> str | None:
        """Return why a training that has ended has too few planned iterations, "" if it has enough; None before."""
        reason: str | None = self._read().get("reason")
        return reason

    def release(self) -> None:
        """Have a held demo end."""
        self._release.touch()

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._progress.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found


class VirtualProgress:
    """The files in the demo's folder, as the process in virtual time uses them."""

    def __init__(self, folder: Path) -> None:
        self._request, self._progress, self._release = _paths(folder)
        self._steps: list[str] = []

    def read_request(self) -> DemoRequest:
        """Return what the demo is asked for."""
        return DemoRequest.from_json(self._request.read_text(encoding="utf-8"))

    def announce(self, text: str) -> None:
        """Write one more step."""
        self._steps.append(text)
        self._write()

    def show(self, status: dict[str, Any]) -> None:
        """Write the daemon's status."""
        self._write(status=status)

    def end(self, reason: str) -> None:
        """Write that the training has ended, and why it has too few planned iterations."""
        self._write(reason=reason)

    def is_released(self) -> bool:
        """Return whether a held demo shall end."""
        return self._release.exists()

    def _write(self, **newest: Any) -> None:
        replace_file(self._progress, json.dumps({"steps": self._steps, **newest}).encode())


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "request.json", folder / "progress.json", folder / "release"
