"""Whether the savings that are printed are true, in worlds that change while they are measured.

    python benchmarks/runs/claims.py [--jobs 2000] [--iterations 300] [--seed 1] [--only KIND ...]
        [--gpu-model h200] [--json]

Plain loops in virtual time with the real state machine of a job: blocks at full speed, guard, time account, estimate.
The policy gives one plan, a clock of the whole iteration. Three plans by turns: one that saves, one that saves nothing
(the highest clock), and one that is slower than full speed and permitted. The truth is known for each iteration: its
time and energy with the plan's clock and at full speed, without noise, in the world of that iteration. What is printed
after the last iteration, of energy and of time, is compared with the mean over the iterations under the plan that the
estimate counts.

Worlds: nothing changes; loading that warms up or becomes slower; load of the host that rises and falls; power that
steps when the plan begins or later, as another process leaves or enters the GPU; a batch size that changes; another
process on the GPU now and then; throttling; the temperature of a day; a rank that stalls. Noise of an iteration: 1 % of
its time, 1 % of its energy.

coverage: share of printed 95 % intervals that contain the truth, energies and times. false claims: significant savings
of energy under plans that save nothing. claimed: share of the jobs that save at least 5 % in which a saving was
significant. faster: jobs of which is printed that they are faster, which no lower clock makes them.
false_claim_bound_ratio: upper 95 % bound of the share of false claims. As H200 there are 990 jobs, 30 of each kind and
plan, so 330 plans that save nothing. To exclude more than the permitted 2.5 %, 119 are needed if none is claimed to
save, and 308 if three are.
With `--gpu-model` jobs are of other curves, those of `random_gpu_work` on that model, some at their power limits.
Needs the checkout.
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scipy.stats import binomtest

from gpuenergyd.core.job.measurements.savings import Interval
from gpuenergyd.core.job.result_text import slowdown_text
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.uniform_settings import Setting, setting_plan
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import MODELS, DeviceParameters
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, a100_waiting_power_w
from tests.support.plain_jobs import AT_LIMIT, LOOP, GpuLoopWork, LoopWork, random_gpu_work, random_loop_work

TOP_MHZ = CLOCKS_MHZ[0]
NOISE_RATIO = 0.01
PERMITTED_RATIO = 0.10
"""Permitted slowdown of the plans that are slower; others are permitted what rounding costs."""
LARGE_SAVING = 0.05
COVERAGE, FALSE_CLAIMS, CLAIMED, ITERATIONS_TO_CLAIM = 0.94, 0.025, 0.5, 80
BINOMIAL_LEVEL = 0.001


@dataclass(slots=True)
class World:
    """What changes around a job; each function takes the index of an iteration."""

    time_factor: Callable[[int], float] = lambda _: 1.0
    """Of the work on the GPU."""
    power_factor: Callable[[int], float] = lambda _: 1.0
    host_factor: Callable[[int], float] = lambda _: 1.0
    """Of the time between two iterations, in which the GPU waits."""
    ceiling_mhz: Callable[[int], int] = lambda _: TOP_MHZ
    plan_begins_at: int | None = None
    """The first iteration under the plan, once it is known."""


def calm(_rng: random.Random) -> World:
    """Nothing changes."""
    return World()


def warming(rng: random.Random) -> World:
    """Loading is slow at first, as with cold caches."""
    extra, length = rng.uniform(0.5, 4.0), rng.uniform(5, 60)
    return World(host_factor=lambda i: 1 + extra * math.exp(-i / length))


def slowing(rng: random.Random) -> World:
    """Loading becomes slower all the time, as from a full disk."""
    extra = rng.uniform(0.001, 0.01)
    return World(host_factor=lambda i: 1 + extra * i)


def loaded_host(rng: random.Random) -> World:
    """The load of the host rises and falls at random."""
    levels = _levels(rng, lambda: rng.choice([1.0, 1.0, rng.uniform(1.2, 3.0)]), (10, 80))
    return World(host_factor=levels)


def power_step_with_plan(rng: random.Random) -> World:
    """Another process leaves the GPU as the plan begins, and perhaps returns."""
    less, until = rng.uniform(0.65, 0.95), rng.choice([10**9, rng.randint(20, 150)])
    world = World()

    def factor(index: int) -> float:
        begins = world.plan_begins_at
        return less if begins is not None and begins <= index < begins + until else 1.0

    world.power_factor = factor
    return world


def power_step_later(rng: random.Random) -> World:
    """The power of everything steps once."""
    at, factor = rng.randint(30, 250), rng.choice([rng.uniform(0.7, 0.95), rng.uniform(1.05, 1.4)])
    return World(power_factor=lambda i: factor if i >= at else 1.0)


def other_batch_size(rng: random.Random) -> World:
    """The work of an iteration changes once."""
    at, factor = rng.randint(20, 250), rng.choice([0.5, 0.75, 1.33, 2.0])
    return World(time_factor=lambda i: factor if i >= at else 1.0)


def neighbour(rng: random.Random) -> World:
    """Another process computes on the GPU now and then."""
    slower, watts = rng.uniform(1.05, 1.5), rng.uniform(1.02, 1.2)
    is_there = _levels(rng, lambda: float(rng.random() < 0.3), (5, 60))
    return World(
        time_factor=lambda i: slower if is_there(i) else 1.0, power_factor=lambda i: watts if is_there(i) else 1.0
    )


def throttling(rng: random.Random) -> World:
    """The GPU lowers its clock at times."""
    ceiling = rng.choice([mhz for mhz in CLOCKS_MHZ if 1000 <= mhz <= 1350])
    is_hot = _levels(rng, lambda: float(rng.random() < 0.3), (5, 50))
    return World(ceiling_mhz=lambda i: ceiling if is_hot(i) else TOP_MHZ)


def warm_day(rng: random.Random) -> World:
    """Power follows the temperature of the room."""
    period, height, phase = rng.uniform(100, 2000), rng.uniform(0.01, 0.05), rng.uniform(0, 2 * math.pi)
    return World(power_factor=lambda i: 1 + height * math.sin(2 * math.pi * i / period + phase))


def stalls(rng: random.Random) -> World:
    """Single iterations wait for a long time."""
    often, longer = rng.uniform(0.01, 0.08), rng.uniform(3, 20)
    stalled = {i for i in range(10_000) if rng.random() < often}
    return World(host_factor=lambda i: longer if i in stalled else 1.0)


KINDS: dict[str, Callable[[random.Random], World]] = {
    make.__name__: make
    for make in (calm, warming, slowing, loaded_host, power_step_with_plan, power_step_later, other_batch_size,
                 neighbour, throttling, warm_day, stalls)
}  # fmt: skip
HOLD_STILL = ("calm", "warm_day", "stalls")
"""Kinds in which the truth hardly changes, so that a saving must be claimed."""
PLANS = ("saves", "saves nothing", "slower")


def _levels(rng: random.Random, draw: Callable[[], float], lengths: tuple[int, int]) -> Callable[[int], float]:
    """Return a function that is constant for random lengths."""
    values: list[float] = []
    while len(values) < 10_000:
        values += [draw()] * rng.randint(*lengths)
    return values.__getitem__


@dataclass(slots=True)
class ChangingWork:
    """The work of a loop in the world of the present iteration."""

    own: LoopWork | GpuLoopWork
    world: World
    index: int = 0
    _own_at: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Actual clock, time and power by clock: those under a power limit are searched for."""

    def actual_clock_mhz(self, sm_clock_mhz: int) -> float:
        """Return the clock under the power limit."""
        return self._at(sm_clock_mhz)[0]

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        return self._at(sm_clock_mhz)[1] * self.world.time_factor(self.index)

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return what it draws at a clock."""
        return self._at(sm_clock_mhz)[2] * self.world.power_factor(self.index)

    def _at(self, mhz: int) -> tuple[float, float, float]:
        if mhz not in self._own_at:
            own = self.own
            actual_mhz = own.actual_clock_mhz(mhz) if isinstance(own, GpuLoopWork) else float(mhz)
            self._own_at[mhz] = actual_mhz, own.time_s(mhz), own.power_w(mhz)
        return self._own_at[mhz]


@dataclass(slots=True)
class OneClock:
    """A policy that knows one plan."""

    sm_clock_mhz: int

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the plan."""
        setting = Setting(Lever.CLOCKS, self.sm_clock_mhz)
        return setting_plan(view, setting, PlanPurpose.TUNED, policy="one", reason="the plan of the benchmark")


