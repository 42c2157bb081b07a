"""Replicas of one training that several daemons lead have one slowdown budget, which the first one's host keeps."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.job.messages import JobPhase
from tests.support.carbon_host import HISTORY_DAYS
from tests.support.carbon_replicas import CarbonReplicas

BUDGET = 0.05
HOUR_S = 25.0
NUM_BEFORE_RESTART = 70
NUM_ITERATIONS = 130
DIRTY_FIRST = ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2)
CLEAN_FIRST = ([90.0] * 3 + [450.0] * 3) * 4 * (HISTORY_DAYS + 2)
"""A host elsewhere, whose dirty hours are the others' clean ones: decided apart, the training would always be slow."""


@dataclass
class Ran:
    """What happened to a training, and what its hosts say."""

    slowdown_ratio: float
    """Of all iterations of the training, by their true times."""
    phases: list[JobPhase]
    targets: list[dict[str, Any]]
    """By replica, the status of its target; empty without a carbon service."""
    planned_share: list[float]
    """By replica, the share of iterations that it ran under a plan."""


def trained(replicas: CarbonReplicas, num_iterations: int | None = None, *, restarted: int | None = None) -> Ran:
    """Train for some iterations, by default one window of the budget, and restart one leader's daemon if wanted."""

    async def run() -> Ran:
        await replicas.train(NUM_BEFORE_RESTART)
        if restarted is not None:
            await replicas.restart_leader(restarted)
        await replicas.train((num_iterations or NUM_BEFORE_RESTART + 1) - NUM_BEFORE_RESTART)
        while num_iterations is None and not replicas.status(0)["num_windows"]:
            await replicas.train(1)
        numbers = range(len(replicas.sites))
        found = Ran(
            replicas.slowdown_ratio(),
            [replicas.leading(dp_rank).job.phase for dp_rank in numbers],
            [replicas.status(dp_rank) for dp_rank in numbers],
            [replicas.planned_share(dp_rank) for dp_rank in numbers],
        )
        await replicas.close()
        return found

    return asyncio.run(run())


@pytest.mark.thorough
def test_replicas_follow_the_target_of_the_first_within_one_budget(tmp_path: Path) -> None:
    ran = trained(CarbonReplicas(tmp_path, [DIRTY_FIRST, CLEAN_FIRST], hour_s=HOUR_S, max_slowdown_ratio=BUDGET))

    assert ran.phases == [JobPhase.TUNED] * 2
    assert 0.3 * BUDGET < ran.slowdown_ratio <= BUDGET
    assert ran.targets[0]["slowdown_so_far_ratio"] == pytest.approx(ran.slowdown_ratio, abs=0.1 * BUDGET)
    assert "decided by its first replica's host" in ran.targets[1]["reason"]


@pytest.mark.thorough
@pytest.mark.parametrize("restarted", [0, 1])
def test_the_budget_outlives_the_daemon_of_either_leader(restarted: int, tmp_path: Path) -> None:
    ran = trained(
        CarbonReplicas(tmp_path, [DIRTY_FIRST, DIRTY_FIRST], hour_s=HOUR_S, max_slowdown_ratio=BUDGET),
        NUM_ITERATIONS,
        restarted=restarted,
    )

    assert ran.targets[restarted]["is_taken_over"]
    assert ran.targets[0]["slowdown_so_far_ratio"] == pytest.approx(ran.slowdown_ratio, abs=0.3 * BUDGET)
    assert "decided by its first replica's host" in ran.targets[1]["reason"]


@pytest.mark.thorough
def test_a_replica_on_a_host_without_a_carbon_service_follows_too(tmp_path: Path) -> None:
    replicas = CarbonReplicas(tmp_path, [DIRTY_FIRST, None], hour_s=HOUR_S, max_slowdown_ratio=BUDGET)
    ran = trained(replicas, NUM_ITERATIONS)

    assert all(share > 0.5 for share in ran.planned_share)  # the time account may close for some iterations
    assert ran.targets[0]["slowdown_so_far_ratio"] == pytest.approx(ran.slowdown_ratio, abs=0.2 * BUDGET)
    assert ran.targets[1] == {}
