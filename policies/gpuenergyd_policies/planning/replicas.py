"""Data-parallel replicas: all end an iteration together, so the job's frontier is the sum of theirs.

Each replica's least energy is convex in its iteration time, and every replica waits for the slowest; a common iteration
time T therefore costs the sum of E_r(T), from the slowest replica's T_min on. Beyond the time at which a
replica runs everything at its cheapest it can only wait, at the waiting power of its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.exact.tables import FloatArray
from gpuenergyd_policies.planning.frontier import Frontier


@dataclass(frozen=True, slots=True)
class Replica:
    """One pipeline replica: its frontier and what all its ranks draw while they wait."""

    frontier: Frontier
    waiting_power_w: float


@dataclass(frozen=True, slots=True)
class JointPoint:
    """A common iteration time of all replicas and the least energy they need for it together."""

    iteration_time_s: float
    energy_j: float


def add_frontiers(replicas: Sequence[Replica]) -> tuple[JointPoint, ...]:
    """Return the frontier of a job: every time at which it bends, fastest first; linear in between.

    Raises:
        TargetError: there is no replica.
    """
    if not replicas:
        raise TargetError("a job needs at least one replica; got none")
    fastest_s = max(replica.frontier.min_time_s for replica in replicas)
    bends_s = {b.iteration_time_s for replica in replicas for b in replica.frontier.breakpoints}
    times_s = np.array(sorted({fastest_s} | {t for t in bends_s if t > fastest_s}))
    energies_j = joint_energy_j(replicas, times_s)
    return tuple(JointPoint(float(t), float(e)) for t, e in zip(times_s, energies_j, strict=True))


def joint_energy_j(replicas: Sequence[Replica], iteration_times_s: Sequence[float] | FloatArray) -> FloatArray:
    """Return the least energy of all replicas together at common iteration times.

    Raises:
        TargetError: a time is below the T_min of some replica.
    """
    times_s = np.asarray(iteration_times_s, dtype=np.float64)
    total_j = np.zeros_like(times_s)
    for replica in replicas:
        own_s = np.array([b.iteration_time_s for b in replica.frontier.breakpoints])
        own_j = np.array([b.energy_j for b in replica.frontier.breakpoints])
        if len(times_s) and times_s.min() < own_s[0] * (1 - 1e-12):
            raise TargetError(f"iteration time {times_s.min():.6g} s: a replica takes at least {own_s[0]:.6g} s")
        waited_s = np.maximum(0.0, times_s - own_s[-1])
        total_j = total_j + np.interp(times_s, own_s, own_j) + replica.waiting_power_w * waited_s
    return total_j