@dataclass(slots=True)
class ClaimingJob:
    """A job whose truth is known."""

    kind: str
    plan: str
    seed: int
    gpu_model: str | None = None
    training: VirtualTraining = field(init=False)
    work: ChangingWork = field(init=False)
    world: World = field(init=False)
    host_s: float = field(init=False)
    clock_mhz: int = field(init=False)
    top_mhz: int = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.kind} {self.plan} {self.seed}")
        self.world = KINDS[self.kind](rng)
        shares = (0.02, 0.1) if self.plan == "saves" else (0.3, 0.8)
        own: LoopWork | GpuLoopWork = random_loop_work(rng.randrange(2**32), shares)
        if self.gpu_model is not None:
            kind = "memory-bound" if self.plan == "saves" else rng.choice(["compute-bound", AT_LIMIT])
            own = random_gpu_work(rng.randrange(2**32), kind, gpu_model=self.gpu_model)
        self.work = ChangingWork(own, self.world)
        self.host_s = own.time_at_top_s * rng.uniform(0.02, 0.4)
        chosen_mhz = {"saves": rng.choice([1110, 1170, 1230]), "saves nothing": TOP_MHZ,
                      "slower": rng.choice([1200, 1260, 1305])}[self.plan]  # fmt: skip
        clocks_mhz = CLOCKS_MHZ if self.gpu is None else self.gpu.supported_sm_clocks_mhz
        self.top_mhz = clocks_mhz[0]
        self.clock_mhz = min(clocks_mhz, key=lambda mhz: abs(mhz - self._of_top(chosen_mhz)))
        self.training = VirtualTraining(
            LOOP,
            {(0, InstructionKind.F): self.work},
            OneClock(self.clock_mhz),
            max_slowdown_ratio=PERMITTED_RATIO,
            noise_ratio=NOISE_RATIO,
            energy_noise_ratio=NOISE_RATIO,
            waiting_power_w=lambda mhz: self._waiting_w(mhz) * self.world.power_factor(self.work.index),
            ceiling_of=lambda _rank, index: self._of_top(self.world.ceiling_mhz(index)),
            clocks_mhz=clocks_mhz,
            seed=rng.randrange(2**32),
        )

    @property
    def gpu(self) -> DeviceParameters | None:
        """The GPU, if it is of a model that was asked for."""
        return self.work.own.gpu if isinstance(self.work.own, GpuLoopWork) else None

    def _of_top(self, sm_clock_mhz: int) -> int:
        """Return a clock of the usual GPUs as the same share of the highest one."""
        return round(sm_clock_mhz * self.top_mhz / TOP_MHZ)

    def _waiting_w(self, sm_clock_mhz: int) -> float:
        return a100_waiting_power_w(sm_clock_mhz) if self.gpu is None else blocking_power_w(self.gpu, sm_clock_mhz)

    def run(self, num_iterations: int) -> dict[str, Any]:
        """Train; return what was printed at the end, the truth, and, if it counts, when a saving was significant."""
        training, first_claim = self.training, None
        is_awaited = self.plan == "saves" and self.kind in HOLD_STILL
        for index in range(num_iterations):
            self.work.index = index
            training.step_overhead_s = self.host_s * self.world.host_factor(index)
            if self.world.plan_begins_at is None:
                begins = [at for at, _, plan_id, _ in training.slices if "tuned" in plan_id]
                self.world.plan_begins_at = begins[0] if begins and begins[0] <= index else None
            training.run(1)
            if is_awaited and (saving := self._printed()[0]) is not None and saving.low > 0:
                first_claim, is_awaited = index + 1, False
        saving, slowdown = self._printed()
        estimate = training.job.estimate()
        since = 0 if estimate is None else estimate.since_iteration
        planned = [i for i, (_, _, plan_id) in enumerate(training.history) if "tuned" in (plan_id or "") and i >= since]
        times, energies = self._truth(planned) if planned else (0.0, 0.0)
        return {
            "kind": self.kind,
            "plan": self.plan,
            "saving": saving and (saving.low, saving.estimate, saving.high),
            "slowdown": slowdown and (slowdown.low, slowdown.estimate, slowdown.high),
            "true_saving": -energies,
            "true_slowdown": times,
            "first_claim": first_claim,
            "num_planned": len(planned),
        }

    def _printed(self) -> tuple[Interval | None, Interval | None]:
        estimate = self.training.job.estimate()
        return (None, None) if estimate is None else estimate.ratios

    def _truth(self, iterations: Sequence[int]) -> tuple[float, float]:
        """Return the mean relative differences of time and energy between the plan's clock and full speed."""
        pairs = [(self._exact(i, self.clock_mhz), self._exact(i, self.top_mhz)) for i in iterations]
        logs = [(math.log(own[0] / full[0]), math.log(own[1] / full[1])) for own, full in pairs]
        return math.expm1(fmean(t for t, _ in logs)), math.expm1(fmean(e for _, e in logs))

    def _exact(self, index: int, sm_clock_mhz: int) -> tuple[float, float]:
        self.work.index = index
        clock_mhz = min(sm_clock_mhz, self._of_top(self.world.ceiling_mhz(index)))
        work_s, host_s = self.work.time_s(clock_mhz), self.host_s * self.world.host_factor(index)
        wait_w = self._waiting_w(clock_mhz) * self.world.power_factor(index)
        return work_s + host_s, work_s * self.work.power_w(clock_mhz) + host_s * wait_w


