"""The bounded queue between the daemon and the writer thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuenergyd.store.records import (
    EstimateRecord,
    HostRollupRecord,
    IterationRecord,
    Record,
    RollupRecord,
    SampleRecord,
)

_MAX_BATCH = 20_000
_IMPORTANT_WITHIN_S = 0.1
"""Jobs, plans and control events are written within this time; readings and iterations wait for a batch."""
_STUCK_AFTER_S = 60.0
_MAY_WAIT = (RollupRecord, SampleRecord, IterationRecord, EstimateRecord, HostRollupRecord)


class RecordQueue:
    """Passes records to the writer thread in batches; counts written and dropped rows.

    When half full, it drops rollups, samples and timelines; when full, all records. Thread-safe.
    """

    def __init__(self, *, max_waiting: int, batch_s: float) -> None:
        self._max_waiting = max_waiting
        self._batch_s = batch_s
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque()
        self._num_in_batch = 0
        self._has_unwritten_series = False
        self._batch_began_mono_s = 0.0
        self._due_mono_s = 0.0
        self._num_written = 0
        self._num_dropped = 0
        self._is_closing = False
        self._is_flushing = False
        self._is_refused = False

    # --- any thread ---

    def push(self, record: Record, *, is_short_of_space: bool) -> None:
        """Add a record or drop it; never blocks."""
        with self._changed:
            num_waiting = len(self._waiting)
            if self._is_refused or self._is_closing or num_waiting >= self._max_waiting:
                self._num_dropped += 1
                return
            if num_waiting >= self._max_waiting // 2 or is_short_of_space:
                if isinstance(record, RollupRecord | SampleRecord):
                    self._num_dropped += 1
                    return
                if isinstance(record, IterationRecord) and record.spans:
                    record = replace(record, spans=())
                    self._num_dropped += 1
            self._waiting.append(record)
            may_wait = isinstance(record, _MAY_WAIT)
            due_mono_s = time.monotonic() + (self._batch_s if may_wait else min(self._batch_s, _IMPORTANT_WITHIN_S))
            if num_waiting == 0 or due_mono_s < self._due_mono_s:
                self._due_mono_s = due_mono_s
                self._changed.notify_all()

    def flush(self, timeout_s: float, *, is_writing: Callable[[], bool]) -> bool:
        """Have all records written now; return whether they were written within the time limit."""
        until_mono_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_drained() or not is_writing(), timeout=max(0.0, until_mono_s - time.monotonic())
            )
            self._is_flushing = False
            return self._is_drained()

    def close(self) -> None:
        """Accept no more records and let the writer thread finish."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of rows written, rows dropped and records waiting."""
        with self._changed:
            return self._num_written, self._num_dropped, len(self._waiting) + self._num_in_batch

    def is_finished(self) -> bool:
        """Return whether the queue accepts no more records."""
        with self._changed:
            return self._is_refused or self._is_closing

    def is_stuck(self) -> bool:
        """Return whether the writer thread has worked on one batch for too long."""
        with self._changed:
            return self._num_in_batch > 0 and time.monotonic() - self._batch_began_mono_s > _STUCK_AFTER_S

    # --- the writer thread ---

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to write or the queue closes; return False after the time limit."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._waiting) or self._is_closing or (self._is_flushing and self._has_unwritten_series),
                timeout_s,
            )

    def next_batch(self) -> list[Record]:
        """Wait until it is time for a batch, and return it."""
        with self._changed:
            while not (self._is_closing or self._is_flushing or len(self._waiting) >= _MAX_BATCH):
                left_s = self._due_mono_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
            self._num_in_batch = len(batch)
            self._batch_began_mono_s = time.monotonic()
            return batch

    def complete_batch(self, *, num_rows: int, num_dropped: int, has_unwritten_series: bool) -> None:
        """Count the current batch as written."""
        with self._changed:
            self._num_written += num_rows
            self._num_dropped += num_dropped
            self._num_in_batch = 0
            self._has_unwritten_series = has_unwritten_series
            self._changed.notify_all()

    def requeue(self, batch: Sequence[Record]) -> None:
        """Return a batch that could not be written to the front of the queue."""
        with self._changed:
            self._waiting.extendleft(reversed(batch))
            self._num_in_batch = 0

    def refuse(self) -> None:
        """Accept no more records, because the database must not or cannot be written."""
        with self._changed:
            self._is_refused = True

    def pause(self, timeout_s: float) -> bool:
        """Wait before the next attempt; return whether to give up, in which case all waiting records are dropped."""
        with self._changed:
            gives_up = self._is_closing
            if not gives_up:
                self._changed.wait_for(lambda: self._is_closing, timeout=timeout_s)
            if gives_up or self._is_refused:
                self._drop_all()
                return True
            return False

    def fail(self) -> None:
        """Drop all records and accept no more, because the writer thread ends with an error."""
        with self._changed:
            self._is_refused = True
            self._num_dropped += self._num_in_batch
            self._num_in_batch = 0
            self._drop_all()

    def is_flushing_or_closing(self) -> bool:
        """Return whether incomplete minutes must be written too."""
        with self._changed:
            return self._is_flushing or self._is_closing

    def is_busy(self) -> bool:
        """Return whether records are waiting or the queue is closing."""
        with self._changed:
            return bool(self._waiting) or self._is_closing

    def _is_drained(self) -> bool:
        return not self._waiting and not self._num_in_batch and not self._has_unwritten_series

    def _drop_all(self) -> None:
        self._num_dropped += len(self._waiting)
        self._waiting.clear()
        self._changed.notify_all()
