"""`gpuenergyd doctor`: what on this host stops the daemon from working, and the fix for each. It changes nothing."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.main import EXIT_DEGRADED
from gpuenergyd.cli.output import JsonOption, SocketOption, print_json
from gpuenergyd.cli.terminal import people_console


def doctor(
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's settings; else the system's.")
    ] = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what on this host stops it from working, and the fix.

    Looks at driver, permissions, persistence mode, clocks, socket, database, disk, time, carbon source and units, with
    or without a running daemon, and changes nothing. Exits 4 when something is degraded.
    """
    from gpuenergyd.cli.doctor.host_facts import look_at_host  # noqa: PLC0415  heavy: settings, driver, database
    from gpuenergyd.core.host.diagnosis import Level, diagnose  # noqa: PLC0415

    found = diagnose(look_at_host(config, socket))
    is_degraded = any(diagnosis.level is Level.DEGRADED for diagnosis in found)
    if as_json:
        print_json({"is_degraded": is_degraded, "findings": found})
        return EXIT_DEGRADED if is_degraded else 0
    console = people_console()
    for diagnosis in found:
        colour = {Level.FINE: "green", Level.NOTE: "yellow", Level.DEGRADED: "red"}[diagnosis.level]
        console.print(f"[{colour}]{diagnosis.level:<9}[/] ", end="")
        console.print(f"{diagnosis.subject}: {diagnosis.detail}", markup=False, soft_wrap=True)
        if diagnosis.fix is not None:
            console.print(f"          {diagnosis.fix}", markup=False, soft_wrap=True)
    return EXIT_DEGRADED if is_degraded else 0
