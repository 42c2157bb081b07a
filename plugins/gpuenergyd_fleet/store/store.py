"""The fleet's power data in the history database: budget, hosts, leases, grid events and samples.

A coordinator's cycle is one transaction that locks the row of the fleet, so that any number of coordinators may run:
they decide one after another, each from the stored data. With a PostgreSQL server, all hosts use the server's clock.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, func, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.errors import StoreError, UsageError
from gpuenergyd.store.plugin_tables import open_plugin_tables
from gpuenergyd.store.reader import short_message
from gpuenergyd_fleet.decisions.coordination import FleetDecision, FleetHost, FleetView
from gpuenergyd_fleet.decisions.event_report import AFTER_S, BEFORE_S, FleetSample
from gpuenergyd_fleet.decisions.grid_event import MAX_OPEN_EVENTS, GridEvent, replaces
from gpuenergyd_fleet.decisions.leases import Lease
from gpuenergyd_fleet.store.rows import event_of, host_of, known_sum, lease_of, microseconds
from gpuenergyd_fleet.store.tables import fleet, fleet_hosts, fleet_leases, fleet_samples, grid_events, metadata

SAMPLES_KEPT_S = 7 * 86_400.0
_LEAST_SAMPLES = 5
_BUSY_TIMEOUT_S = 5.0
_FLEET_ID = 1
_THE_FLEET = fleet.c.fleet_id == _FLEET_ID


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host reports to the coordinator."""

    share_w: float
    measured_w: float | None
    speed: float | None
    curve: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FleetState:
    """All stored data at one instant."""

    now_s: float
    budget_w: float | None
    reason: str
    hosts: tuple[FleetHost, ...]
    events: tuple[GridEvent, ...]


