"""The service `idle`: records what GPUs are used for and, where it is enabled, lowers those that only hold contexts.

The clock is a ceiling of the daemon for GPUs that nobody has leased: the GPU worker journals the state before the
first lock, and the death of any process restores it. The lease of a job, an administrator or a Zeus client lifts it
before the lease begins.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from socket import gethostname
from typing import Any

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.host_services import HostParts
from gpuenergyd.daemon.periodic import Periodic
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import GpuError, StoreError, UsageError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import USABLE_HEALTH, GpuSample, ListProcesses
from gpuenergyd_idle.account_file import opened_account, read_accounts, save_accounts
from gpuenergyd_idle.rules.control import IdleGpu, Order
from gpuenergyd_idle.rules.idle_spans import IdleSpans
from gpuenergyd_idle.rules.saving import ModelSaving
from gpuenergyd_idle.rules.use import WORKING, UseReading
from gpuenergyd_idle.store import UseRow, add_use
from gpuenergyd_idle.totals import UseTotals

log = logging.getLogger(__name__)

_PROCESSES_PERIOD_S = 5.0
_STORE_PERIOD_S = 60.0
_RETRY_S = 2.0
_LIFT_LIMIT_S = 5.0


@dataclass(slots=True)
class _Followed:
    """One GPU: its decisions, totals, and the processes that were last listed on it."""

    idle: IdleGpu
    totals: UseTotals = field(default_factory=UseTotals)
    num_processes: int | None = None
    held_until_s: float = 0.0


class IdleService:
    """The idle GPUs of this host; owned by the event loop."""

    def __init__(self, parts: HostParts) -> None:
        self._settings, self._gpus, self._jobs, self._ceilings = parts.settings, parts.gpus, parts.jobs, parts.ceilings
        self._options = idle_options(parts.settings.service_options.get("idle", {}))
        self._acts = self._options.enabled and not parts.settings.is_observing
        self._account_path = parts.settings.state_dir / "idle-accounts.json"
        self._saved = read_accounts(self._account_path) if self._acts else {}
        self._followed: dict[str, _Followed] = {}
        self._savings: dict[str, ModelSaving] = {}
        self._store_trouble: str | None = None
        self._periodic = Periodic()

    @staticmethod
    def check(settings: Settings) -> None:
        idle_options(settings.service_options.get("idle", {}))

    async def start(self) -> None:
        """Begin to list processes and to store hours."""
        if self._options.enabled and not self._acts:
            log.warning("[idle] enabled: no clock is lowered, since the daemon only observes")
        self._periodic.every(_PROCESSES_PERIOD_S, "processes of idle GPUs", self._list_processes)
        self._periodic.every(_STORE_PERIOD_S, "hours by use", self._store)
        if self._acts:
            self._periodic.every(_RETRY_S, "idle clocks", self._ceilings.retry)
        self._periodic.start()

    async def close(self) -> None:
        """Lift all clocks, since a daemon that hands its jobs over restores nothing, and store what is left."""
        self._periodic.close()
        self._acts = False
        for uuid in tuple(self._ceilings.idle_clocks):
            self._ceilings.set_idle_clock(uuid, None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ceilings.settled(), _LIFT_LIMIT_S)
        await self._store()

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Count the time of each reading, and lower or lift its GPU."""
        for sample in samples:
            gpu = self._gpus.get(sample.gpu_uuid)
            if gpu is not None and sample.read_mono_ns:
                self._follow(gpu, sample)

    def lift(self, gpu_uuids: Iterable[str], hold_s: float) -> tuple[str, ...]:
        """Lift GPUs, all without UUIDs, and leave them so for a time; return those that were lowered.

        Raises:
            GpuNotFoundError: this host has no such GPU; none is lifted.
        """
        wanted = [self._gpus[uuid].identity.gpu_uuid for uuid in gpu_uuids] or list(self._followed)
        lifted = []
        for uuid in wanted:
            followed = self._followed.get(uuid)
            if followed is None:
                continue
            followed.held_until_s = max(followed.held_until_s, time.monotonic() + hold_s)
            if uuid in self._ceilings.idle_clocks:
                lifted.append(uuid)
                self._ceilings.set_idle_clock(uuid, None)
                followed.idle.lost_clock("lifted by request")
        return tuple(lifted)

    @property
    def trouble(self) -> str | None:
        """Why idle GPUs cannot be lowered or lifted, or hours not be stored."""
        return (self._ceilings.trouble if self._acts else None) or self._store_trouble

    def status(self) -> Mapping[str, Any]:
        """Return use, clocks and savings of all GPUs."""
        gpus = [
            gpu_fields(gpu.identity, own.idle, own.totals, time.monotonic())
            for gpu in self._gpus
            if (own := self._followed.get(gpu.identity.gpu_uuid)) is not None
        ]
        options = {"is_enabled": self._options.enabled, "is_acting": self._acts, "after_s": self._options.after_s}
        lines = [f"GPU {shown['index']} lowered, {shown['reason']}" for shown in gpus if shown["is_lowered"]]
        return {"idle": {**options, "gpus": gpus, "lines": lines}}

    # --- inside ---

    def _follow(self, gpu: Gpu, sample: GpuSample) -> None:
        uuid, at_s = sample.gpu_uuid, sample.read_mono_ns / 1e9
        own = self._followed.get(uuid) or self._begin(gpu, at_s)
        idle = own.idle
        reading = UseReading(
            at_s,
            sample.utilization_ratio,
            sample.power_w,
            sample.sm_clock_mhz,
            own.num_processes,
            has_job=gpu.claim is not None,
            is_in_long_pause=self._jobs.is_in_long_pause(gpu),
        )
        has_lost_clock = idle.acts and idle.is_lowered and not idle.is_raised and uuid not in self._ceilings.idle_clocks
        if has_lost_clock and not reading.is_of_job:  # a job's lease has lifted it: a wake, which the account pays
            idle.lost_clock("its lower clock was lifted from elsewhere")
        order = idle.observe(reading, obstacle=self._obstacle(gpu, own, at_s))
        own.totals.observe(at_s, sample.power_w, idle)
        if order is None or not self._acts:
            return
        if not idle.is_raised:  # a bracket's changes are no news
            log.info("GPU %s: %s for idleness: %s", uuid, order, idle.reason)
        self._ceilings.set_idle_clock(uuid, idle.low_mhz if order is Order.LOWER else None)

    def _begin(self, gpu: Gpu, at_s: float) -> _Followed:
        uuid, clocks_mhz = gpu.identity.gpu_uuid, gpu.identity.supported_sm_clocks_mhz
        low_mhz = min(clocks_mhz, default=0)
        slow_ratio = 1.0 - low_mhz / max(clocks_mhz, default=1)
        account = opened_account(self._saved.get(uuid), slow_ratio, at_s)
        spans = IdleSpans(self._options.after_s, at_s)
        saving = self._savings.setdefault(gpu.identity.model_name, ModelSaving())
        found = self._followed[uuid] = _Followed(IdleGpu(low_mhz, account, spans, saving, acts=self._acts))
        return found

    def _obstacle(self, gpu: Gpu, own: _Followed, at_s: float) -> str | None:
        """Return why a GPU must not be lowered."""
        details = gpu.knobs.details
        obstacles = {
            "lifted by request": at_s < own.held_until_s,
            f"the GPU is {gpu.health}": self._acts and gpu.health not in USABLE_HEALTH,
            "the driver lists no clocks": not own.idle.low_mhz,
            "the settings permit no clocks": Lever.CLOCKS not in self._settings.levers,
            "its settings were not read yet": details is None,
            "MIG: its instances have several users": details is not None and details.is_mig_enabled,
            "it drives a display": details is not None and details.is_display_active,
            "another program has locked its clock": details is not None and details.foreign_sm_clock_mhz is not None,
        }
        return next((reason for reason, is_met in obstacles.items() if is_met), None)

    async def _list_processes(self) -> None:
        """Count the processes on GPUs that do not work now; on the others their work shows."""

        async def count(uuid: str, own: _Followed) -> None:
            try:
                own.num_processes = len((await self._ceilings.do(ListProcesses(uuid))).pids)
            except GpuError:
                own.num_processes = None

        due = (gpu for gpu in self._followed.items() if gpu[1].idle.use not in WORKING or gpu[1].num_processes is None)
        await asyncio.gather(*(count(*gpu) for gpu in due))

    async def _store(self) -> None:
        """Add the time since the last call to the hours in the history, and save the accounts."""
        host, hour = self._settings.host_name or gethostname(), datetime.now(tz=UTC)
        rows = [
            UseRow(host, uuid, self._gpus[uuid].identity.model_name, hour, use, total, followed.idle.saving.estimate())
            for uuid, followed in self._followed.items()
            for use, total in followed.totals.pop_unstored().items()
        ]
        now_s, accounts = time.monotonic(), {}
        for uuid, followed in self._followed.items():
            if followed.idle.acts:  # an observed GPU is charged for what would have been lost
                account = followed.idle.account
                accounts[uuid] = (account.lost_s, account.working_s, max(0.0, now_s - account.since_s))
        if not rows:
            return
        try:
            await asyncio.to_thread(add_use, self._settings.database_url, rows)
        except (StoreError, OSError) as error:
            self._store_trouble = f"hours by use cannot be stored: {error}"
            for row in rows:
                self._followed[row.gpu_uuid].totals.put_back(row.use, row.total)
        else:
            self._store_trouble = None
        if accounts:
            await asyncio.to_thread(save_accounts, self._account_path, self._saved | accounts)


