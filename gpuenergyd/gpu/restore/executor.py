"""Restores GPUs from the restore journal; can be repeated, and a GPU that fails does not stop the others."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from gpuenergyd.errors import DriverError, GpuEnergyError, GpuNotFoundError, GpuUnsupportedError, JournalError
from gpuenergyd.gpu.device import (
    SAME_CLOCK_MHZ,
    GpuDriver,
    GpuIdentity,
    GpuReading,
    HasClocks,
    HasPowerLimit,
    HasPowerProfiles,
    RecallsLocks,
    require_capability,
)
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.restore.policy import RestorePolicy

_LIMIT_TOLERANCE_W = 1.0


class RestoreResult(StrEnum):
    """The result for one setting of one GPU."""

    RESTORED = "restored"
    WOULD_RESTORE = "would_restore"
    CHANGED_BY_OTHER = "changed_by_other"
    """Another program has changed it since; its value is kept."""
    KEPT = "kept"
    """Kept for now because of `restore_policy`, and still in the journal."""
    FORGOTTEN = "forgotten"
    """Dropped from the journal: the host was rebooted, which cleared the driver's settings."""
    UNCONFIRMED = "unconfirmed"
    """The command succeeded, but the GPU has not shown the effect; still in the journal."""
    FAILED = "failed"
    """Still in the journal, so that it can be tried again."""


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """The result for one setting of one GPU, and the reason."""

    gpu_uuid: str
    control: Control
    result: RestoreResult
    detail: str = ""
    above_sm_clock_mhz: int | None = None
    """Clock above which the GPU must run to confirm an unconfirmed restore."""


def restore_from_journal(
    journal: Journal,
    controller: GpuDriver,
    *,
    driver: str | None = None,
    gpu_uuids: Collection[str] | None = None,
    is_dry_run: bool = False,
    is_daemon_ending: bool = False,
    policy: RestorePolicy | None = None,
) -> tuple[RestoreOutcome, ...]:
    """Restore the journal's entries made through `driver`, or all, newest first; entries that fail stay.

    When the daemon ends, clocks that the policy keeps stay set. `policy` overrides the journal's policies.

    Raises:
        JournalError: the journal cannot be read or written.
    """
    content = journal.read()
    wanted = [
        entry
        for entry in reversed(content.entries)
        if driver in {None, entry.driver} and (gpu_uuids is None or entry.gpu_uuid in gpu_uuids)
    ]
    if not journal.is_of_this_boot(content):
        if not is_dry_run:
            journal.remove({entry.key for entry in wanted})
        detail = "the host was rebooted, which cleared the driver's settings; entry dropped"
        return tuple(RestoreOutcome(e.gpu_uuid, e.control, RestoreResult.FORGOTTEN, detail) for e in wanted)
    outcomes = []
    for entry in wanted:
        kept = reason_to_keep(entry) if is_daemon_ending else None
        if kept is not None:
            outcomes.append(RestoreOutcome(entry.gpu_uuid, entry.control, RestoreResult.KEPT, kept))
        elif is_dry_run:
            outcomes.append(_describe(entry))
        else:
            outcomes.append(_restore_entry(journal, controller, entry, policy or entry.restore_policy))
    return tuple(outcomes)


def reason_to_keep(entry: JournalEntry) -> str | None:
    """Return why this setting stays when the daemon ends; None if it must not, or if its process has ended."""
    ticks = entry.owner_start_ticks
    if ticks is None or process_start_ticks(entry.owner_pid) != ticks:
        return None
    if entry.restore_policy is RestorePolicy.KEEP:
        return f"restore_policy is keep, and job {entry.job_id} (pid {entry.owner_pid}) is still running"
    return None


def repeat_unproven_reset(journal: Journal, controller: GpuDriver, gpu_uuid: str) -> RestoreOutcome | None:
    """Restore a GPU's clock again without ending its lease; return None if nothing is left to confirm.

    Raises:
        JournalError: the journal cannot be read or written.
    """
    try:
        with journal.gpu_lock(gpu_uuid):
            entry = journal.read().entry(gpu_uuid, Control.SM_CLOCK_LOCK)
            if entry is None or entry.locked_sm_clock_mhz is None:
                return None
            _, detail = _restore_control(controller, entry, entry.restore_policy)
            if _is_lock_gone(entry, controller, controller.read(gpu_uuid)):
                confirm_reset(journal, entry)
                return RestoreOutcome(gpu_uuid, entry.control, RestoreResult.RESTORED, detail)
            return _unconfirmed(entry, detail)
    except JournalError:
        raise
    except GpuEnergyError as error:
        return RestoreOutcome(gpu_uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error))


