"""Connection limits per user."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ConnectionCounts:
    """Open connections per uid, and their limit."""

    max_per_user: int
    _open: Counter[int] = field(default_factory=Counter)

    def add(self, uid: int) -> bool:
        """Count a new connection unless it exceeds the limit; return whether it was counted."""
        if self._open[uid] >= self.max_per_user:
            return False
        self._open[uid] += 1
        return True

    def num_open(self, uid: int) -> int:
        """Return the number of open connections of a user."""
        return self._open.get(uid, 0)

    def remove(self, uid: int) -> None:
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]
