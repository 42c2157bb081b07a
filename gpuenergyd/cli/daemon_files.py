"""The files and the PUE of the running daemon, so that commands use its files and not those of the defaults."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class DaemonFiles:
    """The files of the daemon that listens on a socket; a path is None if no daemon answers or it has no such file."""

    socket_path: str
    is_running: bool = False
    history_path: Path | None = None
    journal_path: Path | None = None
    pue: float = 1.0

    @property
    def described(self) -> str:
        return f"{'' if self.is_running else 'no '}daemon at {self.socket_path}"


def find_daemon_files(socket: str | None = None) -> DaemonFiles:
    """Ask the daemon where its files are; never raises, and takes at most one second."""
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd.errors import GpuEnergyError  # noqa: PLC0415

    path = find_socket_path(socket)
    try:
        with closing(DaemonClient(path, limit_s=_LIMIT_S)) as client:
            status = client.get_status()
    except GpuEnergyError:
        return DaemonFiles(path)
    files = status.get("files") or {}
    history, journal = (Path(files[name]) if files.get(name) else None for name in ("history_path", "journal_path"))
    pue = float(status.get("pue") or 1.0)  # older daemons have none
    return DaemonFiles(path, is_running=True, history_path=history, journal_path=journal, pue=pue)


@dataclass(frozen=True, slots=True)
class FoundDatabase:
    """The history that commands read by default."""

    url: str
    origin: str
    """Where the URL comes from, for messages."""
    pue: float
    """Power usage effectiveness of the site, from the daemon or its settings."""


def find_database(socket: str | None = None) -> FoundDatabase:
    """Return the history to read: that of GPUENERGYD_DATABASE_URL, else the running daemon's, else the settings'."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  pydantic, only the default needs it

    origin = "named by GPUENERGYD_DATABASE_URL"
    if not os.environ.get("GPUENERGYD_DATABASE_URL"):
        files = find_daemon_files(socket)
        if files.history_path is not None:
            return FoundDatabase(str(files.history_path), f"named by the {files.described}", files.pue)
        origin = f"named by the settings, {files.described}"
    settings = load_settings()
    return FoundDatabase(settings.database_url, origin, settings.pue)
