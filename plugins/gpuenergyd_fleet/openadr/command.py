"""`gpuenergyd fleet openadr`: receives grid events from an OpenADR server and writes them to a file."""

import asyncio
import logging
import math
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.errors import UsageError
from gpuenergyd.log_lines import configure_logging
from gpuenergyd_fleet.decisions.grid_event import MAX_LOAD_W
from gpuenergyd_fleet.openadr.load_targets import NUM_LEVELS, SiteTerms


def openadr(  # noqa: PLR0913  one parameter for each option
    *,
    vtn_url: Annotated[str, typer.Option("--vtn-url", metavar="URL", help="The grid operator's server (VTN).")],
    ven_name: Annotated[str, typer.Option("--ven-name", metavar="NAME", help="Name of this site at the server.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="File of events for `coordinate --openadr-events`.")
    ],
    cert: Annotated[
        Path | None, typer.Option("--cert", metavar="FILE", help="This site's certificate, PEM; signs messages too.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Its private key, PEM; must have mode 0600.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="Authorities of the server's certificate, PEM.")
    ] = None,
    vtn_fingerprint: Annotated[
        str | None,
        typer.Option("--vtn-fingerprint", metavar="TEXT", help="Require messages signed with this certificate."),
    ] = None,
    capacity_w: Annotated[
        float | None, typer.Option("--capacity-w", metavar="WATTS", help="Load to which x-loadControlCapacity refers.")
    ] = None,
    simple_levels: Annotated[
        str | None,
        typer.Option("--simple-levels", metavar="P1,P2,P3", help="Highest load in percent at levels 1 to 3 of SIMPLE."),
    ] = None,
) -> int:
    """Receive grid events from an OpenADR 2.0b server.

    Runs until Ctrl-C and needs no privileges and no database: it only writes FILE, which the coordinator reads and
    checks. Needs the package openleadr: pip install 'gpuenergyd[openadr]'.

    Examples:
        gpuenergyd fleet openadr --vtn-url https://vtn.example/OpenADR2/Simple/2.0b --ven-name site --out events.csv
    """
    terms = SiteTerms(_checked_capacity_w(capacity_w), _percents(simple_levels))
    try:
        from gpuenergyd_fleet.openadr.receiver import Receiver, confine, follow  # noqa: PLC0415  start fast
        from gpuenergyd_fleet.openadr.session import VtnAccess, VtnSession  # noqa: PLC0415  optional packages
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'gpuenergyd[openadr]'") from None
    configure_logging("gpuenergyd fleet openadr")
    confine()
    access = VtnAccess(vtn_url, ven_name, cert, key, ca, vtn_fingerprint)

    async def run() -> None:
        async with aclosing(VtnSession(access)) as session:
            if session.own_fingerprint is not None:
                logging.getLogger("gpuenergyd.openadr").info("fingerprint of this site: %s", session.own_fingerprint)
            await follow(Receiver(session, out, terms))

    asyncio.run(run())
    return 0


def _checked_capacity_w(capacity_w: float | None) -> float | None:
    if capacity_w is not None and not 0 < capacity_w <= MAX_LOAD_W:
        raise UsageError(f"--capacity-w {capacity_w:g}: valid are values above 0 up to {MAX_LOAD_W:g}")
    return capacity_w


def _percents(text: str | None) -> tuple[float, ...]:
    """Return the agreed percents, one for each level."""
    if text is None:
        return ()
    try:
        percents = tuple(float(part) for part in text.split(","))
    except ValueError:
        percents = ()
    is_valid = len(percents) == NUM_LEVELS and all(math.isfinite(value) and 0 < value <= 100 for value in percents)
    if not is_valid:
        raise UsageError(
            f"--simple-levels {text!r:.40}: must be {NUM_LEVELS} percents above 0 up to 100, e.g. 90,75,50"
        )
    return percents
