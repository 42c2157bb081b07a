"""The power service: keeps the host within its power budget, with targets for jobs and the backstop's ceilings.

A power target policy in the policy host decides the targets from the frontiers of all jobs, and each job's control loop
follows its target. The backstop uses only measured power. The service learns how much more than predicted the host
draws, and subtracts that from the budget before it is divided again.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd.core.job.messages import PowerCutChanged
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.core.policy_api.power import PowerDecision, PowerJobView, PowerView
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.host_services import HostParts
from gpuenergyd.daemon.jobs.audit_log import DAEMON
from gpuenergyd.daemon.periodic import Periodic
from gpuenergyd.daemon.processes.plugins import POWER_GROUP, check_policy_name
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE, WATER_FILL, Settings
from gpuenergyd.errors import JobError, UsageError
from gpuenergyd.gpu.link.messages import USABLE_HEALTH, GpuSample
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.daemon_codec import plain
from gpuenergyd_power.job_views import job_views
from gpuenergyd_power.messages import PowerBudgetRequest, PowerBudgetState
from gpuenergyd_power.requested import RequestFile, requested_budget
from gpuenergyd_power.rules.backstop import Backstop, GpuPower
from gpuenergyd_power.rules.budget import PowerBudget, budget_in_force
from gpuenergyd_power.rules.control import Division, PowerControl
from gpuenergyd_power.schedule_file import ScheduleFile, read_schedule
from gpuenergyd_power.shares import JobShares
from gpuenergyd_power.state import budget_state, budget_text, swing_fields
from gpuenergyd_power.swings import HostSwings

log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_RETRY_S = 2.0
"""Time after which a ceiling that could not be set or lifted is tried again."""
_REFRESH_S = 10.0
"""Time after which an unchanged budget is divided again, because frontiers are still being learned."""
_OLD_READING_S = 2.0
"""Age above which a reading is too old to show the present power."""
_SMOOTHING = 0.1
"""Weight of a new reading in the mean power of GPUs without a job."""
_OTHER_STEP_RATIO = 0.01
"""Change of the power of GPUs without a job, relative to the budget, at which the budget is divided again."""


class PowerService:
    """The power budget of this host; owned by the event loop."""

    def __init__(self, parts: HostParts) -> None:
        settings = self._settings = parts.settings
        self._gpus, self._jobs, self._ceilings = parts.gpus, parts.jobs, parts.ceilings
        self._divide_power, self._history = parts.divide_power, parts.history
        self.budget: PowerBudget | None = None
        self._schedule = ScheduleFile(settings.power_schedule_path)
        self._file = RequestFile(settings.power_budget_path)
        self._requested = self._file.read()
        self._save_trouble: str | None = None
        self._not_kept: str | None = None
        self._control = PowerControl()
        self.swings = HostSwings(settings, parts.jobs, parts.history.write)
        self._shares = JobShares(parts.jobs)
        self._other_w: float | None = None
        self._decided_for: Hashable = None
        self._decided_s = 0.0
        self._failure: str | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._periodic = Periodic()

    @staticmethod
    def check(settings: Settings) -> None:
        """Check that the power target policy is installed if needed, and that the schedule can be read."""
        if settings.service_options.get("power"):
            raise UsageError("[power]: no such table; settings of the power budget begin with power_")
        if settings.power_target != WATER_FILL or settings.power_budget_w is not None:
            check_policy_name(settings.power_target, POWER_GROUP)
        if settings.power_schedule_path is not None:
            read_schedule(settings.power_schedule_path)

    async def start(self) -> None:
        self._periodic.every(_PERIOD_S, "power budget", self._check)
        self._periodic.every(_RETRY_S, "power ceilings", self._ceilings.retry)
        self._periodic.start()

    async def close(self) -> None:
        self._periodic.close()
        if self._deciding is not None:
            self._deciding.cancel()
            await asyncio.gather(self._deciding, return_exceptions=True)

    # --- requests ---

    def put(self, request: PowerBudgetRequest, actor: str) -> PowerBudgetState:
        """Set or withdraw the requested budget with immediate effect; the caller has checked the permission.

        Raises:
            UsageError: a value is out of range.
            JobError: the daemon only observes.
        """
        budget = requested_budget(request, _now())
        if self._settings.is_observing and budget is not None:
            raise JobError(REFUSED_IN_OBSERVE)
        before, self._requested = self._requested, budget
        self._save_trouble = self._file.save(budget)
        self._record(actor, request.reason or "power budget requested", budget_text(before), budget_text(budget))
        self._update_budget()
        return self.state()

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Record the power of all GPUs, and compare the host's power with its budget."""
        if samples:
            self._observe_swings(max(sample.read_mono_ns for sample in samples) / 1e9)
        if samples and (self.budget is not None or self._backstop.is_cutting):
            self._observe(max(sample.read_mono_ns for sample in samples) / 1e9)

    # --- inside ---

    async def _check(self) -> None:
        """Check the schedule, the jobs, and whether readings are missing."""
        self._update_budget()
        self._notify_jobs()
        if self.budget is None:
            self._shares.clear("no power budget any more")
            return
        newest_s = max((g.sample.read_mono_ns / 1e9 for g in self._gpus if g.sample is not None), default=0.0)
        if time.monotonic() - newest_s > _OLD_READING_S:
            self._observe(time.monotonic())
        self._control.learn(time.monotonic(), self.budget.budget_w, fits=self._plans_fit)
        self._decide_soon()

    def _update_budget(self) -> None:
        budget = budget_in_force(self._settings.power_budget_w, self._requested, self._schedule.entries(), _now())
        if self._settings.is_observing:
            self._warn_of_limits_not_kept(budget)
            budget = None
        before, self.budget = self.budget, budget
        if budget == before:
            return
        log.info("power budget: %s (before: %s)", budget_text(budget), budget_text(before))
        if budget is None:
            self._shares.clear("no power budget any more")
            self._decided_for = None
            self._control.trim.excess_w, self._control.division = 0.0, None
        self._observe(time.monotonic())
        if budget is None:  # lift the limits of the shares, whether or not the backstop has acted
            self._set_ceilings()
        else:
            self._decide_soon()

    def _warn_of_limits_not_kept(self, budget: PowerBudget | None) -> None:
        """Log the budget or ramp limit that an observing daemon does not enforce, whenever that changes."""
        ramp_w_per_s, limits = self._settings.power_ramp_w_per_s, []
        if budget is not None:
            limits.append(f"power budget of {budget.budget_w:g} W")
        if ramp_w_per_s is not None:
            limits.append(f"power_ramp_w_per_s = {ramp_w_per_s:g}")
        not_kept = f"not in force: {' and '.join(limits)}: {REFUSED_IN_OBSERVE}" if limits else None
        if not_kept is not None and not_kept != self._not_kept:
            log.warning("%s", not_kept)
        self._not_kept = not_kept

    def _observe(self, now_s: float) -> None:
        was_cutting = self._backstop.is_cutting
        self._smooth_other_power()
        has_changed = self._control.observe(
            now_s,
            self._readings(now_s),
            budget_w=self.budget.budget_w if self.budget is not None else None,
            host_power_w=self._settings.carbon_host_power_w,
            fits=self._plans_fit,
        )
        if has_changed:
            self._set_ceilings()
            self._report_cut(was_cutting=was_cutting)

    def _observe_swings(self, now_s: float) -> None:
        """Measure the power of all GPUs, and limit its ramps."""
        samples = [gpu.sample for gpu in self._gpus]
        known_w = [s.power_w for s in samples if s is not None and s.power_w is not None and _is_recent(s, now_s)]
        self.swings.meter.observe(now_s, sum(known_w) if samples and len(known_w) == len(samples) else None)
        if self.swings.is_limiting and self.swings.limit(now_s, self._readings(now_s)):
            self._set_ceilings()
            self._notify_jobs()

    def _readings(self, now_s: float) -> dict[str, GpuPower]:
        levers = self._settings.levers
        return {gpu.identity.gpu_uuid: _gpu_power(gpu, now_s, levers) for gpu in self._gpus}

    def _report_cut(self, *, was_cutting: bool) -> None:
        """Notify the jobs, and record in the audit log when a cut begins or ends."""
        is_cutting = self._backstop.is_cutting
        self._notify_jobs()
        if is_cutting == was_cutting:
            return
        text, measured_w = budget_text(self.budget), self._backstop.measured_w or 0.0
        log.info("power %s: %.0f W, %s", "cut" if is_cutting else "cut ended", measured_w, text)
        before, after = ("planned", "lowered") if is_cutting else ("lowered", "planned")
        self._record(DAEMON, f"measured {measured_w:.0f} W, budget {text}", before, after)

    def _notify_jobs(self) -> None:
        """Tell each job whether its GPUs are lowered below its plan."""
        for runner in self._jobs:
            is_cut = any(
                uuid in self._backstop.ceilings or uuid in self.swings.ceilings for uuid in runner.job.ranks.gpu_uuids
            )
            if is_cut != runner.job.reports.cut.is_cut and not runner.job.is_ended:
                runner.handle(PowerCutChanged(is_cut))

    def _set_ceilings(self) -> None:
        """Set the lowest of the ceilings of the backstop, the ramp limiter and the jobs' shares."""
        ceilings = dict(self._backstop.ceilings)
        for uuid, ramp in self.swings.ceilings.items():
            own = ceilings.get(uuid, Ceiling())
            lower_mhz = min(mhz for mhz in (own.sm_clock_mhz, ramp.sm_clock_mhz) if mhz is not None)
            ceilings[uuid] = Ceiling(lower_mhz, own.power_limit_w)
        for uuid, limit_w in self._shares.limits_w.items() if self.budget is not None else ():
            own = ceilings.get(uuid, Ceiling())
            lower_w = limit_w if own.power_limit_w is None else min(limit_w, own.power_limit_w)
            ceilings[uuid] = Ceiling(own.sm_clock_mhz, lower_w)
        self._ceilings.set_ceilings(ceilings)

    @property
    def _backstop(self) -> Backstop:
        return self._control.backstop

    @property
    def _plans_fit(self) -> bool:
        """Whether all jobs follow their shares, whose predicted power is within the budget."""
        budget_w = self.budget.budget_w if self.budget is not None else None
        return self._control.fits(budget_w, self._occasion(), are_followed=self._shares.are_followed)

    def _smooth_other_power(self) -> None:
        """Track the power of GPUs without a job: upwards at once, downwards slowly, and not while they are cut."""
        powers_w = [
            None if gpu.sample is None else gpu.sample.power_w
            for gpu in self._gpus
            if gpu.claim is None or gpu.claim.is_lease
        ]
        other_w = sum(power_w for power_w in powers_w if power_w is not None)
        if self._other_w is None or other_w >= self._other_w:
            self._other_w = other_w
        elif not self._backstop.is_cutting and None not in powers_w:
            self._other_w += _SMOOTHING * (other_w - self._other_w)

    # --- decisions ---

    def _occasion(self) -> Hashable:
        """Return the conditions that a division depends on; when they change, the budget is divided again."""
        budget_w = self.budget.budget_w if self.budget is not None else 0.0
        facts = tuple(
            (v.job_id, v.can_follow, v.num_gpus, v.priority, v.full_speed_time_s is None) for v in self._views()
        )
        step_w = max(1.0, _OTHER_STEP_RATIO * budget_w)
        return budget_w, round(3 * self._control.trim.excess_w / step_w), round((self._other_w or 0.0) / step_w), facts

    def _views(self) -> tuple[PowerJobView, ...]:
        return job_views(self._jobs, self._gpus, can_limit=Lever.POWER_LIMITS in self._settings.levers)

    def _decide_soon(self) -> None:
        is_due = self._occasion() != self._decided_for or time.monotonic() - self._decided_s > _REFRESH_S
        if is_due and self._deciding is None:
            self._deciding = asyncio.get_running_loop().create_task(self._decide(), name="divide the power budget")

    async def _decide(self) -> None:
        try:
            budget, occasion = self.budget, self._occasion()
            if budget is None:
                return
            view = self._view(budget)
            reply = await self._divide_power(PowerQuery(self._settings.power_target, view))
            self._decided_for, self._decided_s = occasion, time.monotonic()
            if isinstance(reply, PolicyFailure):
                if reply.reason != self._failure:
                    log.warning("power target policy %r failed: %s", self._settings.power_target, reply.reason)
                self._failure = reply.reason
                return
            self._failure = None
            if self.budget == budget:
                self._apply(reply, budget)
        finally:
            self._deciding = None

    def _apply(self, decision: PowerDecision, budget: PowerBudget) -> None:
        has_changed = self._shares.apply(decision, budget_text(budget))
        longest_s = max((share.iteration_time_s or 0.0 for share in decision.shares), default=0.0)
        self._control.divided(Division(decision.predicted_w, longest_s, self._decided_for), has_changed=has_changed)
        self._set_ceilings()

    def _view(self, budget: PowerBudget) -> PowerView:
        return PowerView(
            budget_w=budget.budget_w - self._control.trim.excess_w,
            jobs=self._views(),
            other_power_w=self._settings.carbon_host_power_w + (self._other_w or 0.0),
            floor_speed_ratio=self._settings.power_floor_ratio,
        )

    # --- status ---

    @property
    def trouble(self) -> str | None:
        """Why the budget may not be kept; None if there is no problem."""
        if self.budget is None:
            return self._not_kept or self._schedule.trouble
        decision, failure = self._shares.decision, self._failure
        failed = f"power target policy {self._settings.power_target!r} failed: {failure}" if failure else None
        short = None
        if decision is not None and decision.least_w > self.budget.budget_w:
            least = f"{decision.least_w:.0f} W is the least that plans can reach"
            short = f"power budget of {self.budget.budget_w:g} W: {least}; power limits hold the rest"
        return self._ceilings.trouble or self._schedule.trouble or self._save_trouble or failed or short

    def state(self) -> PowerBudgetState:
        return budget_state(self._settings, self.budget, self._control, self._shares, self.trouble)

    def status(self) -> Mapping[str, Any]:
        return {"power": plain(self.state()), "swing": swing_fields(self.swings.meter)}

    def _record(self, actor: str, reason: str, before: str, after: str) -> None:
        self._history.write(ControlEventRecord(_now(), "power-budget", actor, None, None, reason, before, after))


def _gpu_power(gpu: Gpu, now_s: float, levers: Collection[Lever]) -> GpuPower:
    """Return what is known about a GPU now, and which of its settings may be changed."""
    sample = gpu.sample
    return GpuPower(
        power_w=sample.power_w if sample is not None and _is_recent(sample, now_s) else None,
        sm_clock_mhz=sample.sm_clock_mhz if sample is not None else None,
        supported_sm_clocks_mhz=gpu.identity.supported_sm_clocks_mhz,
        power_limit_range_w=gpu.view().power_limit_range_w if Lever.POWER_LIMITS in levers else None,
        can_change=gpu.health in USABLE_HEALTH,
        can_set_clocks=Lever.CLOCKS in levers,
    )


def _is_recent(sample: GpuSample, now_s: float) -> bool:
    return now_s - sample.read_mono_ns / 1e9 <= _OLD_READING_S


def _now() -> datetime:
    return datetime.now(tz=UTC)
