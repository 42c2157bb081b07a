"""Lease handover: keeps leases for seconds while the daemon restarts, for the daemon that has the handover's token."""

import hmac
from dataclasses import dataclass
from enum import Enum, auto

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProtocolError

MAX_KEEP_S = 60.0
"""Upper bound for every handover: nothing watches over the jobs meanwhile."""
_MIN_TOKEN_CHARS = 32


class HandoverResult(Enum):
    """The fate of kept leases when a daemon connects."""

    NOTHING_KEPT = auto()
    TAKEN_OVER = auto()
    WRONG_TOKEN = auto()


@dataclass(slots=True)
class LeaseHandover:
    """A handover offered by the connected daemon; it begins when the connection ends."""

    _token: str = ""
    _keep_s: float = 0.0
    _until_mono_s: float | None = None

    def offer(self, token: str, keep_s: float) -> None:
        """Prepare to keep the leases when the connection ends.

        Raises:
            ProtocolError: a token that could be guessed, or a time out of range.
        """
        if len(token) < _MIN_TOKEN_CHARS or not 0.0 < keep_s <= MAX_KEEP_S:
            raise ProtocolError(
                f"handover of {keep_s:g} s with a token of {count_text(len(token), 'character')}: expected"
                f" up to {MAX_KEEP_S:g} s and at least {_MIN_TOKEN_CHARS} characters"
            )
        self._token, self._keep_s = token, keep_s

    def begin(self, now_mono_s: float) -> bool:
        """Start keeping the leases, if a handover was offered; return whether it was."""
        if not self._token:
            return False
        self._until_mono_s = now_mono_s + self._keep_s
        return True

    def has_expired(self, now_mono_s: float) -> bool:
        """Return, once, whether no daemon claimed the leases in time."""
        if self._until_mono_s is None or now_mono_s < self._until_mono_s:
            return False
        self._end()
        return True

    def claim(self, token: str) -> HandoverResult:
        """Decide whether a connecting daemon gets the kept leases; in any case the handover is over."""
        if self._until_mono_s is None:
            return HandoverResult.NOTHING_KEPT
        is_right = hmac.compare_digest(token.encode(), self._token.encode())
        self._end()
        return HandoverResult.TAKEN_OVER if is_right else HandoverResult.WRONG_TOKEN

    def _end(self) -> None:
        self._token, self._until_mono_s = "", None
