"""`gpuenergyd fleet`: a power budget shared by many hosts, and grid events that apply to all of them."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json, print_lines
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.log_lines import configure_logging
from gpuenergyd.report.csv_table import csv_text
from gpuenergyd_fleet.decisions.coordination import decide
from gpuenergyd_fleet.decisions.event_report import event_report
from gpuenergyd_fleet.decisions.grid_event import MAX_LOAD_W, MAX_REASON_CHARS
from gpuenergyd_fleet.event_input import EventFile
from gpuenergyd_fleet.openadr.command import openadr
from gpuenergyd_fleet.openadr.load_targets import OPENADR_SOURCE
from gpuenergyd_fleet.printing import EVENT_ROW, event_row, fleet_lines, fleet_object, report_lines, report_row

if TYPE_CHECKING:
    from gpuenergyd_fleet.store.store import FleetStore

log = logging.getLogger("gpuenergyd.fleet")

FleetDatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="PATH|URL", help="History that all hosts share [default: the daemon's]."),
]
EveryOption = Annotated[
    float, typer.Option("--every-s", min=0.2, max=5.0, metavar="S", help="Time between two exchanges in seconds.")
]

fleet = command_group(
    name="fleet",
    cls=DocumentedGroup,
    help="Share a power budget between hosts.",
    epilog="gpuenergyd fleet set 100000\ngpuenergyd fleet coordinate --events events.csv\ngpuenergyd fleet show",
)


def set_budget(
    *,
    watts: Annotated[float, typer.Argument(metavar="WATTS", help="For all hosts of the fleet together.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the status.")] = "",
    database: FleetDatabaseOption = None,
) -> int:
    """Set the power budget of all hosts together.

    Hosts take part with `gpuenergyd fleet follow`; the sum of their shares, power_budget_w in their settings, must be
    within the budget.

    Examples:
        gpuenergyd fleet set 100000
    """
    if not 0 < watts <= MAX_LOAD_W:
        raise UsageError(f"WATTS {watts:g}: valid are values above 0 up to {MAX_LOAD_W:g}")
    if len(reason) > MAX_REASON_CHARS or not reason.isprintable():
        raise UsageError(f"--reason must be one printable line of at most {MAX_REASON_CHARS} characters")
    with _store(database) as store:
        store.set_budget(watts, reason)
    return 0


def show(*, database: FleetDatabaseOption = None, as_json: JsonOption = False) -> int:
    """Show the fleet's budget and what each host may draw.

    For each host, prints the power that it measures, its share, and its lease.

    Examples:
        gpuenergyd fleet show
    """
    with _store(database) as store:
        state = store.state()
    if as_json:
        print_json(fleet_object(state))
        return 0
    print_lines(fleet_lines(state))
    return 0


def remove(
    *,
    host: Annotated[str, typer.Argument(metavar="HOST", help="As `gpuenergyd fleet show` lists it.")],
    database: FleetDatabaseOption = None,
) -> int:
    """Free the watts of a host that left.

    A host out of contact keeps its share until it is removed, because it may still draw that power.

    Examples:
        gpuenergyd fleet remove gpu-17
    """
    with _store(database) as store:
        if not store.remove_host(host):
            raise UsageError(f"no host {host!r} in the fleet; `gpuenergyd fleet show` lists them")
    return 0


def coordinate(
    *,
    events: Annotated[
        Path | None, typer.Option("--events", metavar="FILE", help="CSV file with grid events, read when it changes.")
    ] = None,
    openadr_events: Annotated[
        Path | None,
        typer.Option("--openadr-events", metavar="FILE", help="File that `gpuenergyd fleet openadr` writes."),
    ] = None,
    every_s: EveryOption = 1.0,
    database: FleetDatabaseOption = None,
) -> int:
    """Hand out the fleet's watts.

    Runs until Ctrl-C and needs no privileges on any host. Several coordinators may run; they decide one after another.
    When all have stopped, every host falls back to its share, and announced events still apply.

    Examples:
        gpuenergyd fleet coordinate
        gpuenergyd fleet coordinate --events /etc/gpuenergyd/events.csv
    """
    configure_logging("gpuenergyd fleet coordinate")
    files = [EventFile(events)] if events is not None else []
    if openadr_events is not None:
        files.append(EventFile(openadr_events, OPENADR_SOURCE))
    trouble: str | None = None
    with _store(database) as store:
        while True:
            begun_s = time.monotonic()
            try:
                for file in files:
                    file.update(store, time.time())
                decision = store.cycle(decide, least_period_s=every_s / 2)
                found = decision.trouble if decision is not None else trouble
            except GpuEnergyError as error:
                found = str(error)
                store.close()
            if found != trouble:
                log.warning("%s", found or "trouble is over")
            trouble = found
            time.sleep(max(0.0, every_s - (time.monotonic() - begun_s)))


def follow(
    *,
    host: Annotated[
        str | None, typer.Option("--host", metavar="NAME", help="Name of this host [default: as in the history].")
    ] = None,
    every_s: EveryOption = 1.0,
    database: FleetDatabaseOption = None,
    socket: SocketOption = None,
) -> int:
    """Let this host follow the fleet's coordinator.

    Runs until Ctrl-C, as root or as the user who runs the daemon. Without contact to the database the host falls back
    to its share, power_budget_w in the daemon's settings.

    Examples:
        gpuenergyd fleet follow --database postgresql://fleet@postgres.example/gpuenergyd
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd_fleet.follower import Follower  # noqa: PLC0415  start fast

    configure_logging("gpuenergyd fleet follow")
    with _store(database) as store, closing(DaemonClient(find_socket_path(socket), limit_s=every_s)) as daemon:
        follower = Follower(host or _host_name(), store, daemon)
        while True:
            begun_s = time.monotonic()
            if follower.step() is not None:
                store.close()
            time.sleep(max(0.0, every_s - (time.monotonic() - begun_s)))


