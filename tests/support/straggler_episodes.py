"""Stragglers in virtual time, on replicas whole on a host or on pipelines across hosts: how soon they are followed.

Each replica has a policy of its own and noise of its own. One replica becomes slower by a factor for some iterations,
again and again; without that (`ratio` 1) any following is a false alarm.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.straggling import response
from tests.support.straggling_pipelines import STAGE_WEIGHTS, StragglingPipelines
from tests.support.virtual_replicas import ReplicasOnHosts

NUM_MICROBATCHES = 3
FIRST_ITERATIONS = 64
"""Until the first plans, and some iterations of them."""
USUAL_ITERATIONS = 24
"""Iterations between two episodes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One training with some episodes of a straggler."""

    are_replicas_whole: bool
    ratio: float
    noise_ratio: float
    seed: int
    num_episodes: int = 4
    slow_iterations: int = 24
    is_whole_replica_slow: bool = True
    """Whether all stages of the replica are slower, or only the second half: of one host."""
    policy: Callable[[], ClockPolicy] = BubbleAware
    rules: JobRules | None = None
    """Of pipelines across hosts; None: the usual ones."""

    def slower(self, dp_rank: int, pp_rank: int, iteration: int) -> float:
        """Return how much slower a stage is in an iteration."""
        length = USUAL_ITERATIONS + self.slow_iterations
        number, position = divmod(iteration - FIRST_ITERATIONS, length)
        is_slow = 0 <= number < self.num_episodes and position >= USUAL_ITERATIONS
        is_stage = self.is_whole_replica_slow or pp_rank >= len(STAGE_WEIGHTS) // 2
        return self.ratio if is_slow and dp_rank == 1 and is_stage else 1.0

    @property
    def num_iterations(self) -> int:
        """Iterations in all, some after the last episode."""
        return FIRST_ITERATIONS + self.num_episodes * (USUAL_ITERATIONS + self.slow_iterations) + USUAL_ITERATIONS

    def episodes(self) -> list[tuple[int, int]]:
        """Return the first iteration of each episode, and the first one after it."""
        length = USUAL_ITERATIONS + self.slow_iterations
        begins = [FIRST_ITERATIONS + k * length + USUAL_ITERATIONS for k in range(self.num_episodes)]
        return [(begin, begin + self.slow_iterations) for begin in begins]


@dataclass
class Ran:
    """What the replica that is never slow did in a trial, iteration by iteration."""

    own_s: list[float] = field(default_factory=list)
    """What it took by itself, under its plan."""
    is_following: list[bool] = field(default_factory=list)
    """Whether a straggler set its pace."""
    iteration_s: list[float] = field(default_factory=list)

    def response(self, begin: int, end: int) -> tuple[int | None, int | None]:
        """Return the iterations until a straggler was followed and, after it, left; None if it was never followed."""
        return response(self.own_s, begin, end)

    @property
    def num_false_alarms(self) -> int:
        """How often it began to follow a straggler, where there was none."""
        return sum(
            now and not before for before, now in zip([False, *self.is_following], self.is_following, strict=False)
        )


def run_trial(trial: Trial) -> Ran:
    """Run a trial; pipelines across hosts need an event loop of their own."""
    return _run_whole(trial) if trial.are_replicas_whole else asyncio.run(_run_across(trial))


def _run_whole(trial: Trial) -> Ran:
    schedule = one_forward_one_backward(len(STAGE_WEIGHTS), NUM_MICROBATCHES)
    replicas = tuple(
        VirtualTraining(
            schedule,
            a100_stages(STAGE_WEIGHTS),
            trial.policy(),
            max_slowdown_ratio=0.05,
            noise_ratio=trial.noise_ratio,
            seed=2 * trial.seed + dp_rank,
            slowdown_of=partial(trial.slower, dp_rank),
        )
        for dp_rank in range(2)
    )
    both, ran = ReplicasOnHosts(replicas), Ran()
    for _ in range(trial.num_iterations):
        begun_s = replicas[0].now_s
        both.run(1)
        ran.own_s.append(both.own_ends_s[0] - begun_s)
        ran.iteration_s.append(replicas[0].history[-1][0])
        ran.is_following.append(replicas[0].job.target.straggler_time_s is not None)
    return ran


async def _run_across(trial: Trial) -> Ran:
    job = StragglingPipelines(
        trial.policy, seed=trial.seed, noise_ratio=trial.noise_ratio, slower=trial.slower, rules=trial.rules
    )
    try:
        await job.run_iterations(trial.num_iterations)
    finally:
        await job.close()
    return Ran(
        [iteration.own_s[0] for iteration in job.history],
        [iteration.pace_s[0] is not None for iteration in job.history],
        [iteration.time_s for iteration in job.history],
    )
