"""Replicas of one training that several daemons lead have one slowdown budget, which the first one's host keeps."""

import asyncio
from pathlib import Path
from typing import Any

from gpuenergyd.core.job.messages import JobPhase
from tests.support.carbon_host import HISTORY_DAYS
from tests.support.carbon_replicas import CarbonReplicas

BUDGET = 0.05
HOUR_S = 25.0
DIRTY_FIRST = ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2)
CLEAN_FIRST = ([90.0] * 3 + [450.0] * 3) * 4 * (HISTORY_DAYS + 2)
"""A host elsewhere, whose dirty hours are the others' clean ones: decided apart, the training would always be slow."""


def trained(replicas: CarbonReplicas, num_iterations: int) -> dict[str, Any]:
    """Train, and return what the first replica's account says and how slow the training really was."""
    found: dict[str, Any] = {}

    async def run() -> None:
        await replicas.train(num_iterations)
        for dp, site in enumerate(replicas.sites):
            leader = replicas.leader(dp)
            assert leader is not None
            found[f"phase-{dp}"] = leader.job.phase
            found[f"target-{dp}"] = leader.job.target
            if site is not None:
                found[f"status-{dp}"] = site.targets.status(leader)["target"]
                found[f"records-{dp}"] = site.pipeline_targets()
        await replicas.close()

    asyncio.run(run())
    return found


def test_replicas_follow_the_target_of_the_first_within_one_budget(tmp_path: Path) -> None:
    replicas = CarbonReplicas(tmp_path, [DIRTY_FIRST, CLEAN_FIRST], hour_s=HOUR_S, max_slowdown_ratio=BUDGET)

    found = trained(replicas, 420)

    assert (found["phase-0"], found["phase-1"]) == (JobPhase.TUNED, JobPhase.TUNED)
    slowdown = replicas.slowdown_ratio(0, 420)
    print(
        slowdown,
        found["status-0"]["slowdown_so_far_ratio"],
        found["status-1"]["slowdown_so_far_ratio"],
        found["status-1"]["reason"],
        found["status-0"]["num_windows"],
        len(found["records-0"]),
        len(found["records-1"]),
    )
    assert 0.3 * BUDGET < slowdown <= BUDGET