def gpu_fields(identity: GpuIdentity, idle: IdleGpu, totals: UseTotals, now_s: float) -> dict[str, Any]:
    estimate, measured = idle.saving.estimate(), idle.saving.measured
    is_lowered = idle.acts and idle.is_lowered and not idle.is_raised
    return {
        "gpu_uuid": identity.gpu_uuid,
        "index": identity.index,
        "model_name": identity.model_name,
        "use": idle.use,
        "use_age_s": max(0.0, now_s - idle.use_since_s),
        "is_lowered": is_lowered,
        "lowered_sm_clock_mhz": idle.low_mhz if is_lowered else None,
        "reason": idle.reason,
        "num_lowerings": idle.num_lowerings if idle.acts else 0,
        "lost_s": idle.account.lost_s if idle.acts else 0.0,
        "allowed_lost_s": idle.account.allowed_s(now_s),
        "saving": None if estimate is None else {**asdict(estimate), "is_measured": measured is not None},
        "by_use": [{"use": use, **asdict(total)} for use, total in totals.by_use.items()],
    }


_LEAST_AFTER_S, _MOST_AFTER_S = 1.0, 86_400.0


@dataclass(frozen=True, slots=True)
class IdleOptions:
    """Whether idle GPUs are lowered, and after how long."""

    enabled: bool
    after_s: float


def idle_options(table: Mapping[str, object]) -> IdleOptions:
    """Return the options in a table.

    Raises:
        UsageError: an option is unknown, or its value is invalid.
    """
    if unknown := table.keys() - {"enabled", "after_s"}:
        raise UsageError(f"[idle]: unknown option {min(unknown)!r}; valid: enabled, after_s")
    enabled, after_s = table.get("enabled", False), table.get("after_s", 30.0)
    if not isinstance(enabled, bool):
        raise UsageError(f"[idle] enabled = {enabled!r}: must be true or false")
    if (
        isinstance(after_s, bool)
        or not isinstance(after_s, int | float)
        or not _LEAST_AFTER_S <= after_s <= _MOST_AFTER_S
    ):
        raise UsageError(f"[idle] after_s = {after_s!r}: must be from {_LEAST_AFTER_S:g} to {_MOST_AFTER_S:g}")
    return IdleOptions(enabled, float(after_s))
