"""This host's daemon as a thread of a trainer asks it, beside the reporter: without ever raising."""

import json
import logging
from dataclasses import dataclass
from typing import Any

from gpuenergyd.client.connection import DaemonConnection

logger = logging.getLogger("gpuenergyd.trainers")
_LIMIT_S = 1.0


@dataclass(slots=True)
class OwnDaemon:
    """This host's daemon, asked on a connection of one thread's own."""

    socket_path: str
    _connection: DaemonConnection | None = None

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None where there is none, or no use of it: the reporter says so in the log."""
        if self._connection is None:
            self._connection = DaemonConnection(self.socket_path)
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            status, answer = self._connection.request("POST", path, body, limit_s=_LIMIT_S)
            found = json.loads(answer) if status == 200 else None
        except Exception as error:  # noqa: BLE001  a daemon that is gone, or being replaced
            logger.debug("gpuenergyd: %s: %s", path, error)
            self._connection.close()
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