def run_job(job: tuple[str, str, int, int, str | None]) -> dict[str, Any]:
    """Run one job."""
    kind, plan, seed, num_iterations, gpu_model = job
    return ClaimingJob(kind, plan, seed, gpu_model).run(num_iterations)


def figures_of(found: Sequence[Mapping[str, Any]], num_iterations: int) -> dict[str, Any]:
    """Return the figures of all jobs."""
    contained: dict[str, list[bool]] = defaultdict(list)
    for own in found:
        for printed, true in (("saving", "true_saving"), ("slowdown", "true_slowdown")):
            if own[printed] is not None and own["num_planned"]:
                low, _, high = own[printed]
                contained[own["kind"]].append(low <= own[true] <= high)
    everything = [hit for hits in contained.values() for hit in hits]
    false_claims = [o["saving"] is not None and o["saving"][0] > 0 for o in found if o["plan"] == "saves nothing"]
    large = [own for own in found if own["plan"] == "saves" and own["true_saving"] >= LARGE_SAVING]
    claimed = {
        kind: fmean(own["first_claim"] is not None for own in of_kind)
        for kind in HOLD_STILL
        if (of_kind := [own for own in large if own["kind"] == kind])
    }
    calm_claims = [own["first_claim"] or math.inf for own in large if own["kind"] == "calm"]
    faster = [own for own in found if own["slowdown"] is not None and "faster" in slowdown_text(own["slowdown"][1])]
    coverage = {kind: fmean(hits) for kind, hits in contained.items()}
    return {
        "num_jobs": len(found),
        "num_iterations": num_iterations,
        "coverage_ratio": fmean(everything) if everything else None,
        "coverage_by_kind": {kind: round(value, 4) for kind, value in coverage.items()},
        "coverage_min_ratio_by_kind": min(coverage.values(), default=None),
        "kinds_below": [kind for kind, hits in contained.items() if is_below(sum(hits), len(hits), 0.95)],
        "false_claim_ratio": fmean(false_claims) if false_claims else None,
        "false_claim_bound_ratio": largest_ratio(sum(false_claims), len(false_claims)) if false_claims else None,
        "num_faster_claims": len(faster),
        "claimed_by_kind": {kind: round(value, 3) for kind, value in claimed.items()},
        "claimed_min_ratio_by_kind": min(claimed.values(), default=None),
        "iterations_to_claim_median": finite(median(calm_claims)) if calm_claims else None,
        "half_width_median": median(half_widths) if (half_widths := [
            (own["saving"][2] - own["saving"][0]) / 2 for own in found if own["saving"] is not None
        ]) else None,
    }  # fmt: skip


