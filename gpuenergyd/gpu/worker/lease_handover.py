"""Leases kept while the core is restarted: for a few seconds, for the one core that shows the token left for it."""

import hmac
from dataclasses import dataclass
from enum import Enum, auto

MAX_KEEP_S = 60.0
"""Whatever a core asks: nobody watches over a job meanwhile."""
_MIN_TOKEN_CHARS = 32


class Claim(Enum):
    """What became of the leases when a core said hello."""

    NOTHING_KEPT = auto()
    TAKEN_OVER = auto()
    WRONG_TOKEN = auto()


@dataclass(slots=True)
class Keeping:
    """A promise by the core that goes, kept from the end of its connection on."""

    _token: str = ""
    _keep_s: float = 0.0
    _until_mono_s: float | None = None

    def promise(self, token: str, keep_s: float) -> None:
        """Be ready to keep the leases when the connection ends.

        Raises:
            ValueError: a token that could be guessed, or a time that makes no sense.
        """
        if len(token) < _MIN_TOKEN_CHARS or not 0.0 < keep_s <= MAX_KEEP_S:
            raise ValueError(f"a token of {_MIN_TOKEN_CHARS} characters and up to {MAX_KEEP_S:g} s are expected")
        self._token, self._keep_s = token, keep_s

    def begin(self, now_mono_s: float) -> bool:
        """Note that the connection has ended; return whether the leases are kept."""
        if not self._token:
            return False
        self._until_mono_s = now_mono_s + self._keep_s
        return True

    def has_run_out(self, now_mono_s: float) -> bool:
        """Return, once, whether nobody came for the leases in time."""
        if self._until_mono_s is None or now_mono_s < self._until_mono_s:
            return False
        self._end()
        return True

    def claim(self, token: str) -> Claim:
        """Let a core have what is kept; whatever it shows, nothing is kept any longer."""
        if self._until_mono_s is None:
            return Claim.NOTHING_KEPT
        is_right = hmac.compare_digest(token.encode(), self._token.encode())
        self._end()
        return Claim.TAKEN_OVER if is_right else Claim.WRONG_TOKEN

    def _end(self) -> None:
        self._token, self._until_mono_s = "", None
