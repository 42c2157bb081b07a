"""Driver calls that the daemon requests; each change is journalled first. All run on the GPU's actuator."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

from gpuenergyd.errors import DriverError, GpuError
from gpuenergyd.gpu.device import (
    GpuDriver,
    HasPowerLimit,
    HasPowerProfiles,
    HasProcesses,
    MeasuresGpus,
    require_capability,
)
from gpuenergyd.gpu.link.messages import (
    AcquireLease,
    GpuProcesses,
    GpuSnapshot,
    LeaseOwner,
    ListProcesses,
    LowerPowerLimit,
    PowerLimit,
    PowerProfiles,
    SetPowerLimit,
    SetPowerProfile,
    TakeSnapshot,
)
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.gpu.restore.executor import is_set_by_other
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd.gpu.restore.policy import RestorePolicy, RestoreRules
from gpuenergyd.gpu.worker.reading_gate import ReadingGate

GpuCommand = SetPowerLimit | LowerPowerLimit | SetPowerProfile | ListProcesses | TakeSnapshot


@dataclass(slots=True)
class DriverRequests:
    """Executes requests that read or change GPUs, and returns their replies; blocks as long as the driver does."""

    controller: GpuDriver
    journal: Journal
    driver: str
    world_path: Path | None
    rules: RestoreRules
    """The restore rules of the daemon that connected last."""
    foreign_clock_mhz: Callable[[str], int | None] = lambda _: None
    """Returns the clock at which another program has locked a GPU."""
    reader: MeasuresGpus = field(init=False)
    """Reads what commands ask for: the gate in front of the driver."""

    def __post_init__(self) -> None:
        self.reader = ReadingGate(self.controller, self.controller.identities())

    def open_lease(self, request: AcquireLease, gpu_uuid: str) -> None:
        """Journal the clock state of one GPU of a lease.

        Raises:
            JournalError: it cannot be written, so nothing may be changed.
        """
        if request.sets_clocks:
            self.journal.add([self._entry(request.lease_id, request.owner, gpu_uuid, Control.SM_CLOCK_LOCK)])

    def execute(self, command: GpuCommand) -> PowerLimit | PowerProfiles | GpuProcesses | GpuSnapshot:
        """Execute a command for one GPU; raise GpuEnergyError if the journal or the driver refuses."""
        match command:
            case SetPowerLimit():
                return self.set_power_limit(command)
            case LowerPowerLimit():
                return self.lower_power_limit(command)
            case SetPowerProfile():
                return self.set_power_profile(command)
            case ListProcesses():
                return GpuProcesses(
                    tuple(require_capability(self.controller, HasProcesses).process_ids(command.gpu_uuid))
                )
            case TakeSnapshot():
                reading = self.reader.read(command.gpu_uuid)
                return GpuSnapshot(reading.power_w, reading.total_energy_j, self.reader.details(command.gpu_uuid))
            case _:
                assert_never(command)

    def lower_power_limit(self, request: LowerPowerLimit) -> PowerLimit:
        """Lower a power limit after journalling the present one, or return to that one; return the limit read back.

        A limit that another program has set over ours is from then on the one to return to.

        Raises:
            GpuEnergyError: the journal or the driver refuses.
        """
        entry = self.journal.entry(request.gpu_uuid, Control.POWER_LIMIT)
        now_w = require_capability(self.controller, HasPowerLimit).power_limit_w(request.gpu_uuid)
        if entry is not None and self._is_set_by_operator(entry, now_w):
            self.journal.remove({entry.key})
            entry = None
        before_w = None if entry is None else entry.saved_value
        if before_w is None:
            before_w = now_w
            if request.power_limit_w is None or request.power_limit_w >= before_w:
                return PowerLimit(before_w)
        limit_w = before_w if request.power_limit_w is None else min(request.power_limit_w, before_w)
        return self.set_power_limit(SetPowerLimit(request.lease_id, request.gpu_uuid, limit_w, request.owner))

    def _is_set_by_operator(self, entry: JournalEntry, now_w: float) -> bool:
        """Return whether another program has set a limit over ours: one in range, and read a second time."""
        if not is_set_by_other(entry, now_w):
            return False
        again = self.reader.details(entry.gpu_uuid)
        low_w, high_w = again.min_power_limit_w or math.inf, again.max_power_limit_w or 0.0
        return again.power_limit_w == now_w and low_w <= now_w <= high_w

    def set_power_limit(self, request: SetPowerLimit) -> PowerLimit:
        """Set a power limit after journalling the present one; return the limit read back.

        Raises:
            GpuEnergyError: the journal or the driver refuses.
        """
        uuid, driver = request.gpu_uuid, require_capability(self.controller, HasPowerLimit)
        entry = replace(
            self._entry(request.lease_id, request.owner, uuid, Control.POWER_LIMIT),
            saved_value=driver.power_limit_w(uuid),
            known_by=KnownBy.READ,
        )
        # Until the call has returned, the limit before it, the new one and one that the driver rounded may all be ours.
        self.journal.add([replace(entry, intended_value=None)])
        with self.journal.gpu_lock(uuid):
            try:
                driver.set_power_limit(uuid, request.power_limit_w)
            finally:  # set or refused, the limit that is there now is ours
                actual_w = driver.power_limit_w(uuid)
                self.journal.add([replace(entry, intended_value=actual_w)])
        return PowerLimit(actual_w)

    def set_power_profile(self, request: SetPowerProfile) -> PowerProfiles:
        """Add a workload power profile after journalling it, or remove ours; return the requested ones read back.

        The requests of other programs stay, and ours is not added beside them.

        Raises:
            GpuEnergyError: another program has requested profiles, or the journal or the driver refuses.
        """
        uuid, wanted = request.gpu_uuid, request.power_profile
        ours = self.journal.our_power_profile(uuid)
        if wanted is None and ours is None:
            return PowerProfiles(())
        driver = require_capability(self.controller, HasPowerProfiles)
        with self.journal.gpu_lock(uuid):
            requested = driver.requested_power_profiles(uuid)
            if ours is not None and ours != wanted:
                if ours in requested:
                    driver.clear_power_profile(uuid, ours)
                    requested = driver.requested_power_profiles(uuid)
                if ours in requested:  # the journal keeps it, so that each restore tries again
                    raise DriverError(f"workload power profile {ours} of {uuid} is still requested after its removal")
                self.journal.remove({(uuid, Control.POWER_PROFILE)})
            if wanted is not None and (ours != wanted or ours not in requested):
                if foreign := requested - {ours}:
                    raise GpuError(f"another program has requested workload power profile {_listed(foreign)} of {uuid}")
                entry = self._entry(request.lease_id, request.owner, uuid, Control.POWER_PROFILE)
                self.journal.add([replace(entry, intended_value=wanted)])
                driver.request_power_profile(uuid, wanted)
            requested = driver.requested_power_profiles(uuid)
        if wanted is not None and wanted not in requested:
            raise DriverError(f"the driver accepted workload power profile {wanted} of {uuid}, but does not list it")
        return PowerProfiles(tuple(sorted(requested)))

    def _entry(self, lease_id: str, owner: LeaseOwner, uuid: str, control: Control) -> JournalEntry:
        """Return the journal entry of a control that is about to be changed."""
        baseline, known_by = None, KnownBy.ASSUMED_DEFAULT
        if control is Control.SM_CLOCK_LOCK:
            identities = self.controller.identities()
            baseline = next(self.rules.baseline_of(i) for i in identities if i.gpu_uuid == uuid)
            foreign = self.foreign_clock_mhz(uuid)
            if foreign is not None and self.rules.restore_policy is not RestorePolicy.RESTORE:
                baseline, known_by = foreign, KnownBy.READ
            elif baseline is not None:
                known_by = KnownBy.CONFIGURED
        return JournalEntry(
            gpu_uuid=uuid,
            control=control,
            saved_value=baseline,
            known_by=known_by,
            lease_id=lease_id,
            job_id=owner.job_id,
            owner_pid=owner.pid,
            owner_uid=owner.uid,
            owner_start_ticks=process_start_ticks(owner.pid),
            driver=self.driver,
            world_path=None if self.world_path is None else str(self.world_path),
            recorded_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            restore_policy=self.rules.restore_policy,
        )


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