def confirm_reset(journal: Journal, entry: JournalEntry) -> None:
    """Drop the entry of a GPU whose lock is gone; if the GPU is leased again, drop only the lock from the entry.

    Raises:
        JournalError: the journal cannot be read or written.
    """
    if entry.is_unconfirmed:
        journal.remove({entry.key})
    else:
        journal.record_lock(entry.gpu_uuid, None, is_settled=True)


def reset_clock(controller: GpuDriver, gpu_uuid: str) -> RestoreOutcome:
    """Remove the clock lock of a GPU, journaled or not; used when the journal is lost."""
    try:
        require_capability(controller, HasClocks).reset_sm_clock(gpu_uuid)
    except GpuEnergyError as error:
        return RestoreOutcome(gpu_uuid, Control.SM_CLOCK_LOCK, RestoreResult.FAILED, str(error))
    return RestoreOutcome(gpu_uuid, Control.SM_CLOCK_LOCK, RestoreResult.RESTORED, "clock lock removed")


def _restore_entry(
    journal: Journal, controller: GpuDriver, entry: JournalEntry, policy: RestorePolicy
) -> RestoreOutcome:
    try:
        with journal.gpu_lock(entry.gpu_uuid):
            current = next((e for e in journal.read().entries if _is_same(e, entry)), None)
            if current is None:
                return RestoreOutcome(
                    entry.gpu_uuid, entry.control, RestoreResult.RESTORED, "already restored by another process"
                )
            result, detail = _restore_control(controller, current, policy)
            if not _is_lock_gone(current, controller, controller.read(entry.gpu_uuid)):
                journal.mark_unconfirmed(current)
                return _unconfirmed(current, detail)
            journal.remove({entry.key})
    except GpuEnergyError as error:
        return RestoreOutcome(entry.gpu_uuid, entry.control, RestoreResult.FAILED, str(error))
    return RestoreOutcome(entry.gpu_uuid, entry.control, result, detail)


def _is_same(one: JournalEntry, other: JournalEntry) -> bool:
    """Return whether two entries record the same change, whatever values were set since."""
    return (one.key, one.lease_id, one.recorded_boottime_ns) == (other.key, other.lease_id, other.recorded_boottime_ns)


def _is_lock_gone(entry: JournalEntry, controller: GpuDriver, reading: GpuReading) -> bool:
    """Return whether a reading proves that no clock lock is left, or a lock that is left would lower nothing."""
    locked_mhz = entry.locked_sm_clock_mhz
    if entry.control is not Control.SM_CLOCK_LOCK or locked_mhz is None:
        return True
    if not entry.is_lock_settled:  # the lock may still take effect
        return False
    top_mhz = max(_identity(controller, entry.gpu_uuid).supported_sm_clocks_mhz, default=0)
    restored_mhz = top_mhz if entry.saved_value is None else min(top_mhz, round(entry.saved_value))
    if locked_mhz >= restored_mhz - SAME_CLOCK_MHZ:
        return True
    return reading.sm_clock_mhz is not None and reading.sm_clock_mhz > locked_mhz + SAME_CLOCK_MHZ


def _unconfirmed(entry: JournalEntry, detail: str) -> RestoreOutcome:
    above_mhz = (entry.locked_sm_clock_mhz or 0) + SAME_CLOCK_MHZ
    detail = f"{detail}, to be confirmed once the GPU computes above {above_mhz} MHz"
    return RestoreOutcome(entry.gpu_uuid, entry.control, RestoreResult.UNCONFIRMED, detail, above_mhz)


def _restore_control(controller: GpuDriver, entry: JournalEntry, policy: RestorePolicy) -> tuple[RestoreResult, str]:
    match entry.control:
        case Control.SM_CLOCK_LOCK:
            if entry.locked_sm_clock_mhz is not None and isinstance(controller, RecallsLocks):
                controller.recall_lock(entry.gpu_uuid, entry.locked_sm_clock_mhz)
            clocks = require_capability(controller, HasClocks)
            clocks_mhz = _identity(controller, entry.gpu_uuid).supported_sm_clocks_mhz
            if entry.saved_value is None or round(entry.saved_value) not in clocks_mhz:
                clocks.reset_sm_clock(entry.gpu_uuid)
                why = "" if entry.saved_value is None else f": {entry.saved_value:g} MHz is no clock of this GPU"
                return RestoreResult.RESTORED, f"clock lock removed{why}"
            clocks.lock_sm_clock(entry.gpu_uuid, round(entry.saved_value))
            whose = "another program's" if entry.known_by is KnownBy.READ else "the configured"
            return RestoreResult.RESTORED, f"clock locked at {whose} {entry.saved_value:g} MHz"
        case Control.POWER_LIMIT:
            return _restore_power_limit(controller, entry, policy)
        case Control.POWER_PROFILE:
            return _remove_power_profile(controller, entry)
        case _:
            assert_never(entry.control)


