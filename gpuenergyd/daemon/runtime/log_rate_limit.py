"""A logging filter that limits each kind of warning to 20 lines per minute and counts the suppressed ones."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuenergyd.count_text import count_text

_LINES_PER_PERIOD = 20
_PERIOD_S = 60.0
_MAX_KINDS = 1024


@dataclass(slots=True)
class _Kind:
    """Lines of one kind since the current period began."""

    began_s: float
    num_lines: int = 0
    num_suppressed: int = 0


class LogRateLimit(logging.Filter):
    """Passes the first lines of each kind per period, where a kind is a place in the code and an exception type.

    The daemon's INFO lines, one per change of state, always pass.
    """

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic_s = monotonic_s
        self._kinds: dict[tuple[str, int, object], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line; the first line of a new period reports how many were suppressed before."""
        if record.levelno < logging.WARNING and record.name.startswith("gpuenergyd"):
            return True
        now_s = self._monotonic_s()
        if len(self._kinds) > _MAX_KINDS:
            self._kinds = {}
        key = (record.pathname, record.lineno, record.exc_info[0] if record.exc_info else None)
        kind = self._kinds.setdefault(key, _Kind(now_s))
        if now_s - kind.began_s >= _PERIOD_S:
            if kind.num_suppressed:
                record.msg = (
                    f"{record.getMessage()} ({count_text(kind.num_suppressed, 'similar message')} were suppressed)"
                )
                record.args = ()
            kind.began_s, kind.num_lines, kind.num_suppressed = now_s, 0, 0
        kind.num_lines += 1
        if kind.num_lines > 1:
            record.exc_info = None  # the first traceback is enough
        if kind.num_lines > _LINES_PER_PERIOD:
            kind.num_suppressed += 1
            return False
        return True
