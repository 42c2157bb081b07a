"""Paths of the running daemon's files: commands read what the daemon of the socket writes, not what defaults name."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class DaemonFiles:
    """The files of the daemon on a socket; None where no daemon answers, or it has no such file."""

    socket_path: str
    is_running: bool = False
    history_path: Path | None = None
    journal_path: Path | None = None

    @property
    def described(self) -> str:
        """The daemon that was asked."""
        return f"{'' if self.is_running else 'no '}daemon at {self.socket_path}"


def find_daemon_files(socket: str | None = None) -> DaemonFiles:
    """Ask the daemon where its files are; never raises and waits for one second at most."""
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd.errors import GpuEnergyError  # noqa: PLC0415

    path = find_socket_path(socket)
    try:
        with closing(DaemonClient(path, limit_s=_LIMIT_S)) as client:
            files = client.get_status().get("files") or {}
    except GpuEnergyError:
        return DaemonFiles(path)
    history, journal = (Path(files[name]) if files.get(name) else None for name in ("history_path", "journal_path"))
    return DaemonFiles(path, is_running=True, history_path=history, journal_path=journal)


def find_database(socket: str | None = None) -> tuple[str, str]:
    """Return the history to read and why: GPUENERGYD_DATABASE_URL, the running daemon's, or the settings'."""
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  pydantic, only the default needs it

    if not os.environ.get("GPUENERGYD_DATABASE_URL"):
        files = find_daemon_files(socket)
        if files.history_path is not None:
            return str(files.history_path), f"named by the {files.described}"
        return load_settings().database_url, f"named by the settings, {files.described}"
    return load_settings().database_url, "named by GPUENERGYD_DATABASE_URL"
