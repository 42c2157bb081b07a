"""`gpuenergyd doctor --measure`: opens driver and loads, gives the daemon what was measured, and prints it."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import typer
from rich import box
from rich.table import Table

from gpuenergyd.cli.output import json_text, people_console
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.host.measured_gpu import LOADED, WAITING, MeasuredGpu, meanings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.drivers.opening import open_driver
from gpuenergyd.report.formatting import clock_text, power_text
from gpuenergyd_doctor.host_facts import driver_in_use
from gpuenergyd_doctor.load import open_load
from gpuenergyd_doctor.measuring import Durations, measure_gpus
from gpuenergyd_doctor.torch_load import TorchLoad


def measure_host(
    config: Path | None, socket: str | None, durations: Durations | None = None
) -> tuple[tuple[MeasuredGpu, ...], str]:
    """Measure one GPU of each model; return also whether the daemon keeps it, or why nothing was measured, in words."""
    try:
        kind, path, socket_path = driver_in_use(config, socket)
        world_path = None if path is None else str(path)
        loads = {WAITING: lambda: open_load(kind, world_path), LOADED: TorchLoad}
        with closing(open_driver(kind, path)) as host:
            measured = measure_gpus(
                host,
                loads,
                durations or Durations(),
                lambda gpu: typer.echo(f"measuring GPU {gpu.index} ({gpu.model_name}) ...", err=True),
            )
    except GpuEnergyError as error:
        return (), f"not measured: {error}"
    try:
        with closing(DaemonClient(socket_path)) as client:
            reply = client.post("/v1/measured-gpus", json.loads(json_text({"gpus": measured})))
    except GpuEnergyError as error:
        return measured, f"not kept by a daemon: {error}"
    return measured, f"the daemon keeps these measurements of {', '.join(reply['model_names']) or 'no GPU of its own'}"


def print_measured(measured: Sequence[MeasuredGpu], kept: str) -> None:
    """Print two tables and the meaning of each measured GPU."""
    console = people_console()
    for gpu in measured:
        driver = f", driver {gpu.driver_version}" if gpu.driver_version else ""
        console.print()
        console.print(_table(f"{gpu.model_name}{driver}", "reading", ("calls", "median", "99 %", "CPU time"), [
            (c.name, str(c.num_calls), _us_text(c.median_s), _us_text(c.late_s), _us_text(c.cpu_s)) for c in gpu.calls
        ]))  # fmt: skip
        console.print(_table(None, "state", ("power", "SM clock", "at power limit"), [
            (s.name, power_text(s.power_w), clock_text(s.sm_clock_mhz), _percent_text(s.power_capped_ratio))
            for s in gpu.states
        ]))  # fmt: skip
        for meaning in meanings(gpu):
            console.print(f"- {meaning}", markup=False, soft_wrap=True)
    console.print(f"\n{kept}", markup=False, soft_wrap=True)


def _table(title: str | None, first: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _us_text(time_s: float) -> str:
    return f"{1e6 * time_s:.0f} us" if time_s < 1e-3 else f"{1e3 * time_s:.1f} ms"


def _percent_text(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * ratio:.0f} %"
