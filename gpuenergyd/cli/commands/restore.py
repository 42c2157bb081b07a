"""`gpuenergyd restore`: restores journaled GPU clocks, power limits and profiles; works without the daemon."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.exit_codes import EXIT_DEGRADED
from gpuenergyd.cli.options import DryRunOption, JsonOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.restore.policy import RestorePolicy


def restore(
    *,
    journal: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Restore journal [default: the daemon's].")
    ] = None,
    dry_run: DryRunOption = False,
    reset_all: Annotated[
        bool, typer.Option("--all", help="Remove the clock lock of every GPU, journaled or not.")
    ] = False,
    policy: Annotated[
        RestorePolicy | None,
        typer.Option(metavar="only-if-ours|restore|keep", help="Override the restore policy recorded in the journal."),
    ] = None,
    driver: Annotated[str, typer.Option(metavar="nvml|simulated|command", help="Driver, with --all.")] = "nvml",
    world: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File of the simulated GPUs, or of commands, with --all.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Restore GPU clocks and power limits.

    Reads the journal, which holds the original state of every GPU that the daemon has changed. Clock locks are removed;
    a power limit is restored unless another program has changed it since (--policy restore overwrites it); our workload
    power profile is removed. GPUs with restore policy `keep` are listed and left alone. Entries from before the last
    boot are ignored. Exits 4 if a GPU could not be restored.

    Examples:
        gpuenergyd restore --dry-run
        gpuenergyd restore
        gpuenergyd restore --all   # after the journal was lost
    """
    from gpuenergyd.gpu.restore import command as restore_command  # noqa: PLC0415  start fast

    looked_at = ""
    if reset_all:
        if dry_run or journal is not None or policy is not None:
            raise UsageError("--all resets every GPU and cannot be combined with --dry-run, --journal or --policy")
        outcomes = restore_command.reset_all(driver, world)
    else:
        journal, looked_at = (journal, str(journal)) if journal is not None else _default_journal()
        outcomes = restore_command.restore(journal, is_dry_run=dry_run, policy=policy)
    has_failed = any(outcome.result is restore_command.RestoreResult.FAILED for outcome in outcomes)
    if as_json:
        found = [asdict(outcome) for outcome in outcomes]
        print_json({"journal": journal, "outcomes": found, "is_complete": not has_failed})
    else:
        for outcome in outcomes:
            typer.echo(f"{outcome.gpu_uuid}: {outcome.result.replace('_', ' ')}: {outcome.detail}")
        if not outcomes:
            typer.echo(f"nothing to restore{f' in {looked_at}' if looked_at else ''}")
        if any(outcome.result is restore_command.RestoreResult.UNCONFIRMED for outcome in outcomes):
            typer.echo("an idle GPU does not show whether a command had an effect; run this again while it computes")
        if any(outcome.result is restore_command.RestoreResult.KEPT for outcome in outcomes):
            typer.echo("to restore GPUs that were kept: gpuenergyd restore --policy only-if-ours")
    return EXIT_DEGRADED if has_failed else 0


def _default_journal() -> tuple[Path, str]:
    """Return the journal and its description: that of the running daemon, or of the settings or the worker's unit."""
    from gpuenergyd.cli.daemon_files import find_daemon_files  # noqa: PLC0415  only the default needs it
    from gpuenergyd.daemon.settings import WORKER_UNIT_DIR, load_settings  # noqa: PLC0415  pydantic, only the default needs it

    files = find_daemon_files()
    found = files.journal_path
    if found is None:
        of_settings, of_unit = load_settings().journal_path, WORKER_UNIT_DIR / "journal.json"
        found = of_unit if of_unit.exists() and not of_settings.exists() else of_settings
    return found, f"{found} ({files.described})"
