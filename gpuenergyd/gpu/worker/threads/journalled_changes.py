"""What the journal is told before a GPU is changed, and the changes made right after; on the actuator's thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.restore.policy import RestoreRules


@dataclass(slots=True)
class JournalledChanges:
    """Writes entries on behalf of whoever a message of the core names."""

    controller: GpuController
    journal: Journal
    driver: str
    world_path: Path | None
    rules: RestoreRules
    """As the core last said."""

    def open_lease(self, message: dict[str, Any], uuids: Sequence[str]) -> None:
        """Write down what is to be put back of each GPU's clock.

        Raises:
            JournalError: it cannot be written; nothing may be changed then.
        """
        self.journal.add([self._entry(message, uuid, Control.SM_CLOCK_LOCK) for uuid in uuids])

    def set_power_limit(self, message: dict[str, Any], uuid: str, power_limit_w: float) -> float:
        """Set a power limit under a lease, what was there before written down first; return what is set now.

        Raises:
            GpuEnergyError: the journal or the driver refuses.
        """
        entry = replace(
            self._entry(message, uuid, Control.POWER_LIMIT),
            saved_value=self.controller.power_limit_w(uuid),
            known_by=KnownBy.READ,
        )
        self.journal.add([replace(entry, intended_value=power_limit_w)])
        with self.journal.gpu_lock(uuid):
            try:
                self.controller.set_power_limit(uuid, power_limit_w)
            finally:  # what is there now is ours, set or refused
                actual_w = self.controller.power_limit_w(uuid)
                self.journal.add([replace(entry, intended_value=actual_w)])
        return actual_w

    def _entry(self, message: dict[str, Any], uuid: str, control: Control) -> JournalEntry:
        """Return what the journal must know before this control of this GPU is changed."""
        baseline = None
        if control is Control.SM_CLOCK_LOCK:
            identities = self.controller.identities()
            baseline = next(self.rules.baseline_of(i) for i in identities if i.gpu_uuid == uuid)
        return JournalEntry(
            gpu_uuid=uuid,
            control=control,
            saved_value=baseline,
            known_by=KnownBy.ASSUMED_DEFAULT if baseline is None else KnownBy.CONFIGURED,
            lease_id=str(message["lease_id"]),
            job_id=str(message["job_id"]),
            owner_pid=int(message["pid"]),
            owner_uid=int(message["uid"]),
            owner_start_ticks=process_start_ticks(int(message["pid"])),
            driver=self.driver,
            world_path=None if self.world_path is None else str(self.world_path),
            recorded_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            restore_policy=self.rules.restore_policy,
        )
