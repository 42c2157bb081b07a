"""`gpuenergyd calibrate`: has the daemon measure switch latencies on idle GPUs while this process keeps them busy."""

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuenergyd.cli.options import DryRunOption, JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuError

if TYPE_CHECKING:
    from rich.table import Table

    from gpuenergyd.client.connection import DaemonClient
    from gpuenergyd_doctor.load import GpuLoad

_POLL_S = 0.2
_ENDED = frozenset({"done", "failed"})
_NOTE = (
    "Times until the driver reports the new clock. Jobs correct them with the times at which instructions sped up.\n"
    "The changes are used for all GPUs of the model, and are kept when the daemon restarts."
)


def calibrate(
    *,
    gpus: Annotated[
        list[str] | None,
        typer.Argument(metavar="GPU", help="UUIDs or indices, as `gpuenergyd status` lists them [default: all]."),
    ] = None,
    num_changes: Annotated[
        int,
        typer.Option("--changes", min=1, max=200, metavar="N", help="Least changes per direction and target clock."),
    ] = 20,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure how long clock changes of idle GPUs take.

    Changes each GPU between six clocks while a small load runs on it, then restores it; Ctrl-C restores it at once.
    Only for root and the user who runs the daemon; refused while a job, a lease or another process uses a GPU.
    The latencies belong to the GPU model, so one GPU of each model is enough.

    Examples:
        gpuenergyd calibrate 0
        gpuenergyd calibrate 0 --dry-run
        gpuenergyd calibrate --changes 50 --json
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415  start fast
    from gpuenergyd_doctor.load import open_load  # noqa: PLC0415  start fast

    request = {"gpus": gpus or [], "num_changes": num_changes, "is_dry_run": dry_run}
    with closing(DaemonClient(find_socket_path(socket))) as client:
        if dry_run:
            started = client.post("/v1/calibrations", request)
            _print_plan(started, as_json=as_json)
            return 0
        status = client.get_status()
        load = open_load(status["driver"], status["files"]["world_path"])
        started = client.post("/v1/calibrations", request)
        state = _follow(client, load, started, is_silent=as_json)
    _print_result(started, state, as_json=as_json)
    if reasons := [gpu["reason"] for gpu in state["gpus"] if gpu["phase"] != "done"]:
        raise GpuError("; ".join(filter(None, reasons)) or "the calibration did not end")
    return 0


def _follow(client: "DaemonClient", load: "GpuLoad", started: dict[str, Any], *, is_silent: bool) -> dict[str, Any]:
    """Keep each GPU busy while it is measured; return the last state of the calibration."""
    path = f"/v1/calibrations/{started['calibration_id']}"
    for position, gpu in enumerate(started["gpus"]):
        if not is_silent:
            typer.echo(_plan_text(gpu), err=True)
        with load.on(gpu["gpu_uuid"]):
            while True:
                state = client.get(path)
                if state["is_finished"] or state["gpus"][position]["phase"] in _ENDED:
                    break
                time.sleep(_POLL_S)
    while not (state := client.get(path))["is_finished"]:
        time.sleep(_POLL_S)
    return state


def _plan_text(gpu: dict[str, Any]) -> str:
    clocks = ", ".join(map(str, gpu["sm_clocks_mhz"]))
    return (
        f"GPU {gpu['index']} ({gpu['model_name']}): {count_text(gpu['num_changes'], 'change')} between {clocks} MHz,"
        f" about {max(1, round(gpu['expected_s']))} s"
    )


def _print_plan(started: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(started)
        return
    for gpu in started["gpus"]:
        typer.echo(f"would measure {_plan_text(gpu)}")


def _print_result(started: dict[str, Any], state: dict[str, Any], *, as_json: bool) -> None:
    progress = {gpu["gpu_uuid"]: gpu for gpu in state["gpus"]}
    if as_json:
        print_json({**started, "gpus": [gpu | progress[gpu["gpu_uuid"]] for gpu in started["gpus"]]})
        return
    console = people_console()
    for gpu in started["gpus"]:
        if targets := progress[gpu["gpu_uuid"]]["targets"]:
            console.print(_table(f"GPU {gpu['index']}: {gpu['model_name']}", targets))
    console.print(_NOTE, soft_wrap=True)


def _table(title: str, targets: list[dict[str, Any]]) -> "Table":
    from rich import box  # noqa: PLC0415  start fast
    from rich.table import Table  # noqa: PLC0415  start fast

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("to MHz")
    for heading in ("changes", "not seen", "median", "90 %", "longest", "call"):
        table.add_column(heading, justify="right")
    for target in targets:
        is_open = target["num_unseen"] > 0  # a change that never took effect was watched at least so long
        table.add_row(
            f"{target['direction']} to {target['sm_clock_mhz']}",
            str(target["num_changes"]),
            str(target["num_unseen"]),
            _ms_text(target["median_s"]),
            _ms_text(target["late_s"]),
            ("≥ " if is_open else "") + _ms_text(target["longest_s"]),
            _ms_text(target["call_s"]),
        )
    return table


def _ms_text(time_s: float | None) -> str:
    return "unknown" if time_s is None else f"{1000 * time_s:.1f} ms"