def listen(
    *,
    key_file: Annotated[
        Path, typer.Option("--key-file", metavar="FILE", help="File with the key of signatures; must have mode 0600.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="TCP port.")] = 8765,
    address: Annotated[
        str, typer.Option(metavar="IP", help="Address to listen on; use a proxy with TLS for other hosts.")
    ] = "127.0.0.1",
    database: FleetDatabaseOption = None,
) -> int:
    """Receive signed grid events over HTTP.

    Runs until Ctrl-C and needs no privileges on any host, since it only stores events. POST /v1/grid-events takes a
    JSON object with event_id, start, end, value and unit, signed with HMAC-SHA256.

    Examples:
        gpuenergyd fleet listen --key-file /etc/gpuenergyd/grid.key
    """
    from gpuenergyd.key_files import read_key  # noqa: PLC0415  start fast
    from gpuenergyd_fleet.webhook import LEAST_KEY_CHARS, PATH, EventReceiver, WebhookServer  # noqa: PLC0415

    configure_logging("gpuenergyd fleet listen")
    key = read_key(key_file)
    if len(key) < LEAST_KEY_CHARS:
        raise UsageError(
            f"key file {key_file}: {count_text(len(key), 'character')}; at least {LEAST_KEY_CHARS} are needed"
        )
    with _store(database) as store, WebhookServer(address, port, EventReceiver(store, key)) as server:
        log.info("listening on http://%s:%d%s", address, server.server_port, PATH)
        server.serve_forever()
    return 0


def events(*, database: FleetDatabaseOption = None, as_json: JsonOption = False) -> int:
    """List grid events, newest first.

    Examples:
        gpuenergyd fleet events
    """
    with _store(database) as store:
        rows = [event_row(event) for event in store.events()]
    if as_json:
        print_json(rows)
        return 0
    print_lines(EVENT_ROW.format(**row).rstrip() for row in rows)
    return 0


def report(
    *,
    event_id: Annotated[str, typer.Argument(metavar="EVENT", help="Its id, as `gpuenergyd fleet events` lists it.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line.")] = False,
    as_json: JsonOption = False,
    database: FleetDatabaseOption = None,
) -> int:
    """Report to the grid operator how the fleet responded to a grid event.

    Prints the reduction asked for and delivered, how fast, the rebound, the work lost and the energy saved.

    Examples:
        gpuenergyd fleet report event-17 --csv
    """
    with _store(database) as store:
        event = store.event(event_id)
        if event is None:
            raise UsageError(f"no grid event {event_id!r}; `gpuenergyd fleet events` lists them")
        found = event_report(event, store.samples(event), store.state().budget_w or 0.0)
    if as_json:
        print_json(report_row(found))
    elif as_csv:
        typer.echo(csv_text([report_row(found)]), nl=False)
    else:
        print_lines(report_lines(found))
    return 0


@contextmanager
def _store(database: str | None) -> "Iterator[FleetStore]":
    from gpuenergyd.cli.daemon_files import find_database  # noqa: PLC0415  start fast
    from gpuenergyd_fleet.store.store import FleetStore  # noqa: PLC0415  SQLAlchemy, help does not need it

    store = FleetStore(database if database is not None else find_database().url)
    try:
        yield store
    finally:
        store.close()


def _host_name() -> str:
    from socket import gethostname  # noqa: PLC0415  start fast

    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415

    return load_settings().host_name or gethostname()


set_budget.__name__ = "set"
for _command in (set_budget, show, remove, coordinate, follow, listen, openadr, events, report):
    add_command(fleet, _command)
