"""The schedule of power budgets: a CSV file with the columns start, end, power_budget_w and reason.

Times are ISO 8601 with a zone. The file is read again when it has changed. While its content is invalid, the last valid
content stays in use.
"""

import contextlib
import csv
import io
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd_power.rules.budget import MAX_REASON_CHARS, ScheduledBudget, budget_problem

log = logging.getLogger(__name__)

COLUMNS = ("start", "end", "power_budget_w", "reason")
MAX_BYTES = 2**20
MAX_ENTRIES = 10_000


@dataclass(slots=True)
class ScheduleFile:
    """A schedule that is read again when its file has changed."""

    path: Path | None
    trouble: str | None = None
    """Why the present content of the file is not used; None if it is."""
    _entries: tuple[ScheduledBudget, ...] = ()
    _stamp: tuple[int, int, int] | None = None

    def entries(self) -> tuple[ScheduledBudget, ...]:
        """Return the entries of the file's last valid content; empty without a file."""
        if self.path is None:
            return ()
        try:
            status = self.path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._entries, self._stamp, self.trouble = read_schedule(self.path), stamp, None
        except (OSError, UsageError) as error:
            text = str(error) if isinstance(error, UsageError) else f"{self.path}: {error.strerror}"
            trouble = f"power schedule: {text}; the last valid schedule counts"
            if trouble != self.trouble:
                log.warning("%s", trouble)
            self.trouble = trouble
        return self._entries


def read_schedule(path: Path) -> tuple[ScheduledBudget, ...]:
    """Return the entries of a schedule file.

    Raises:
        UsageError: the file cannot be read or a line is invalid; the message names file and line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES} bytes")
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig", "replace")))
    try:
        header = tuple(name.strip() for name in next(reader, []))
        if header not in {COLUMNS, COLUMNS[:3]}:
            raise UsageError(f"{path}: columns {','.join(header)!r:.80}; valid: {','.join(COLUMNS)}")
        entries = tuple(_entry(path, line, row) for line, row in enumerate(reader, start=2) if row)
    except csv.Error as error:
        raise UsageError(f"{path}: {error}") from None
    if len(entries) > MAX_ENTRIES:
        raise UsageError(f"{path}: {len(entries)} entries; at most {MAX_ENTRIES} are read")
    return entries


def _entry(path: Path, line: int, row: list[str]) -> ScheduledBudget:
    where = f"{path}: line {line}"
    if len(row) not in {len(COLUMNS) - 1, len(COLUMNS)}:
        raise UsageError(f"{where}: {count_text(len(row), 'value')}; expected {', '.join(COLUMNS)}")
    start_at, end_at = (_instant(where, text) for text in row[:2])
    if end_at <= start_at:
        raise UsageError(f"{where}: the end {row[1].strip()} must be after the start {row[0].strip()}")
    try:
        budget_w = float(row[2])
    except ValueError:
        raise UsageError(f"{where}: power_budget_w {row[2].strip()!r:.40} must be a number of watts") from None
    if (problem := budget_problem(budget_w)) is not None:
        raise UsageError(f"{where}: power_budget_w = {problem}")
    reason = row[3].strip() if len(row) == len(COLUMNS) else ""
    return ScheduledBudget(start_at, end_at, budget_w, checked_reason(reason, where))


def checked_reason(reason: str, where: str) -> str:
    """Return a reason, or raise UsageError if it is too long or not printable."""
    if len(reason) > MAX_REASON_CHARS or not reason.isprintable():
        raise UsageError(f"{where}: the reason must be one printable line of at most {MAX_REASON_CHARS} characters")
    return reason


def _instant(where: str, text: str) -> datetime:
    with contextlib.suppress(ValueError, OverflowError):
        at = datetime.fromisoformat(text.strip())
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    raise UsageError(f"{where}: {text.strip()!r:.40} must be a time with its zone, e.g. 2026-11-23T18:00:00Z")
