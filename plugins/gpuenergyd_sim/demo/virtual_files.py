"""Files for communication between the command line and the demo's process in virtual time."""

import json
from pathlib import Path
from typing import Any

from gpuenergyd.atomic_file import replace_file
from gpuenergyd_sim.demo.request import DemoRequest
from gpuenergyd_sim.demo.session import Progress


class VirtualFiles:
    """The command line's side of the files in the demo's folder."""

    def __init__(self, folder: Path) -> None:
        self._request, self._progress, self._release = _paths(folder)
        self._num_announced = 0

    def write_request(self, request: DemoRequest) -> None:
        """Write the request for the demo."""
        self._request.write_text(request.to_json(), encoding="utf-8")

    def show(self, progress: Progress) -> None:
        """Show new steps, and the daemon's status."""
        found = self._read()
        for step in found.get("steps", ())[self._num_announced :]:
            progress.announce(step)
            self._num_announced += 1
        if found.get("status") is not None:
            progress.show(found["status"])

    def reason(self) -> str | None:
        """Return why an ended training has too few planned iterations, or "" if it has enough; None before its end."""
        reason: str | None = self._read().get("reason")
        return reason

    def release(self) -> None:
        """Let a held demo end."""
        self._release.touch()

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._progress.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found


class VirtualProgress:
    """The virtual-time process's side of the files in the demo's folder."""

    def __init__(self, folder: Path) -> None:
        self._request, self._progress, self._release = _paths(folder)
        self._steps: list[str] = []

    def read_request(self) -> DemoRequest:
        """Return the request for the demo."""
        return DemoRequest.from_json(self._request.read_text(encoding="utf-8"))

    def announce(self, text: str) -> None:
        """Add a step."""
        self._steps.append(text)
        self._write()

    def show(self, status: dict[str, Any]) -> None:
        """Write the daemon's status."""
        self._write(status=status)

    def end(self, reason: str) -> None:
        """Write that the training has ended, and why it has too few planned iterations."""
        self._write(reason=reason)

    def is_released(self) -> bool:
        """Return whether a held demo should end."""
        return self._release.exists()

    def _write(self, **newest: Any) -> None:
        replace_file(self._progress, json.dumps({"steps": self._steps, **newest}).encode())


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "request.json", folder / "progress.json", folder / "release"
