"""The form of log lines of all processes: `2026-03-02T12:20:00.123Z gpuenergyd: INFO: serving on ...` on stderr.

Under systemd, lines have no time, because its journal stores the time of each line. The processes of a training log by
their own handlers, which may raise.
"""

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.printable import printable_line

_STDERR_FD = 2


def configure_logging(program: str, level: int = logging.INFO, *filters: logging.Filter) -> None:
    """Write log records of at least this level to stderr, with a program's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(program))
    for each in filters:
        handler.addFilter(each)
    logging.basicConfig(level=level, handlers=[handler])


def write_log_line(program: str, text: str) -> None:
    """Write a line to stderr, for programs without loggers."""
    sys.stderr.write(f"{_line_start(program, time.time())}{text}\n")
    sys.stderr.flush()


def safe_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose calls never raise, for the processes of a training."""
    return _SafeLogger(logging.getLogger(name))


class _SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs each record as one line, and drops it if a handler raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with suppress(Exception):
            if self.isEnabledFor(level):
                super().log(level, "%s", printable_line(str(msg) % args if args else str(msg)), **kwargs)


class _LineFormatter(logging.Formatter):
    """Formats records of one program."""

    def __init__(self, program: str) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._program = program

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name that logging calls it by
        """Indent further lines of a message, so that no text inside it can be taken for a separate log line."""
        return "\n  | ".join(map(printable_line, super().formatMessage(record).split("\n")))

    def format(self, record: logging.LogRecord) -> str:
        return _line_start(self._program, record.created) + super().format(record)


def _line_start(program: str, now_s: float) -> str:
    if _is_journal():
        return f"{program}: "
    at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"{at} {program}: "


def _is_journal() -> bool:
    """Return whether stderr is the stream that systemd connected to its journal, see systemd.exec(5)."""
    stream = os.environ.get("JOURNAL_STREAM")
    if stream is None:
        return False
    try:
        stderr = os.fstat(_STDERR_FD)
    except OSError:
        return False
    return stream == f"{stderr.st_dev}:{stderr.st_ino}"
