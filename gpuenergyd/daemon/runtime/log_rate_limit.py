"""A log that nobody can flood: of each kind of complaint so many lines a minute, then how many more there were."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_LINES_PER_PERIOD = 20
_PERIOD_S = 60.0
_MAX_KINDS = 1024


@dataclass(slots=True)
class _Kind:
    """What was said of one kind since the period began."""

    began_s: float
    num_lines: int = 0
    num_left_out: int = 0


class LogRateLimit(logging.Filter):
    """Lets the first lines of each kind through; a kind is the place in the code that complains, and of what.

    Lines about a change of state (INFO) are as rare as the changes and always pass.
    """

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic_s = monotonic_s
        self._kinds: dict[tuple[str, int, object], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written; the first one of a new period says what was left out of the last."""
        if record.levelno < logging.WARNING and record.name.startswith("gpuenergyd"):
            return True
        now_s = self._monotonic_s()
        if len(self._kinds) > _MAX_KINDS:
            self._kinds = {}
        place = (record.pathname, record.lineno, record.exc_info[0] if record.exc_info else None)
        kind = self._kinds.setdefault(place, _Kind(now_s))
        if now_s - kind.began_s >= _PERIOD_S:
            if kind.num_left_out:
                record.msg = f"{record.getMessage()} (and {kind.num_left_out} more like it before)"
                record.args = ()
            kind.began_s, kind.num_lines, kind.num_left_out = now_s, 0, 0
        kind.num_lines += 1
        if kind.num_lines > 1:
            record.exc_info = None  # one traceback tells as much as twenty
        if kind.num_lines > _LINES_PER_PERIOD:
            kind.num_left_out += 1
            return False
        return True
