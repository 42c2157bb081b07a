"""Putting GPUs back as the journal says: idempotent, one bad GPU stops no other."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry
from gpuenergyd.gpu.restore.policy import RestorePolicy

_LIMIT_TOLERANCE_W = 1.0


class RestoreResult(StrEnum):
    """What became of one control of one GPU."""

    RESTORED = "restored"
    WOULD_RESTORE = "would_restore"
    CHANGED_BY_OTHER = "changed_by_other"
    """Somebody else changed it since: theirs stays."""
    KEPT = "kept"
    """It stays as it is for now, as `restore_policy` says, and stays journalled."""
    FORGOTTEN = "forgotten"
    """The host was booted since: the driver has forgotten the change too."""
    FAILED = "failed"
    """Still journalled: try again."""


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What became of one control of one GPU, and why."""

    gpu_uuid: str
    control: Control
    result: RestoreResult
    detail: str = ""


def restore_from_journal(
    journal: Journal,
    controller: GpuController,
    *,
    driver: str,
    gpu_uuids: Collection[str] | None = None,
    is_dry_run: bool = False,
    is_leaving: bool = False,
    policy: RestorePolicy | None = None,
) -> tuple[RestoreOutcome, ...]:
    """Put back what the journal lists for this driver, last change first; what fails stays on the list.

    `is_leaving`: not the job ends but the daemon, so what may be kept is kept. `policy` overrules the journal's.

    Raises:
        JournalError: the journal cannot be read or written.
    """
    content = journal.read()
    if not journal.is_of_this_boot:
        if not is_dry_run:
            journal.remove({e.key for e in content.entries})
        return tuple(
            RestoreOutcome(
                e.gpu_uuid,
                e.control,
                RestoreResult.FORGOTTEN,
                "the host was booted since: the driver has forgotten it too, and the journal's entry is void",
            )
            for e in content.entries
        )
    outcomes = []
    for entry in reversed(content.entries):
        if entry.driver != driver or (gpu_uuids is not None and entry.gpu_uuid not in gpu_uuids):
            continue
        kept = why_kept(entry) if is_leaving else None
        if kept is not None:
            outcomes.append(RestoreOutcome(entry.gpu_uuid, entry.control, RestoreResult.KEPT, kept))
        elif is_dry_run:
            outcomes.append(_describe(entry))
        else:
            outcomes.append(_restore_entry(journal, controller, entry, policy or entry.restore_policy))
    return tuple(outcomes)


def why_kept(entry: JournalEntry) -> str | None:
    """Return why a daemon that ends may leave this as it is: never when the process that owned it is gone too."""
    ticks = entry.owner_start_ticks
    if ticks is None or process_start_ticks(entry.owner_pid) != ticks:
        return None
    if entry.restore_policy is RestorePolicy.KEEP:
        return f"restore_policy is keep, and job {entry.job_id} (pid {entry.owner_pid}) still runs"
    return None


def reset_every_gpu(controller: GpuController) -> tuple[RestoreOutcome, ...]:
    """Remove the clock lock of every GPU, journalled or not: the safe choice when the journal is lost."""
    outcomes = []
    for identity in controller.identities():
        try:
            controller.reset_sm_clock(identity.gpu_uuid)
        except GpuEnergyError as error:
            result, detail = RestoreResult.FAILED, str(error)
        else:
            result, detail = RestoreResult.RESTORED, "clock lock removed, as of every GPU"
        outcomes.append(RestoreOutcome(identity.gpu_uuid, Control.SM_CLOCK_LOCK, result, detail))
    return tuple(outcomes)


def _restore_entry(
    journal: Journal, controller: GpuController, entry: JournalEntry, policy: RestorePolicy
) -> RestoreOutcome:
    try:
        with journal.gpu_lock(entry.gpu_uuid):
            if entry not in journal.read().entries:
                return RestoreOutcome(
                    entry.gpu_uuid, entry.control, RestoreResult.RESTORED, "somebody else has just put it back"
                )
            result, detail = _put_back(controller, entry, policy)
            controller.read(entry.gpu_uuid)
            journal.remove({entry.key})
    except GpuEnergyError as error:
        return RestoreOutcome(entry.gpu_uuid, entry.control, RestoreResult.FAILED, str(error))
    return RestoreOutcome(entry.gpu_uuid, entry.control, result, detail)


def _put_back(controller: GpuController, entry: JournalEntry, policy: RestorePolicy) -> tuple[RestoreResult, str]:
    match entry.control:
        case Control.SM_CLOCK_LOCK:
            if entry.saved_value is None:
                controller.reset_sm_clock(entry.gpu_uuid)
                return RestoreResult.RESTORED, "clock lock removed"
            controller.lock_sm_clock(entry.gpu_uuid, round(entry.saved_value))
            return RestoreResult.RESTORED, f"clock locked at the configured {entry.saved_value:g} MHz"
        case Control.POWER_LIMIT:
            return _put_power_limit_back(controller, entry, policy)
        case _:
            assert_never(entry.control)


def _put_power_limit_back(
    controller: GpuController, entry: JournalEntry, policy: RestorePolicy
) -> tuple[RestoreResult, str]:
    """A limit can be read, so it is compared: only what is still ours is undone, unless all is to be."""
    if entry.saved_value is None:
        return RestoreResult.RESTORED, "no power limit was saved"
    now_w = controller.power_limit_w(entry.gpu_uuid)
    if abs(now_w - entry.saved_value) <= _LIMIT_TOLERANCE_W:
        return RestoreResult.RESTORED, f"power limit is {now_w:g} W already"
    is_foreign = entry.intended_value is not None and abs(now_w - entry.intended_value) > _LIMIT_TOLERANCE_W
    if is_foreign and policy is not RestorePolicy.RESTORE:
        return RestoreResult.CHANGED_BY_OTHER, f"somebody else set the power limit to {now_w:g} W; it stays"
    controller.set_power_limit(entry.gpu_uuid, entry.saved_value)
    told = f"power limit set back to {entry.saved_value:g} W"
    return RestoreResult.RESTORED, f"{told} from {now_w:g} W of somebody else" if is_foreign else told


def _describe(entry: JournalEntry) -> RestoreOutcome:
    what = "remove the clock lock" if entry.saved_value is None else f"set {entry.saved_value:g}"
    return RestoreOutcome(
        entry.gpu_uuid,
        entry.control,
        RestoreResult.WOULD_RESTORE,
        f"{what} that job {entry.job_id} (pid {entry.owner_pid}) changed",
    )
