"""A host in virtual time whose jobs come from tables of time and energy by clock, under a power budget.

The decisions are the real ones (`PowerControl`, a power target policy, plans of the planner); GPUs, their sensors and
the delays until plans and ceilings take effect are arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd.core.policy_api.power import PowerDecision, PowerJobView, PowerTargetPolicy, PowerView
from gpuenergyd_policies.planning.frontier import Effort, frontier, solve
from gpuenergyd_policies.planning.plan_evaluation import evaluate_options
from gpuenergyd_power.rules.backstop import GpuPower
from gpuenergyd_power.rules.control import Division, PowerControl
from gpuenergyd_power.water_fill import WaterFill

SAMPLE_S = 0.1
CHECK_S = 0.25
CEILING_S = 0.05
"""Time until a ceiling takes effect."""
DECISION_S = 0.4
"""Time of the policies, from a new budget until all jobs have their targets and plans."""
ITERATIONS_AHEAD = 2
_LEAST_WORKING_W = 5.0
"""Least power above that of waiting at which a GPU works."""
LIMIT_RANGE_RATIO = (0.25, 1.0)
"""Lowest power limit relative to the default, which is the highest power of any table."""


@dataclass(frozen=True, slots=True)
class Running:
    """How an iteration runs: its time, and the energy of each of its GPUs from its begin until some instants."""

    time_s: float
    at_s: tuple[np.ndarray, ...]
    until_j: tuple[np.ndarray, ...]

    @property
    def power_w(self) -> float:
        return sum(float(own[-1]) for own in self.until_j) / self.time_s

    def mean_w(self, rank: int, begin_s: float, length_s: float) -> float:
        """Return the mean power of a GPU over some time, which may span iterations."""
        return (self._until(rank, begin_s + length_s) - self._until(rank, begin_s)) / length_s

    def sampled_w(self, rank: int, num_samples: int) -> np.ndarray:
        """Return the mean power of a GPU in each sample from the begin of an iteration on."""
        whole, rest_s = np.divmod(SAMPLE_S * np.arange(num_samples + 1), self.time_s)
        own = self.until_j[rank]
        until_j: np.ndarray = whole * own[-1] + np.interp(rest_s, self.at_s[rank], own)
        powers_w: np.ndarray = np.diff(until_j) / SAMPLE_S
        return powers_w

    def _until(self, rank: int, at_s: float) -> float:
        whole, rest_s = divmod(at_s, self.time_s)
        own = self.until_j[rank]
        return whole * float(own[-1]) + float(np.interp(rest_s, self.at_s[rank], own))


@dataclass(eq=False)
class TableJob:
    """A pipeline or a loop whose instructions have the times and energies of a table."""

    name: str
    graph: DependencyGraph
    profile: PipelineProfile
    copies: int = 1
    """GPUs of each stage, all alike: replicas in step."""
    energy_error: float = 0.0
    """By how much the policies believe in more energy than there is, as a ratio."""
    clocks_mhz: tuple[int, ...] = ()
    """Planned clock of each instruction."""
    iterations: float = 0.0
    phase_s: float = 0.0
    target_s: float | None = None
    plan_due_s: float | None = None
    _tops: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _runs: dict[tuple[tuple[int, ...], tuple[Ceiling, ...]], Running] = field(default_factory=dict)
    _plans: dict[float | None, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clocks_mhz = self.plan(None)

    def begun_anew(self) -> "TableJob":
        """Return the job before its first iteration; what was computed of its tables is shared."""
        anew = TableJob(self.name, self.graph, self.profile, self.copies, self.energy_error)
        anew._runs, anew._plans, anew._tops = self._runs, self._plans, self._tops
        anew.__dict__["points"] = self.points
        return anew

    @property
    def top_clocks_mhz(self) -> tuple[int, ...]:
        """The highest planned clock of each stage."""
        key = self.clocks_mhz
        if key not in self._tops:
            tops = [0] * self.graph.num_ranks
            for node, mhz in zip(self._nodes, key, strict=True):
                tops[node.pp_rank] = max(tops[node.pp_rank], mhz)
            self._tops[key] = tuple(tops)
        return self._tops[key]

    @property
    def num_gpus(self) -> int:
        return self.graph.num_ranks * self.copies

    @cached_property
    def lowest_clock_w(self) -> float:
        """The most that an instruction draws at its lowest clock."""
        lowest = (min(own.options, key=lambda o: o.sm_clock_mhz) for own in self.profile.classes.values())
        return max(option.energy_j / option.time_s for option in lowest)

    @cached_property
    def full_speed(self) -> Running:
        return self.running(self.plan(None))

    @cached_property
    def points(self) -> tuple[FrontierPoint, ...]:
        """The true frontier, with proven bounds, all copies together."""
        found = frontier(self.graph, self.profile, num_points=48, until_slowest=True).points
        return tuple(
            FrontierPoint(p.iteration_time_s, self.copies * p.energy_j, self.copies * (p.lower_bound_j or p.energy_j))
            for p in found
        )

    def plan(self, target_s: float | None) -> tuple[int, ...]:
        """Return the clocks of the plan for an iteration time; None: full speed."""
        if target_s not in self._plans:
            if target_s is None:
                clocks = tuple(self.profile[i.instruction_class].at_max_clock.sm_clock_mhz for i in self._nodes)
            else:
                solved = solve(self.graph, self.profile, deadline_s=target_s, forced=True, effort=Effort.QUICK)
                clocks = solved.sm_clocks_mhz
            self._plans[target_s] = clocks
        return self._plans[target_s]

    @property
    def _nodes(self) -> Sequence[Instruction]:
        return self.graph.instructions

    def running(self, clocks_mhz: tuple[int, ...], ceilings: tuple[Ceiling, ...] = ()) -> Running:
        """Return how iterations run with these clocks under ceilings, one for each stage."""
        key = clocks_mhz, ceilings
        if key not in self._runs:
            options = [
                self._under(i.instruction_class, mhz, ceilings[i.pp_rank] if ceilings else Ceiling())
                for i, mhz in zip(self._nodes, clocks_mhz, strict=True)
            ]
            self._runs[key] = self._evaluated(options)
        return self._runs[key]

    def _under(self, kind: InstructionClass, mhz: int, ceiling: Ceiling) -> ClockOption:
        """Return what a GPU runs at: the planned option, or the fastest that its ceiling permits."""
        options = self.profile[kind].options
        permitted = [
            option
            for option in options
            if option.sm_clock_mhz <= min(mhz, ceiling.sm_clock_mhz or mhz)
            and option.energy_j / option.time_s <= (ceiling.power_limit_w or 1e9)
        ]
        if permitted:
            return max(permitted, key=lambda option: option.sm_clock_mhz)
        slowest = min(options, key=lambda option: option.sm_clock_mhz)
        return _throttled(slowest, ceiling.power_limit_w, self.profile.blocking_power_w)

    def _evaluated(self, options: Sequence[ClockOption]) -> Running:
        evaluated = evaluate_options(self.graph, self.profile, options)
        blocking_w, end_s = self.profile.blocking_power_w, evaluated.iteration_time_s
        at_s, until_j = [], []
        for rank in range(self.graph.num_ranks):
            times, energies, now_s, now_j = [0.0], [0.0], 0.0, 0.0
            own = [
                (span, option)
                for node, span, option in zip(self._nodes, evaluated.timeline.spans, options, strict=True)
                if node.pp_rank == rank
            ]
            for span, option in sorted(own, key=lambda pair: pair[0].start_s):
                now_j += blocking_w * (span.start_s - now_s)
                times += [span.start_s, span.end_s]
                energies += [now_j, now_j + option.energy_j]
                now_s, now_j = span.end_s, now_j + option.energy_j
            at_s.append(np.array([*times, end_s]))
            until_j.append(np.array([*energies, now_j + blocking_w * (end_s - now_s)]))
        return Running(end_s, tuple(at_s), tuple(until_j))

    def tuned_time_s(self, asked_s: float | None) -> float:
        """Return the time that a tuned plan has: the requested one, else that of full speed, at less energy."""
        return self.full_speed.time_s if asked_s is None else asked_s

    def view(self) -> PowerJobView:
        believed = tuple(replace(p, energy_j=p.energy_j * (1 + self.energy_error)) for p in self.points)
        return PowerJobView(
            self.name,
            self.num_gpus,
            can_follow=True,
            frontier=believed,
            slows_for_power=True,
            full_speed_time_s=self.full_speed.time_s,
        )


def _throttled(slowest: ClockOption, limit_w: float | None, blocking_w: float) -> ClockOption:
    """Return the option below the table that a power limit leaves.

    A GPU lowers its clock beyond the table. There its voltage is at its floor, so that the power above that of waiting
    is in proportion to the clock, and the time is to its inverse.
    """
    power_w = slowest.energy_j / slowest.time_s
    if limit_w is None or power_w <= limit_w:
        return slowest
    left_w = max(limit_w, blocking_w + _LEAST_WORKING_W)
    time_s = slowest.time_s * (power_w - blocking_w) / (left_w - blocking_w)
    return ClockOption(slowest.sm_clock_mhz, time_s, left_w * time_s)


@dataclass
class PoweredHost:
    """GPUs, jobs, and the control of their power; `foreign_w` is what a GPU without a job draws."""

    jobs: Sequence[TableJob]
    num_gpus: int
    idle_w: float
    policy: PowerTargetPolicy = field(default_factory=WaterFill)
    host_power_w: float = 0.0
    control: PowerControl = field(default_factory=PowerControl)
    now_s: float = 0.0
    foreign_w: float = 0.0
    follows_targets: bool = True
    """Whether jobs do what they are asked: plans that lie draw full power."""
    trace: list[tuple[float, float, float | None]] = field(default_factory=list)
    """Instant, true mean power over the sample, and budget."""
    decision: PowerDecision | None = None
    _other_w: float | None = None
    _budget_w: float | None = None
    _in_force: dict[str, Ceiling] = field(default_factory=dict)
    _ordered: list[tuple[float, dict[str, Ceiling]]] = field(default_factory=list)
    _decision_due_s: float | None = None
    _checked_s: float = -1.0

    @cached_property
    def gpus(self) -> dict[tuple[str, int, int], str]:
        """UUID of each job's GPUs, by job, stage and copy."""
        found, k = {}, 0
        for job in self.jobs:
            for rank in range(job.graph.num_ranks):
                for copy in range(job.copies):
                    found[job.name, rank, copy] = f"GPU-{k}"
                    k += 1
        return found

    @cached_property
    def _owners(self) -> dict[str, tuple[TableJob, int]]:
        by_name = {job.name: job for job in self.jobs}
        return {uuid: (by_name[name], rank) for (name, rank, _), uuid in self.gpus.items()}

    @cached_property
    def limit_range_w(self) -> tuple[float, float]:
        most_w = max(
            option.energy_j / option.time_s
            for job in self.jobs
            for own in job.profile.classes.values()
            for option in own.options
        )
        return LIMIT_RANGE_RATIO[0] * most_w, most_w

    def draw_w(self) -> float:
        """Return the mean power at full speed."""
        idle = self.num_gpus - len(self.gpus)
        return self.host_power_w + idle * self.idle_w + sum(j.copies * j.full_speed.power_w for j in self.jobs)

    def speed(self) -> float:
        """Return the speed of all jobs now, in GPUs at full speed."""
        return sum(job.num_gpus * job.full_speed.time_s / self._running(job).time_s for job in self.jobs)

    def run(self, seconds: float, budget_w: float | None) -> None:
        for _ in range(round(seconds / SAMPLE_S)):
            if budget_w != self._budget_w:
                self._budget_w, self._decision_due_s = budget_w, self.now_s + DECISION_S
            self._step()

    # --- inside ---

    def _step(self) -> None:
        self._deliver()
        powers_w = self._advance()
        self.now_s += SAMPLE_S
        self.trace.append((self.now_s, self.host_power_w + sum(powers_w.values()), self._budget_w))
        readings = {uuid: self._reading(uuid, w) for uuid, w in powers_w.items()}
        occasion = self._occasion()
        fits = self.control.fits(self._budget_w, occasion, are_followed=self._are_followed)
        if self.control.observe(
            self.now_s, readings, budget_w=self._budget_w, host_power_w=self.host_power_w, fits=fits
        ):
            self._ordered.append((self.now_s + CEILING_S, dict(self.control.backstop.ceilings)))
        others_w = sum(w for uuid, w in powers_w.items() if uuid not in self._owners)
        if self._other_w is None or others_w > self._other_w or not self.control.backstop.is_cutting:
            self._other_w = others_w
        if self._budget_w is not None and self.now_s - self._checked_s >= CHECK_S:
            self._checked_s = self.now_s
            self.control.learn(self.now_s, self._budget_w, fits=fits)
            is_due = self.control.division is None or self.control.division.occasion != self._occasion()
            if is_due and self._decision_due_s is None:
                self._decision_due_s = self.now_s + DECISION_S

    @property
    def _are_followed(self) -> bool:
        return all(job.plan_due_s is None for job in self.jobs)

    def _occasion(self) -> tuple[float | None, int, int]:
        step_w = 0.01 * (self._budget_w or 100.0)
        return self._budget_w, round(3 * self.control.trim.excess_w / step_w), round((self._other_w or 0.0) / step_w)

    def _deliver(self) -> None:
        """Let ceilings, decisions and plans take effect that are due."""
        while self._ordered and self._ordered[0][0] <= self.now_s + 1e-9:
            self._in_force = self._ordered.pop(0)[1]
        if self._decision_due_s is not None and self.now_s >= self._decision_due_s - 1e-9:
            self._decision_due_s = None
            self._decide()
        for job in self.jobs:
            if job.plan_due_s is not None and self.now_s >= job.plan_due_s - 1e-9:
                job.plan_due_s = None
                if self.follows_targets:
                    self._switch(job, job.plan(job.target_s))

    def _decide(self) -> None:
        if self._budget_w is None:
            self.control.divided(None, has_changed=True)
            targets: Mapping[str, float | None] = {}
        else:
            view = PowerView(
                self._budget_w - self.control.trim.excess_w,
                tuple(job.view() for job in self.jobs),
                other_power_w=self.host_power_w + (self._other_w or 0.0),
                floor_speed_ratio=0.3,
            )
            decision = self.decision = self.policy.divide(view)
            asked = {share.job_id: share.iteration_time_s for share in decision.shares}
            targets = {job.name: job.tuned_time_s(asked[job.name]) for job in self.jobs}
            longest_s = max((t for t in targets.values() if t), default=0.0)
            division = Division(decision.predicted_w, longest_s, self._occasion())
            self.control.divided(division, has_changed=any(targets[j.name] != j.target_s for j in self.jobs))
        for job in self.jobs:
            target_s = targets.get(job.name)
            if target_s != job.target_s:
                job.target_s = target_s
                job.plan_due_s = self.now_s + ITERATIONS_AHEAD * self._running(job).time_s

    def _switch(self, job: TableJob, clocks_mhz: tuple[int, ...]) -> None:
        """Let a job go on with other clocks at the same place in its iteration."""
        share = job.phase_s / self._running(job).time_s
        job.clocks_mhz = clocks_mhz
        job.phase_s = share * self._running(job).time_s

    def _running(self, job: TableJob) -> Running:
        if not self._in_force:
            return job.running(job.clocks_mhz)
        ranks = range(job.graph.num_ranks)
        lowest = tuple(self._in_force.get(self.gpus[job.name, rank, 0], Ceiling()) for rank in ranks)
        return job.running(job.clocks_mhz, lowest)

    def _advance(self) -> dict[str, float]:
        """Let a sample's time pass; return the mean power of each GPU."""
        powers_w = {}
        for job in self.jobs:
            running = self._running(job)
            for rank in range(job.graph.num_ranks):
                power_w = running.mean_w(rank, job.phase_s, SAMPLE_S)
                for copy in range(job.copies):
                    powers_w[self.gpus[job.name, rank, copy]] = power_w
            job.iterations += SAMPLE_S / running.time_s
            job.phase_s = (job.phase_s + SAMPLE_S) % running.time_s
        for k in range(len(self.gpus), self.num_gpus):
            ceiling = self._in_force.get(f"GPU-{k}", Ceiling())
            foreign_w = self.foreign_w if k == self.num_gpus - 1 else 0.0
            ratio = 1.0 if ceiling.sm_clock_mhz is None else ceiling.sm_clock_mhz / self.clocks_mhz[0]
            power_w = max(self.idle_w, self.idle_w + (foreign_w - self.idle_w) * ratio**2)
            powers_w[f"GPU-{k}"] = min(power_w, ceiling.power_limit_w or 1e9)
        return powers_w

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The clocks of all GPUs, in descending order."""
        options = (o for job in self.jobs for own in job.profile.classes.values() for o in own.options)
        return tuple(sorted({option.sm_clock_mhz for option in options}, reverse=True))

    def _reading(self, uuid: str, power_w: float) -> GpuPower:
        ceiling = self._in_force.get(uuid, Ceiling())
        top_mhz = self.clocks_mhz[0]
        owner = self._owners.get(uuid)
        planned_mhz = top_mhz if owner is None else owner[0].top_clocks_mhz[owner[1]]
        mhz = min(planned_mhz, ceiling.sm_clock_mhz or top_mhz)
        return GpuPower(power_w, mhz, self.clocks_mhz, self.limit_range_w)
