"""Repair of a damaged restore journal: valid entries stay, and every GPU that it may have listed is reset.

The damaged file is kept next to the journal. Each bad entry is replaced by one that removes its GPU's clock lock, or
sets another program's lock again if the journal has one, so that restores, retries and reports work as usual. A file
that belongs to another user is moved aside without being read.
"""

import dataclasses
import time
from collections.abc import Collection, Sequence

from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.restore.journal_content import BadPart, Control, JournalContent, JournalEntry, KnownBy

_REPAIR = "repair of the journal"


@dataclasses.dataclass(frozen=True, slots=True)
class RepairingHost:
    """The GPUs that a damaged journal may list, and their driver; all unknown to the restore command."""

    gpu_uuids: Collection[str] | None = None
    driver: str = ""
    world_path: str | None = None


def repair_journal(journal: Journal, host: RepairingHost) -> str | None:
    """Repair a journal; return what was wrong, where the file is now and which GPUs are reset, or None if intact.

    If an entry does not name its GPU, all the host's GPUs are reset; if they are unknown, the journal stays incomplete.

    Raises:
        JournalError: the journal cannot be moved or written.
    """
    repaired = journal.repair(lambda content, bad: repaired_content(content, bad, host))
    if repaired is None:
        return None
    reason, aside, content = repaired
    where = "" if aside is None else f"; moved it to {aside}"
    uuids = sorted({entry.gpu_uuid for entry in content.entries if entry.lease_id == _REPAIR})
    return f"{reason}{where}" + (f"; resetting {', '.join(uuids)}" if uuids else "")


def repaired_content(content: JournalContent, bad: Sequence[BadPart], host: RepairingHost) -> JournalContent:
    """Return the content without its bad parts, with entries that reset every GPU that a bad part may name."""
    kept = {entry.key: entry for entry in content.entries}
    is_incomplete = content.is_incomplete
    for part in bad:
        uuids = _gpus_of(part, host)
        is_incomplete = is_incomplete or (part.is_change and not uuids)
        for uuid in uuids:
            entry = _replacement(part, uuid, content, host)
            if entry is None:
                is_incomplete = True
            else:
                kept.setdefault(entry.key, entry)
    if is_incomplete and host.gpu_uuids is not None:
        is_incomplete = False
        for uuid in host.gpu_uuids:
            entry = _reset(uuid, content, host.driver, host.world_path)
            if not any(known == uuid for known, _ in kept):
                kept[entry.key] = entry
    return dataclasses.replace(content, entries=tuple(kept.values()), is_incomplete=is_incomplete)


def _gpus_of(part: BadPart, host: RepairingHost) -> set[str]:
    if not part.is_change:
        return set()
    named = part.valid("gpu_uuid")
    if named is not None:
        return {named}
    return set() if host.gpu_uuids is None else set(part.texts()) & set(host.gpu_uuids)


def _replacement(part: BadPart, uuid: str, content: JournalContent, host: RepairingHost) -> JournalEntry | None:
    """Return the entry that restores what a bad part may have changed; None if the driver is unknown."""
    driver, world_path = host.driver, host.world_path
    if not driver:
        driver, world_path = part.valid("driver") or "", part.valid("world_path")
    if not driver:
        return None
    reset = _reset(uuid, content, driver, world_path)
    control, intended = part.valid("control"), part.valid("intended_value")
    if control is Control.POWER_LIMIT or (control is Control.POWER_PROFILE and intended is not None):
        default = KnownBy.ASSUMED_DEFAULT
        return dataclasses.replace(reset, control=control, saved_value=None, known_by=default, intended_value=intended)
    return dataclasses.replace(reset, locked_sm_clock_mhz=part.valid("locked_sm_clock_mhz"))


def _reset(uuid: str, content: JournalContent, driver: str, world_path: str | None) -> JournalEntry:
    """Return an entry that removes our clock lock from a GPU, or restores another program's lock if known."""
    foreign_mhz = content.foreign_locks_mhz.get(uuid)
    return JournalEntry(
        gpu_uuid=uuid,
        control=Control.SM_CLOCK_LOCK,
        saved_value=foreign_mhz,
        known_by=KnownBy.ASSUMED_DEFAULT if foreign_mhz is None else KnownBy.READ,
        lease_id=_REPAIR,
        job_id=_REPAIR,
        owner_pid=0,
        owner_uid=0,
        owner_start_ticks=None,
        driver=driver,
        world_path=world_path,
        recorded_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    )
