"""`gpuenergyd doctor`: finds problems on this host and suggests a fix for each, or measures it; changes no GPU."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.exit_codes import EXIT_DEGRADED
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json


def doctor(
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration file [default: the system's].")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also read and time one GPU of each model, for about 40 s each.")
    ] = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Diagnose this host and suggest fixes.

    Checks driver, permissions, persistence mode, clocks, socket, database, disk, time synchronization, carbon source
    and systemd units, with or without a running daemon. Changes nothing. Exits 4 if something is degraded.

    With --measure it also times readings, learns the energy counter's period and the age of readings, and computes on
    idle GPUs, with torch if it is installed. No clock, limit or mode is set. The daemon keeps what an administrator
    measures.

    Examples:
        gpuenergyd doctor
        gpuenergyd doctor --json
        gpuenergyd doctor --measure
    """
    from gpuenergyd_doctor.diagnosis import Level, diagnose  # noqa: PLC0415
    from gpuenergyd_doctor.host_facts import collect_host_facts  # noqa: PLC0415  start fast

    findings = diagnose(collect_host_facts(config, socket))
    is_degraded = any(diagnosis.level is Level.DEGRADED for diagnosis in findings)
    code = EXIT_DEGRADED if is_degraded else 0
    document = {"is_degraded": is_degraded, "findings": findings}
    if not as_json:
        console = people_console()
        for diagnosis in findings:
            colour = {Level.FINE: "green", Level.NOTE: "yellow", Level.DEGRADED: "red"}[diagnosis.level]
            console.print(f"[{colour}]{diagnosis.level:<9}[/] ", end="")
            console.print(f"{diagnosis.subject}: {diagnosis.detail}", markup=False, soft_wrap=True)
            if diagnosis.fix is not None:
                console.print(f"          {diagnosis.fix}", markup=False, soft_wrap=True)
    if measure:
        from gpuenergyd_doctor.measurement_report import measure_host, print_measured  # noqa: PLC0415

        measured, kept = measure_host(config, socket)
        if not as_json:
            print_measured(measured, kept)
        document |= {"measured": measured, "kept": kept}
    if as_json:
        print_json(document)
    return code
