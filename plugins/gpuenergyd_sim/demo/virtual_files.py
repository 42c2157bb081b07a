"""Files in the demo's folder, through which the command line and the demo's process in virtual time communicate."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuenergyd.atomic_file import replace_file
from gpuenergyd_sim.demo.grid import DemoGrid
from gpuenergyd_sim.demo.request import DemoRequest
from gpuenergyd_sim.demo.session import Progress
from gpuenergyd_sim.driver.world_kinds import WorldKind


class VirtualFiles:
    """One side's view of the files: the command line's, or that of the process, to which it shows its progress."""

    def __init__(self, folder: Path) -> None:
        self._request, self._progress = folder / "request.json", folder / "progress.json"
        self._release = folder / "release"
        self._steps: list[str] = []
        self._num_announced = 0

    # On the command line

    def write_request(self, request: DemoRequest) -> None:
        self._request.write_text(json.dumps(asdict(request)), encoding="utf-8")

    def show_news(self, progress: Progress) -> None:
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

    # In virtual time

    def read_request(self) -> DemoRequest:
        values = json.loads(self._request.read_text(encoding="utf-8"))
        grid, simulation = values.pop("grid"), WorldKind(values.pop("simulation"))
        return DemoRequest(**values, grid=None if grid is None else DemoGrid(**grid), simulation=simulation)

    def announce(self, text: str) -> None:
        self._steps.append(text)
        self._write()

    def show(self, status: dict[str, Any]) -> None:
        self._write(status=status)

    def end(self, reason: str) -> None:
        """Write that the training has ended, and why it has too few planned iterations."""
        self._write(reason=reason)

    def is_released(self) -> bool:
        return self._release.exists()

    def _write(self, **newest: Any) -> None:
        replace_file(self._progress, json.dumps({"steps": self._steps, **newest}).encode())
