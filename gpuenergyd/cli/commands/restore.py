"""`gpuenergyd restore`: put every journalled GPU back; what systemd runs after a crash. Needs no daemon."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.main import EXIT_DEGRADED
from gpuenergyd.cli.output import JsonOption, print_json
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.restore.policy import RestorePolicy


def restore(
    *,
    journal: Annotated[
        Path | None, typer.Option(metavar="PATH", help="What to put back; else where the settings say.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and change nothing.")] = False,
    reset_all: Annotated[
        bool, typer.Option("--all", help="Remove the clock lock of every GPU, journalled or not.")
    ] = False,
    policy: Annotated[
        RestorePolicy | None,
        typer.Option(help="Overrule what the settings said when it was changed; then nothing is kept."),
    ] = None,
    driver: Annotated[str, typer.Option(help="With --all: nvml, or simulated.")] = "nvml",
    world: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --all: where the simulated GPUs live.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Put every GPU back as it was found.

    Reads the journal that is written before the first change. Somebody else's power limit stays, unless the policy is
    "restore"; a lock cannot be read back, so a journalled one is removed. What the daemon was told to keep is named and
    stays. An entry of an earlier boot is void. Exits 4 when something could not be put back.
    """
    from gpuenergyd.gpu.restore import command as restoring  # noqa: PLC0415  the driver binding is slow to load

    if reset_all:
        if dry_run or journal is not None or policy is not None:
            raise UsageError("--all resets every GPU at once; it takes neither --dry-run nor --journal nor --policy")
        outcomes = restoring.reset_all(driver, world)
    else:
        outcomes = restoring.restore(journal or _default_journal(), is_dry_run=dry_run, policy=policy)
    has_failed = any(outcome.result is restoring.RestoreResult.FAILED for outcome in outcomes)
    if as_json:
        print_json({"outcomes": [asdict(outcome) for outcome in outcomes], "is_complete": not has_failed})
    else:
        for outcome in outcomes:
            typer.echo(f"{outcome.gpu_uuid}: {outcome.result.replace('_', ' ')}: {outcome.detail}")
        if not outcomes:
            typer.echo("nothing to restore")
        if any(outcome.result is restoring.RestoreResult.KEPT for outcome in outcomes):
            typer.echo("`gpuenergyd restore --policy only-if-ours` puts back what was kept")
    return EXIT_DEGRADED if has_failed else 0


def _default_journal() -> Path:
    """Return the journal of the daemon that the settings describe, else of the worker that is a unit of its own."""
    from gpuenergyd.daemon.settings import (  # noqa: PLC0415  pydantic, only where no journal is named
        WORKER_UNIT_DIR,
        load_settings,
    )

    of_settings, of_unit = load_settings().journal_path, WORKER_UNIT_DIR / "journal.json"
    return of_unit if of_unit.exists() and not of_settings.exists() else of_settings
