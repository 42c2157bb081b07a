"""A training of 2,048 ranks on 256 hosts: what a host sends and receives, what the leader computes, when a plan comes.

    python benchmarks/runs/large_job.py [--pp 64] [--tp 8] [--dp 4] [--microbatches 512] [--all-real] [--json]

Synthetic ranks in virtual time against the real code of members, leaders, daemons and policy host; see
tests/support/large_job.py for what is real. Two hosts of the first replica run their daemon's code, the leader's and
the last one. The messages of the others are computed once per stage by the code that makes them, and other replicas do
as the first (benchmarks/worlds/encoded_host.py); with `--all-real` all hosts are real, which takes much longer. Bytes
are those of the job's store, which is all that travels between hosts, with 64 for each operation. Seconds are of this
machine.
"""

import argparse
import asyncio
import resource
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from benchmarks.worlds.encoded_host import EncodedLargeJob
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from tests.support.large_job import ITERATION_S, JobSize, LargeJob

NUM_TUNED = 12
NUM_STEADY = 8
"""Last iterations, all long enough under one tuned plan that it has reached every rank, that count as steady."""
MAX_ITERATIONS = 200
MAX_BYTES = 65_536
MAX_LEADER_CPU_S = 0.5 * ITERATION_S
MAX_TIME_TO_PLAN_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-real", action="store_true", help="run the real code of every host and replica")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    size = JobSize(options.pp, options.tp, options.dp, options.microbatches)
    kind = LargeJob if options.all_real else EncodedLargeJob
    figures = asyncio.run(measure(kind(size, seed=options.seed))) | {"seed": options.seed}
    print_figures(figures, is_json=options.json)
    return 0 if figures["num_met"] == figures["num_targets"] else 1


async def measure(job: LargeJob) -> dict[str, Any]:
    """Train until a tuned plan has run for a while, and return the figures."""
    try:
        await job.run(
            num_tuned=NUM_TUNED,
            max_iterations=MAX_ITERATIONS,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return summary(job)
    finally:
        await job.close()


def summary(job: LargeJob) -> dict[str, Any]:
    """Return the figures of a job that has been trained."""
    first = next(
        (k for k, p in enumerate(job.policy.plans) if isinstance(p, ClockPlan) and p.purpose is PlanPurpose.TUNED), None
    )
    tuned = job.policy.plans[first] if first is not None else None
    predicted = tuned.predicted if isinstance(tuned, ClockPlan) else None
    is_steady = len(job.hosts[0].bytes_of_iteration) > NUM_STEADY
    leading = [host for host in job.hosts if any(rank.place.is_leader for rank in host.ranks)]
    following = [host for host in job.hosts if host not in leading]
    leader_cpu_s = max(mean(host.leader_cpu_of_iteration_s[-NUM_STEADY:]) for host in leading)
    plan_gap_ratio = predicted.energy_j / predicted.lower_bound_j - 1 if predicted and predicted.lower_bound_j else None
    figures: dict[str, Any] = {
        "ranks": job.size.num_ranks,
        "hosts": job.size.num_pp_ranks * job.size.num_dp_ranks,
        "hosts_with_real_daemons": job.num_real_hosts if isinstance(job, EncodedLargeJob) else len(job.hosts),
        "stages": job.size.num_pp_ranks,
        "microbatches": job.size.num_microbatches,
        "iterations": job.index + 1,
        "bytes_per_host_per_iteration_max": max(max(host.bytes_of_iteration[-NUM_STEADY:]) for host in job.hosts),
        "bytes_per_other_host_per_iteration_max": max(
            (max(host.bytes_of_iteration[-NUM_STEADY:]) for host in following), default=0
        ),
        "bytes_per_host_in_any_iteration_max": max(max(host.bytes_of_iteration) for host in job.hosts),
        "leader_cpu_s_per_iteration": leader_cpu_s,
        "time_to_plan_s": job.policy.answer_s[first] if first is not None else None,
        "time_to_plan_cpu_s": job.policy.answer_cpu_s[first] if first is not None else None,
        "plan_gap_to_bound_ratio": plan_gap_ratio,
        "predicted_saving_ratio": 1 - predicted.energy_j / predicted.baseline_energy_j
        if predicted and predicted.baseline_energy_j
        else None,
    }
    met = [
        is_steady and figures["bytes_per_host_per_iteration_max"] <= MAX_BYTES,
        leader_cpu_s <= MAX_LEADER_CPU_S,
        figures["time_to_plan_s"] is not None and figures["time_to_plan_s"] <= MAX_TIME_TO_PLAN_S,
    ]
    return figures | {"num_targets": len(met), "num_met": sum(met)}


if __name__ == "__main__":
    sys.exit(main())