def is_below(num_hits: int, num: int, ratio: float) -> bool:
    """Return whether so few hits say that the true ratio is lower, by a one-sided binomial test."""
    return float(binomtest(num_hits, num, ratio, alternative="less").pvalue) < BINOMIAL_LEVEL


def largest_ratio(num_hits: int, num: int) -> float:
    """Return the upper 95 % bound of the true ratio, by Clopper and Pearson."""
    return float(binomtest(num_hits, num, alternative="less").proportion_ci(0.95, method="exact").high)


def finite(value: float) -> float | None:
    """Return a number; None for infinity, which JSON has not."""
    return value if math.isfinite(value) else None


def is_met(figures: Mapping[str, Any]) -> bool:
    """Return whether all targets are met."""
    return (
        (figures["coverage_ratio"] or 0.0) >= COVERAGE
        and not figures["kinds_below"]
        and (figures["false_claim_ratio"] or 0.0) <= FALSE_CLAIMS
        and figures["num_faster_claims"] == 0
        and (figures["claimed_min_ratio_by_kind"] or 0.0) >= CLAIMED
        and (figures["iterations_to_claim_median"] or math.inf) <= ITERATIONS_TO_CLAIM
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--iterations", type=int, default=300, help="of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu-model", choices=sorted(MODELS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    cases = [(kind, plan) for kind in options.only for plan in PLANS]
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + options.jobs)
    jobs = [(*cases[k % len(cases)], own, options.iterations, options.gpu_model) for k, own in enumerate(seeds)]
    with ProcessPoolExecutor(options.workers) as pool:
        found = list(pool.map(run_job, jobs, chunksize=4))
    figures = figures_of(found, options.iterations)
    figures["is_met"] = is_met(figures)
    print(json.dumps(figures, indent=None if options.json else 2))
    return 0 if figures["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
