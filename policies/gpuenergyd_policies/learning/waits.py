"""How long a training loop waits for gradients or data, and below which clock such a wait gets longer.

Such a phase takes the same time at every clock, until a low one shows that something computes in it after all: the
kernels of a collective may become the limit. It draws what a waiting GPU draws.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.policy_api.policy import GpuView

LOWEST_WAIT_RATIO = 0.3
"""Lowest clock of a wait for other ranks, as a share of the maximum clock. Below the voltage knee power falls with the
clock alone, and most of it is static then. A wait for data runs nothing and has no such limit."""
_RECENT = 16
"""Iterations whose waits tell how long they are."""
_QUANTILE = 0.25
"""Waits for other ranks come on top of the usual time, and a faster clock must be back before a wait ends."""
_SLOWER_RATIO = 0.1
"""Share of its time by which a phase that waits may be longer at low clocks: at clocks lower by twice as much, one that
computes is longer by more than that."""


@dataclass(frozen=True, slots=True)
class WaitingPhase:
    """A phase that waits: its usual time, and the clocks that plans may use, the maximum first."""

    key: InstructionClass
    time_s: float
    clocks_mhz: tuple[int, ...]


def waits_seen(
    observations: Sequence[IterationObservation], gpus: Sequence[GpuView]
) -> dict[InstructionClass, WaitingPhase]:
    """Return the phases that wait, without those that take clearly longer at low clocks; observations in order."""
    samples: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for sample in (s for o in observations if o.is_regular for s in o.instruction_samples):
        if sample.kind.is_wait:
            samples[sample.instruction_class].append(sample)
    found = {key: _wait(key, own, gpus[key.pp_rank].supported_sm_clocks_mhz) for key, own in samples.items()}
    return {key: wait for key, wait in found.items() if wait is not None}


def _wait(
    key: InstructionClass, samples: Sequence[InstructionSample], supported_mhz: Sequence[int]
) -> WaitingPhase | None:
    """Return the phase; None if it computes.

    Other ranks that run slow clocks make a wait longer at any clock of this one, so that a single usual time at a low
    clock speaks for all above it.
    """
    times_s: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        times_s[sample.main_share.sm_clock_mhz].append(sample.time_s)
    top_mhz = max(times_s)
    fast_s = float(np.quantile(times_s[top_mhz], _QUANTILE))
    slow_s = [own for mhz, at in times_s.items() if mhz <= (1 - 2 * _SLOWER_RATIO) * top_mhz for own in at]
    most_s = (1 + _SLOWER_RATIO) * fast_s
    if slow_s and float(np.quantile(slow_s, _QUANTILE)) > most_s:
        return None
    too_slow_mhz = _highest_too_slow_mhz(times_s, most_s)
    least_mhz = LOWEST_WAIT_RATIO * max(supported_mhz) if key.kind.waits_for_ranks else 0.0
    clocks = tuple(mhz for mhz in supported_mhz if mhz >= least_mhz and mhz > too_slow_mhz)
    time_s = float(np.quantile([sample.time_s for sample in samples[-_RECENT:]], _QUANTILE))
    return WaitingPhase(key, max(time_s, 1e-6), clocks or (max(supported_mhz),))


def _highest_too_slow_mhz(times_s: Mapping[int, Sequence[float]], most_s: float) -> float:
    """Return the highest clock at, and below which, no iteration was as fast as usual; 0 without one."""
    usual_mhz = min((mhz for mhz, own_s in times_s.items() if min(own_s) <= most_s), default=max(times_s))
    return max((mhz for mhz in times_s if mhz < usual_mhz), default=0)
