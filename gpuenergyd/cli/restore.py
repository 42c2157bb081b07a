"""`gpuenergyd restore`: put every journalled GPU back; what systemd runs after a crash. Needs no daemon."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.main import EXIT_DEGRADED
from gpuenergyd.cli.output import JsonOption, print_json
from gpuenergyd.errors import UsageError


def restore(
    *,
    journal: Annotated[
        Path | None, typer.Option(metavar="PATH", help="What to put back; else where the settings say.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and change nothing.")] = False,
    reset_all: Annotated[
        bool, typer.Option("--all", help="Remove the clock lock of every GPU, journalled or not.")
    ] = False,
    driver: Annotated[str, typer.Option(help="With --all: nvml, or simulated.")] = "nvml",
    world: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --all: where the simulated GPUs live.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Put every GPU back as it was found.

    Reads the journal that is written before the first change. Exits 4 when something could not be put back.
    """
    from gpuenergyd.gpu import restore as restoring  # noqa: PLC0415  the driver binding is slow to load

    if reset_all:
        if dry_run or journal is not None:
            raise UsageError("--all resets every GPU at once; it takes neither --dry-run nor --journal")
        outcomes = restoring.reset_all(driver, world)
    else:
        outcomes = restoring.restore(journal or _default_journal(), is_dry_run=dry_run)
    has_failed = any(outcome.result is restoring.RestoreResult.FAILED for outcome in outcomes)
    if as_json:
        print_json({"outcomes": [asdict(outcome) for outcome in outcomes], "is_complete": not has_failed})
    else:
        for outcome in outcomes:
            typer.echo(f"{outcome.gpu_uuid}: {outcome.result.replace('_', ' ')}: {outcome.detail}")
        if not outcomes:
            typer.echo("nothing to restore")
    return EXIT_DEGRADED if has_failed else 0


def _default_journal() -> Path:
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  pydantic, only where no journal is named

    return load_settings().journal_path
