"""Polls an OpenADR server and maintains the file of events that the coordinator reads.

Events apply until they end or the server no longer lists them. While the server cannot be reached, the events in the
file still apply, so that an announced event is followed.
"""

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd_fleet.decisions.grid_event import MAX_OPEN_EVENTS, GridEvent
from gpuenergyd_fleet.event_input import write_events
from gpuenergyd_fleet.openadr.load_targets import SiteTerms, event_id_of, load_targets

log = logging.getLogger("gpuenergyd.openadr")

_MAX_LINE_CHARS = 300
_FIRST_DELAY_S, _MAX_DELAY_S = 5.0, 300.0
_MAX_ADDRESS_SPACE_BYTES = 2 * 2**30
_MAX_ANSWERS = 1_000


class Session(Protocol):
    """A session with a server."""

    @property
    def period_s(self) -> float: ...

    async def exchange(self) -> Any:
        """Return all events that the server lists now."""
        ...

    async def answer(self, event: Any, *, opts_in: bool) -> None: ...


@dataclass(slots=True)
class Receiver:
    """Writes the server's events to the file, and answers each version of an event once."""

    session: Session
    path: Path
    terms: SiteTerms
    clock: Callable[[], float] = time.time
    _answered: dict[tuple[str, str], bool] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _written: tuple[GridEvent, ...] | None = None

    async def step(self) -> None:
        """Exchange messages once, and write the file if the valid events have changed.

        Raises:
            GpuEnergyError: the server cannot be reached or the file cannot be written; the file stays as it is.
        """
        listed, found = await self.session.exchange(), list[GridEvent]()
        answers = []
        for event in listed[: 2 * MAX_OPEN_EVENTS]:
            targets = self._accepted(event, found)
            found += targets or ()
            answers.append((event, targets is not None))
        self._write(tuple(found))
        for event, opts_in in answers:
            await self._answer(event, opts_in=opts_in)

    def _accepted(self, event: Any, others: Sequence[GridEvent]) -> tuple[GridEvent, ...] | None:
        """Return an event's load targets if they fit with the others; if it is refused, log why and return None."""
        name = event_id_of(event)
        try:
            targets = load_targets(event, self.terms, self.clock())
            _check_room(targets, others)
        except UsageError as error:
            self._log_refusal(name, str(error))
            return None
        self._refused.pop(name, None)
        return targets

    def _write(self, found: tuple[GridEvent, ...]) -> None:
        if found == self._written:
            return
        try:
            write_events(self.path, found)
        except OSError as error:
            raise GpuEnergyError(f"{self.path}: {error.strerror}") from None
        for event in set(found) - set(self._written or ()):
            log.info("event %s: at most %g %s until %.0f", event.event_id, event.value, event.unit, event.end_s)
        for name in {event.event_id for event in self._written or ()} - {event.event_id for event in found}:
            log.info("event %s: over or withdrawn", name)
        self._written = found

    async def _answer(self, event: Any, *, opts_in: bool) -> None:
        try:
            descriptor = event["event_descriptor"]
            version = str(descriptor["event_id"]), f"{descriptor['modification_number']} {descriptor['event_status']}"
        except (KeyError, TypeError):
            return
        if self._answered.get(version) is not opts_in:
            await self.session.answer(event, opts_in=opts_in)
            if len(self._answered) >= _MAX_ANSWERS:
                self._answered.clear()
            self._answered[version] = opts_in

    def _log_refusal(self, name: str, why: str) -> None:
        if self._refused.get(name) != why:
            log.warning("event %s refused: %s", name, why)
            if len(self._refused) >= _MAX_ANSWERS:
                self._refused.clear()
            self._refused[name] = why


def _check_room(targets: Sequence[GridEvent], others: Sequence[GridEvent]) -> None:
    """Raise UsageError if the file cannot hold the load targets in addition to the others."""
    if len(others) + len(targets) > MAX_OPEN_EVENTS:
        raise UsageError(f"more than {MAX_OPEN_EVENTS} events and intervals")
    if {event.event_id for event in others} & {event.event_id for event in targets}:
        raise UsageError("its id is there twice")


async def follow(receiver: Receiver) -> None:
    """Exchange messages periodically, with growing delays after failures."""
    trouble: str | None = None
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            await receiver.step()
            found = None
        except GpuEnergyError as error:
            found = str(error)
        if found != trouble:
            log.warning("%s", f"{found}; events in the file still count" if found else "trouble is over")
        trouble = found
        delay_s = min(2 * delay_s, _MAX_DELAY_S) if found else _FIRST_DELAY_S
        await asyncio.sleep(delay_s if found else receiver.session.period_s)


def confine() -> None:
    """Limit memory, so that no reply can exhaust the host's, and make the library log single printable lines."""
    with contextlib.suppress(OSError, ValueError):  # the unit's own limit is lower, and its filter may forbid the call
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE_BYTES, _MAX_ADDRESS_SPACE_BYTES))
    library = logging.getLogger("openleadr")
    library.setLevel(logging.WARNING)
    library.addFilter(OneLine())


class OneLine(logging.Filter):
    """Makes each record one printable line, because libraries log what a server sent, and drops repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        text = "".join(c if c.isprintable() else " " for c in record.getMessage()[:_MAX_LINE_CHARS])
        is_new, self._last = text != self._last, text
        record.msg, record.args, record.exc_info = text, (), None
        return is_new
