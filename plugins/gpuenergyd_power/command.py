"""`gpuenergyd budget`: shows and sets the power budget of this host through the daemon."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json, print_lines
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd_power.rules.budget import budget_problem

if TYPE_CHECKING:
    from gpuenergyd.client.connection import DaemonClient

_PATH = "/v1/power-budget"


def show(*, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Show the host's power budget.

    Also prints what the host draws, and how the budget is divided among jobs.

    Examples:
        gpuenergyd budget show
    """
    with _daemon(socket) as daemon:
        _print(daemon.get(_PATH), as_json=as_json)
    return 0


def set_budget(
    *,
    watts: Annotated[float, typer.Argument(metavar="WATTS", help="For all GPUs of this host and carbon_host_power_w.")],
    lifetime_s: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="Withdraw the budget after this time.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the status and the history.")] = "",
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Set the host's power budget.

    It replaces the budget of the settings at once and across daemon restarts, until the next `set` or `clear`, or until
    the time of --for is over. A lower budget in the schedule file still applies. Only for root and the user who runs
    the daemon.

    Examples:
        gpuenergyd budget set 2400
        gpuenergyd budget set 1800 --for 600 --reason event-17
    """
    if (problem := budget_problem(watts)) is not None:
        raise UsageError(f"WATTS {problem}")
    request = {"power_budget_w": watts, "lifetime_s": lifetime_s, "reason": reason}
    with _daemon(socket) as daemon:
        _print(daemon.put(_PATH, request), as_json=as_json)
    return 0


def clear(*, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Withdraw the budget of the last `set`.

    The budgets of the settings and the schedule file apply again. Only for root and the user who runs the daemon.

    Examples:
        gpuenergyd budget clear
    """
    with _daemon(socket) as daemon:
        _print(daemon.put(_PATH, {"power_budget_w": None}), as_json=as_json)
    return 0


@contextmanager
def _daemon(socket: str | None) -> "Iterator[DaemonClient]":
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        yield client


def _print(state: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    print_lines(_lines(state))
    if state["jobs"]:
        people_console().print(_table(state["jobs"]))


def _lines(state: dict[str, Any]) -> Iterator[str]:
    if state["power_budget_w"] is None:
        yield "no power budget"
        return
    until = f" until {state['end_at']}" if state["end_at"] else ""
    reason = f" ({state['reason']})" if state["reason"] else ""
    yield f"power budget: {state['power_budget_w']:g} W{until}, from the {state['source']}{reason}"
    measured, predicted = (
        "unknown" if state[key] is None else f"{state[key]:.0f} W" for key in ("measured_w", "predicted_w")
    )
    host = f"{state['host_power_w']:g} W of it assumed for the host without its GPUs"
    yield f"measured now: {measured}; predicted by plans: {predicted}; {host}"
    if state["division"]:
        yield f"{state['policy']}: {state['division']}"
    if state["price_per_w"]:
        yield f"100 W more would add {100 * state['price_per_w']:.2g} GPUs at full speed"
    cut = "clocks are lowered now" if state["is_cutting"] else "nothing is lowered beyond plans"
    yield f"{cut}; lowered {count_text(state['num_cuts'], 'time')}, {state['over_s']:.1f} s above the budget so far"
    if state["trouble"]:
        yield f"trouble: {state['trouble']}"


def _table(jobs: list[dict[str, Any]]) -> Any:
    from rich import box  # noqa: PLC0415  start fast
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("job")
    for heading in ("power", "speed", "iteration", "limit per GPU", "100 W more"):
        table.add_column(heading, justify="right")
    for job in jobs:
        table.add_row(
            Text(job["job_name"]),
            f"{job['predicted_w']:.0f} W",
            _text(job["speed_ratio"], lambda ratio: f"{100 * ratio:.1f} %"),
            _text(job["iteration_time_s"], lambda time_s: f"{time_s:.4g} s"),
            _text(job["limit_w"], lambda limit_w: f"{limit_w:.0f} W"),
            _text(job["speed_per_w"], lambda per_w: f"+{100 * per_w:.2g} iterations/s"),
        )
    return table


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


set_budget.__name__ = "set"
budget = command_group(
    name="budget",
    cls=DocumentedGroup,
    help="Show, set and clear the power budget of this host.",
    epilog="gpuenergyd budget show\ngpuenergyd budget set 2400\ngpuenergyd budget clear",
)
for _command in (show, set_budget, clear):
    add_command(budget, _command)