@dataclass(slots=True)
class FleetStore:
    """The tables of a fleet. Each method is one short transaction, and raises StoreError if the database fails.

    Args:
        path_or_url: an SQLite file, for a fleet of one, or a database URL.
        clock: seconds since 1970; None: the server's clock, or the host's for a file.
    """

    path_or_url: str | Path
    clock: Callable[[], float] | None = None
    _engine: Engine | None = field(default=None, init=False)

    def close(self) -> None:
        """Close the database; the next call opens it again."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    # --- operators ---

    def set_budget(self, budget_w: float, reason: str) -> None:
        with self._transaction() as connection:
            values = {"budget_w": budget_w, "reason": reason}
            if connection.execute(update(fleet).where(_THE_FLEET).values(values)).rowcount == 0:
                connection.execute(insert(fleet).values(fleet_id=_FLEET_ID, cycle_us=0, **values))

    def state(self) -> FleetState:
        with self._transaction() as connection:
            return self._state(connection, self._now_s(connection))

    def remove_host(self, host: str) -> bool:
        """Forget a host that left the fleet, so that its power is free for others; return whether it was known."""
        with self._transaction() as connection:
            connection.execute(delete(fleet_leases).where(fleet_leases.c.host == host))
            return connection.execute(delete(fleet_hosts).where(fleet_hosts.c.host == host)).rowcount > 0

    # --- hosts ---

    def report(self, host: str, report: HostReport) -> tuple[Lease | None, float]:
        with self._transaction() as connection:
            now_s = self._now_s(connection)
            values = {
                "share_w": report.share_w,
                "reported_us": microseconds(now_s),
                "measured_w": report.measured_w,
                "speed": report.speed,
                "curve": json.dumps(report.curve),
            }
            known = update(fleet_hosts).where(fleet_hosts.c.host == host).values(values)
            if connection.execute(known).rowcount == 0:
                connection.execute(insert(fleet_hosts).values(host=host, confirmed=0, **values))
            newest = (
                select(fleet_leases).where(fleet_leases.c.host == host).order_by(fleet_leases.c.number.desc()).limit(1)
            )
            row = connection.execute(newest).one_or_none()
            lease = None if row is None else lease_of(row)
            return lease, 0.0 if lease is None else lease.end_s - now_s

    def confirm(self, host: str, number: int) -> None:
        """Store that a host follows a lease."""
        with self._transaction() as connection:
            connection.execute(update(fleet_hosts).where(fleet_hosts.c.host == host).values(confirmed=number))

    # --- the coordinator ---

    def cycle(
        self, decide: Callable[[FleetView, float], FleetDecision], *, least_period_s: float
    ) -> FleetDecision | None:
        """Decide on leases and store them; return None without a budget, or if another coordinator has just decided."""
        with self._transaction() as connection:
            row = connection.execute(select(fleet).where(_THE_FLEET).with_for_update()).one_or_none()
            now_s = self._now_s(connection)
            if row is None or 0 <= now_s - row.cycle_us / 1e6 < least_period_s:
                return None
            connection.execute(update(fleet).where(_THE_FLEET).values(cycle_us=microseconds(now_s)))
            state = self._state(connection, now_s)
            events = tuple(self._with_baseline(connection, event, state) for event in state.events)
            view = FleetView(row.budget_w, state.hosts, events)
            decision = decide(view, now_s)
            self._store_leases(connection, state, decision.leases)
            self._store_sample(connection, state, decision, now_s)
            return decision

    # --- events ---

    def put_event(self, event: GridEvent) -> bool:
        """Store an event; return whether the stored events have changed.

        Raises:
            UsageError: too many events are open.
        """
        with self._transaction() as connection:
            known = grid_events.c.grid_event_id == event.event_id
            before = _event(connection, event.event_id)
            if not replaces(event, before):
                return False
            values = {
                "start_us": microseconds(event.start_s),
                "end_us": microseconds(event.end_s),
                "value": event.value,
                "unit": str(event.unit),
                "reason": event.reason,
                "cancelled": int(event.is_cancelled),
                "issued_us": microseconds(event.issued_s),
                "source": event.source,
            }
            if before is not None:
                connection.execute(update(grid_events).where(known).values(values))
                return True
            open_events = grid_events.c.end_us > microseconds(self._now_s(connection))
            num_open = connection.execute(select(func.count()).select_from(grid_events).where(open_events)).scalar()
            if (num_open or 0) >= MAX_OPEN_EVENTS:
                raise UsageError(f"{num_open} events are open; at most {MAX_OPEN_EVENTS} are kept")
            connection.execute(insert(grid_events).values(grid_event_id=event.event_id, **values))
            return True

    def event(self, event_id: str) -> GridEvent | None:
        with self._transaction() as connection:
            return _event(connection, event_id)

    def events(self) -> tuple[GridEvent, ...]:
        """Return all events, newest first."""
        with self._transaction() as connection:
            rows = connection.execute(
                select(grid_events).order_by(grid_events.c.start_us.desc()).limit(10 * MAX_OPEN_EVENTS)
            )
            return tuple(event_of(row) for row in rows)

    def samples(self, event: GridEvent) -> tuple[FleetSample, ...]:
        """Return the samples from shortly before until shortly after an event."""
        at_us = fleet_samples.c.at_us
        with self._transaction() as connection:
            rows = connection.execute(
                select(fleet_samples)
                .where(at_us >= microseconds(event.start_s - BEFORE_S), at_us < microseconds(event.end_s + AFTER_S))
                .order_by(at_us)
            )
            return tuple(
                FleetSample(row.at_us / 1e6, row.limit_w, row.measured_w, row.speed, row.num_hosts, row.num_silent)
                for row in rows
            )

    # --- inside ---

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            if self._engine is None:
                self._engine = open_plugin_tables(self.path_or_url, metadata, busy_timeout_s=_BUSY_TIMEOUT_S)
            with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"the fleet's database: {short_message(error)}") from None

    def _now_s(self, connection: Connection) -> float:
        if self.clock is not None:
            return self.clock()
        if connection.dialect.name == "postgresql":
            now = connection.execute(text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS FLOAT)")).scalar()
            return float(now or 0.0)
        return time.time()

    def _state(self, connection: Connection, now_s: float) -> FleetState:
        row = connection.execute(select(fleet).where(_THE_FLEET)).one_or_none()
        leases: dict[str, list[Lease]] = {}
        for lease in connection.execute(select(fleet_leases).order_by(fleet_leases.c.number)):
            leases.setdefault(lease.host, []).append(lease_of(lease))
        hosts = tuple(
            host_of(row, tuple(leases.get(row.host, ())))
            for row in connection.execute(select(fleet_hosts).order_by(fleet_hosts.c.host))
        )
        recent = grid_events.c.end_us > microseconds(now_s - AFTER_S)
        rows = connection.execute(
            select(grid_events).where(recent).order_by(grid_events.c.start_us).limit(2 * MAX_OPEN_EVENTS)
        )
        budget_w, reason = (None, "") if row is None else (row.budget_w, row.reason)
        return FleetState(now_s, budget_w, reason, hosts, tuple(event_of(row) for row in rows))

    def _with_baseline(self, connection: Connection, event: GridEvent, state: FleetState) -> GridEvent:
        """Return an event with the load before it, which is measured outside other events and stored at its start."""
        if event.baseline_w is not None or event.is_cancelled:
            return event
        until_s = min(state.now_s, event.start_s)
        at_us = fleet_samples.c.at_us
        mean_w, num = connection.execute(
            select(func.avg(fleet_samples.c.measured_w), func.count(fleet_samples.c.measured_w)).where(
                at_us >= microseconds(until_s - BEFORE_S),
                at_us < microseconds(until_s),
                fleet_samples.c.limit_w >= (state.budget_w or 0.0) * (1 - 1e-9),
            )
        ).one()
        if num < _LEAST_SAMPLES:
            # Right after another event, use the load from before that one.
            earlier = [e for e in state.events if e.baseline_w is not None and e.start_s < event.start_s]
            mean_w = earlier[-1].baseline_w if earlier else None
        if mean_w is None:
            return event
        if event.start_s <= state.now_s:
            known = grid_events.c.grid_event_id == event.event_id
            connection.execute(update(grid_events).where(known).values(baseline_w=float(mean_w)))
        return replace(event, baseline_w=float(mean_w))

    def _store_leases(self, connection: Connection, state: FleetState, leases: Mapping[str, Lease]) -> None:
        for known in state.hosts:
            if known.held.leases and known.held.leases[0].number < known.held.confirmed:
                superseded = (fleet_leases.c.host == known.host) & (fleet_leases.c.number < known.held.confirmed)
                connection.execute(delete(fleet_leases).where(superseded))
        for host, lease in leases.items():
            fallback = [[part.start_s, part.end_s, part.power_w] for part in lease.fallback]
            connection.execute(
                insert(fleet_leases).values(
                    host=host,
                    number=lease.number,
                    power_w=lease.power_w,
                    end_us=microseconds(lease.end_s),
                    fallback=json.dumps(fallback),
                )
            )

    def _store_sample(self, connection: Connection, state: FleetState, decision: FleetDecision, now_s: float) -> None:
        connected = [host for host in state.hosts if host.host not in decision.silent]
        is_whole = bool(connected) and not decision.silent
        connection.execute(
            insert(fleet_samples).values(
                at_us=microseconds(now_s),
                limit_w=decision.limit_w,
                measured_w=known_sum([host.measured_w for host in connected]) if is_whole else None,
                speed=known_sum([host.speed for host in connected]) if is_whole else None,
                num_hosts=len(state.hosts),
                num_silent=len(decision.silent),
            )
        )
        if int(now_s) % 60 == 0:
            expired = fleet_samples.c.at_us < microseconds(now_s - SAMPLES_KEPT_S)
            connection.execute(delete(fleet_samples).where(expired))


def _event(connection: Connection, event_id: str) -> GridEvent | None:
    row = connection.execute(select(grid_events).where(grid_events.c.grid_event_id == event_id)).one_or_none()
    return None if row is None else event_of(row)
