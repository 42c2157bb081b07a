"""Requests from a store thread to the daemon of this host; on failure they return None and do not raise."""

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gpuenergyd.client.connection import HttpConnection, refusal_reason
from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.trainers")
_LIMIT_S = 1.0
_MAX_REASONS = 32


@dataclass(slots=True)
class LocalDaemon:
    """This host's daemon, on a connection that belongs to one thread."""

    socket_path: str
    _connection: HttpConnection | None = None
    _refusals: set[str] = field(default_factory=set)
    """Reasons that were logged already."""

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply as a JSON object; None after any failure.

        A refused message is logged once per reason; if the daemon does not answer, the reporter logs that.
        """
        if self._connection is None:
            self._connection = HttpConnection(self.socket_path)
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            status, answer = self._connection.request("POST", path, body, limit_s=_LIMIT_S)
            found = json.loads(answer) if status == HTTPStatus.OK else None
            if status not in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}:  # an unknown token is registered again
                self._log_refusal(path, refusal_reason(answer))
        except Exception as error:  # noqa: BLE001  a daemon that is gone, or is being replaced
            logger.debug("gpuenergyd: POST %s failed: %s", path, error)
            self._connection.close()
            return None
        return found if isinstance(found, dict) else None

    def _log_refusal(self, path: str, reason: str) -> None:
        if reason not in self._refusals and len(self._refusals) < _MAX_REASONS:
            self._refusals.add(reason)
            logger.warning("gpuenergyd: the daemon refused POST %s, the pipeline runs at full speed: %s", path, reason)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