def _restore_power_limit(
    controller: GpuDriver, entry: JournalEntry, policy: RestorePolicy
) -> tuple[RestoreResult, str]:
    """Restore the saved power limit, or the default if none was saved or the GPU does not permit it.

    A limit that another program has set since is kept, unless the policy is `restore`.
    """
    limits, own = require_capability(controller, HasPowerLimit), _identity(controller, entry.gpu_uuid)
    low_w, high_w = own.min_power_limit_w or 0.0, own.max_power_limit_w or math.inf
    saved_w = entry.saved_value
    if saved_w is None or not low_w <= saved_w <= high_w:
        saved_w = own.default_power_limit_w
    if saved_w is None:
        return RestoreResult.RESTORED, "no power limit was saved"
    now_w = limits.power_limit_w(entry.gpu_uuid)
    if abs(now_w - saved_w) <= _LIMIT_TOLERANCE_W:
        return RestoreResult.RESTORED, f"power limit is already {now_w:g} W"
    is_foreign = is_set_by_other(entry, now_w)
    if is_foreign and policy is not RestorePolicy.RESTORE:
        return RestoreResult.CHANGED_BY_OTHER, f"another program set the power limit to {now_w:g} W; kept"
    limits.set_power_limit(entry.gpu_uuid, saved_w)
    detail = f"power limit restored to {saved_w:g} W"
    return RestoreResult.RESTORED, f"{detail} from {now_w:g} W set by another program" if is_foreign else detail


def is_set_by_other(entry: JournalEntry, now_w: float) -> bool:
    """Return whether a power limit is not the one that the journal says was set by gpuenergyd."""
    return entry.intended_value is not None and abs(now_w - entry.intended_value) > _LIMIT_TOLERANCE_W


def _remove_power_profile(controller: GpuDriver, entry: JournalEntry) -> tuple[RestoreResult, str]:
    """Remove the workload power profile that gpuenergyd has added; other programs' profiles stay under any policy."""
    if entry.intended_value is None:
        return RestoreResult.RESTORED, "no workload power profile was added"
    profile = round(entry.intended_value)
    try:
        driver = require_capability(controller, HasPowerProfiles)
        requested = driver.requested_power_profiles(entry.gpu_uuid)
    except GpuUnsupportedError:  # nothing can be requested then
        requested = frozenset()
    if profile not in requested:
        return RestoreResult.RESTORED, f"workload power profile {profile} is not requested any more"
    driver.clear_power_profile(entry.gpu_uuid, profile)
    if profile in driver.requested_power_profiles(entry.gpu_uuid):
        raise DriverError(f"workload power profile {profile} of {entry.gpu_uuid} is still requested after its removal")
    return RestoreResult.RESTORED, f"workload power profile {profile} removed"


def _identity(controller: GpuDriver, gpu_uuid: str) -> GpuIdentity:
    """Return the identity of a GPU, or raise GpuNotFoundError."""
    found = next((identity for identity in controller.identities() if identity.gpu_uuid == gpu_uuid), None)
    if found is None:
        raise GpuNotFoundError(f"this host has no GPU {gpu_uuid}; it stays in the journal")
    return found


def _describe(entry: JournalEntry) -> RestoreOutcome:
    match entry.control:
        case Control.SM_CLOCK_LOCK:
            action = "remove the clock lock" if entry.saved_value is None else f"restore {entry.saved_value:g} MHz"
        case Control.POWER_LIMIT:
            action = "restore no power limit" if entry.saved_value is None else f"restore {entry.saved_value:g} W"
        case Control.POWER_PROFILE:
            action = f"remove workload power profile {entry.intended_value or 0:g}"
        case _:
            assert_never(entry.control)
    return RestoreOutcome(
        entry.gpu_uuid,
        entry.control,
        RestoreResult.WOULD_RESTORE,
        f"{action}; changed by job {entry.job_id} (pid {entry.owner_pid})",
    )
