"""Restore command: restores every GPU listed in the journal.

It needs only the standard library and the driver, and starts in milliseconds. The service manager runs it after a
crash:

    python -I -m gpuenergyd.gpu.restore.command --journal PATH

It needs no daemon, no database and no other installed package. It may run while a GPU worker runs, which then drops its
leases of restored GPUs, and several such commands may run at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuenergyd.errors import GpuEnergyError, JournalError
from gpuenergyd.gpu.device import GpuDriver, RecallsLocks
from gpuenergyd.gpu.drivers.opening import open_driver
from gpuenergyd.gpu.restore import parallel
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult, reset_clock, restore_from_journal
from gpuenergyd.gpu.restore.journal import Control, DamagedJournalError, Journal, JournalEntry
from gpuenergyd.gpu.restore.policy import RestorePolicy
from gpuenergyd.gpu.restore.repair import RepairingHost, repair_journal

__all__ = ["RestoreOutcome", "RestoreResult", "main", "reset_all", "restore"]

_EXIT_DEGRADED = 4
_REMEDY = "Run `gpuenergyd restore --all` to reset every GPU, or start the daemon: its GPU worker does that"


def restore(
    journal_path: Path, *, is_dry_run: bool = False, policy: RestorePolicy | None = None
) -> tuple[RestoreOutcome, ...]:
    """Restore every GPU in the journal through the driver named in its entry; an empty journal gives no outcomes.

    Clocks that the restore policy in the journal keeps stay set, unless `policy` overrides it.

    Raises:
        JournalError: the journal cannot be read or written, or is so damaged that it names no GPU; a damaged journal is
            moved to the path in the message.
    """
    journal = Journal(journal_path)
    if not journal_path.parent.is_dir():
        return ()
    damage = None
    try:
        content = journal.read()
    except DamagedJournalError:
        if is_dry_run:
            raise
        damage = repair_journal(journal, RepairingHost())
        content = journal.read()
    outcomes: list[RestoreOutcome] = []
    for driver, world in dict.fromkeys((e.driver, e.world_path) for e in content.entries):
        mine = [e for e in content.entries if (e.driver, e.world_path) == (driver, world)]
        outcomes += _restore_through(journal, driver, world, mine, is_dry_run=is_dry_run, policy=policy)
    if content.is_incomplete:
        damage = f"{damage or f'the journal {journal_path} lacks GPUs of a damaged one'}. {_REMEDY}"
        if not outcomes:
            raise JournalError(damage)
        outcomes.append(RestoreOutcome("unknown GPU", Control.SM_CLOCK_LOCK, RestoreResult.FAILED, damage))
    return tuple(outcomes)


def reset_all(driver: str, world_path: Path | None) -> tuple[RestoreOutcome, ...]:
    """Remove the clock lock of every GPU of a driver, journaled or not; used when the journal is lost.

    Raises:
        DriverError: the driver cannot be opened.
    """
    controller = open_driver(driver, world_path)
    uuids = [identity.gpu_uuid for identity in controller.identities()]
    return _each(controller, uuids, lambda uuid: (reset_clock(controller, uuid),))


def main(arguments: Sequence[str] | None = None) -> int:
    """Restore, print the outcome for each GPU, and return the exit code, which is 4 if a restore failed."""
    parser = argparse.ArgumentParser(prog="gpuenergyd-restore", description="Restore every journalled GPU.")
    parser.add_argument("--journal", type=Path, required=True, help="path of the restore journal")
    options = parser.parse_args(arguments)
    try:
        outcomes = restore(options.journal)
    except GpuEnergyError as error:
        sys.stderr.write(f"gpuenergyd: {error}\n")
        return error.exit_code
    for outcome in outcomes:
        sys.stdout.write(f"{outcome.gpu_uuid} {outcome.control}: {outcome.result}: {outcome.detail}\n")
    return _EXIT_DEGRADED if any(outcome.result is RestoreResult.FAILED for outcome in outcomes) else 0


def _restore_through(
    journal: Journal,
    driver: str,
    world: str | None,
    entries: Sequence[JournalEntry],
    *,
    is_dry_run: bool,
    policy: RestorePolicy | None,
) -> tuple[RestoreOutcome, ...]:
    try:
        controller = open_driver(driver, None if world is None else Path(world))
    except GpuEnergyError as error:
        return tuple(RestoreOutcome(e.gpu_uuid, e.control, RestoreResult.FAILED, str(error)) for e in entries)

    def restore_one(uuid: str) -> tuple[RestoreOutcome, ...]:
        return restore_from_journal(
            journal,
            controller,
            driver=driver,
            gpu_uuids=[uuid],
            is_dry_run=is_dry_run,
            is_daemon_ending=policy is None,
            policy=policy,
        )

    return _each(controller, [entry.gpu_uuid for entry in reversed(entries)], restore_one)


def _each(
    controller: GpuDriver, gpu_uuids: Sequence[str], restore_one: Callable[[str], Sequence[RestoreOutcome]]
) -> tuple[RestoreOutcome, ...]:
    """Restore each GPU, then close the driver unless a call for a GPU does not return."""
    # The command driver has its own time limits.
    limit_s = None if isinstance(controller, RecallsLocks) else parallel.CALL_LIMIT_S
    has_hanging = False
    try:
        outcomes, has_hanging = parallel.restore_each(gpu_uuids, restore_one, limit_s=limit_s)
    finally:
        if not has_hanging:
            controller.close()
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
