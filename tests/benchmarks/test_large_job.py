"""The benchmark of a large job in a small configuration: the real exchange ends in one plan that all ranks follow."""

import asyncio
from statistics import median
from typing import Any

import pytest

from benchmarks.worlds.encoded_host import EncodedLargeJob
from gpuenergyd.core.job.rules import JobRules
from tests.support.large_job import JobSize, LargeJob

SIZE = JobSize(num_pp_ranks=3, num_tp_ranks=2, num_dp_ranks=2, num_microbatches=6)
MAX_ITERATIONS = 120
NUM_TUNED = 3
NUM_STEADY = 6


def trained(job: LargeJob) -> tuple[list[str], list[float]]:
    """Return the purposes of the first replica's iterations, and the bytes of its hosts under a tuned plan."""
    purposes: list[str] = []

    async def run() -> None:
        try:
            await job.run(num_tuned=NUM_STEADY, max_iterations=MAX_ITERATIONS, log=purposes.append)
        finally:
            await job.close()

    asyncio.run(run())
    hosts = job.hosts[: SIZE.num_pp_ranks]
    found = [str(line).partition("{")[2].partition(":")[0] for line in purposes[1:]]
    return found, [median(host.bytes_of_iteration[-NUM_STEADY:]) for host in hosts]


@pytest.mark.thorough
def test_hosts_of_which_only_messages_exist_send_what_real_ones_do() -> None:
    rules = JobRules(warmup_iterations=0, baseline_iterations=2)
    options: Any = {"rules": rules, "policy": "uniform", "max_slowdown_ratio": 0.2}

    purposes, num_bytes = trained(EncodedLargeJob(SIZE, **options))
    real_purposes, real_bytes = trained(LargeJob(SIZE, **options))

    # How many iterations pass while a policy computes depends on the machine.
    assert list(dict.fromkeys(purposes)) == list(dict.fromkeys(real_purposes))
    assert num_bytes == pytest.approx(real_bytes, rel=0.05)


def test_all_ranks_of_a_small_large_job_follow_one_plan_and_traffic_is_bounded() -> None:
    job = LargeJob(
        SIZE, rules=JobRules(warmup_iterations=0, baseline_iterations=2), policy="uniform", max_slowdown_ratio=0.2
    )

    async def run() -> list[str]:
        try:
            await job.run(num_tuned=NUM_TUNED, max_iterations=MAX_ITERATIONS)
            return [rank.plans.plan_for(job.index).plan_id for host in job.hosts for rank in host.ranks]
        finally:
            await job.close()

    followed = asyncio.run(run())

    assert job.index + 1 < MAX_ITERATIONS, "no plan was followed"
    assert len(followed) == SIZE.num_ranks
    assert len(set(followed)) == SIZE.num_dp_ranks, "one plan for each replica"
    assert all(0 < host.bytes_of_iteration[-1] < 65_536 for host in job.hosts)
    assert [host.daemon.leader_cpu_s > 0 for host in job.hosts] == [True, False, False] * SIZE.num_dp_ranks
