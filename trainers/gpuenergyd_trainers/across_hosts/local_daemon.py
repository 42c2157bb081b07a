"""Requests of a store thread to this host's daemon: they return None instead of raising."""

import json
import logging
from dataclasses import dataclass
from typing import Any

from gpuenergyd.client.connection import HttpConnection

logger = logging.getLogger("gpuenergyd.trainers")
_LIMIT_S = 1.0


@dataclass(slots=True)
class LocalDaemon:
    """This host's daemon, on a connection that belongs to one thread."""

    socket_path: str
    _connection: HttpConnection | None = None

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply as a JSON object; None after any failure, which the reporter logs for this rank."""
        if self._connection is None:
            self._connection = HttpConnection(self.socket_path)
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            status, answer = self._connection.request("POST", path, body, limit_s=_LIMIT_S)
            found = json.loads(answer) if status == 200 else None
        except Exception as error:  # noqa: BLE001  a daemon that is gone, or is being replaced
            logger.debug("gpuenergyd: POST %s failed: %s", path, error)
            self._connection.close()
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
