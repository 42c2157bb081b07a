"""Power of all GPUs of a pipeline over an iteration: a step function, its peak, and its peak mean over a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpuenergyd.core.pipeline.timeline import Timeline

_SAME_TIME_S = 1e-9
"""Events closer than this happen at once: an instruction that begins when another ends does not overlap with it."""


@dataclass(frozen=True, slots=True)
class PowerWave:
    """Total power of the GPUs of one iteration, waiting included; iterations follow each other without a gap.

    `powers_w[k]` holds from `times_s[k]` to `times_s[k + 1]`; the last of `times_s` is the end of the iteration.
    """

    times_s: tuple[float, ...]
    powers_w: tuple[float, ...]

    @property
    def iteration_time_s(self) -> float:
        """Length of the iteration."""
        return self.times_s[-1]

    @property
    def energy_j(self) -> float:
        """Energy of the iteration."""
        return sum(w * (b - a) for w, (a, b) in zip(self.powers_w, pairwise(self.times_s), strict=True))

    @property
    def mean_w(self) -> float:
        """Mean power over the iteration."""
        return self.energy_j / self.iteration_time_s if self.iteration_time_s > 0 else 0.0

    @property
    def peak_w(self) -> float:
        """Largest power at any instant."""
        return max(self.powers_w, default=0.0)

    def peak_mean_w(self, window_s: float) -> float:
        """Return the largest mean power over any window of this length, which may span iterations.

        Args:
            window_s: length in seconds; 0 is the peak at an instant.
        """
        if window_s <= 0 or self.iteration_time_s <= 0:
            return self.peak_w
        whole, rest_s = divmod(window_s, self.iteration_time_s)
        if rest_s <= _SAME_TIME_S:
            return self.mean_w
        times_s = np.array(self.times_s)
        energies_j = np.concatenate(([0.0], np.cumsum(np.array(self.powers_w) * np.diff(times_s))))
        twice_s = np.concatenate((times_s, self.iteration_time_s + times_s[1:]))
        twice_j = np.concatenate((energies_j, energies_j[-1] + energies_j[1:]))
        # The mean is piecewise linear in the window's begin: it is largest where an end of the window meets a step.
        begins_s = np.concatenate((times_s[:-1], np.mod(times_s[:-1] - rest_s, self.iteration_time_s)))
        in_rest_j = np.interp(begins_s + rest_s, twice_s, twice_j) - np.interp(begins_s, twice_s, twice_j)
        return float((whole * self.energy_j + in_rest_j.max()) / window_s)


def power_wave(planned: Timeline, powers_w: Sequence[float], blocking_power_w: float) -> PowerWave:
    """Return the power wave of a timeline.

    Args:
        planned: the timeline; ranks wait whenever no instruction runs on them.
        powers_w: mean power of each node of the timeline's graph while it runs.
        blocking_power_w: power of a rank that waits.
    """
    spans = zip(planned.spans, powers_w, strict=True)
    changes = [(span.start_s, span.end_s, power_w - blocking_power_w) for span, power_w in spans]
    at_s = np.array([time_s for begin_s, end_s, _ in changes for time_s in (begin_s, end_s)])
    by_w = np.array([change_w for _, _, more_w in changes for change_w in (more_w, -more_w)])
    order = np.argsort(at_s, kind="stable")
    at_s, by_w = at_s[order], by_w[order]
    is_new = np.concatenate(([True], np.diff(at_s) > _SAME_TIME_S)) if len(at_s) else np.array([], dtype=bool)
    group = np.cumsum(is_new) - 1
    steps_s = at_s[is_new]
    levels_w = planned.num_ranks * blocking_power_w + np.cumsum(np.bincount(group, weights=by_w))
    times_s, levels = steps_s.tolist(), levels_w.tolist()
    if not times_s or times_s[0] > _SAME_TIME_S:
        times_s, levels = [0.0, *times_s], [planned.num_ranks * blocking_power_w, *levels]
    if planned.iteration_time_s > times_s[-1] + _SAME_TIME_S:
        return PowerWave((*times_s, planned.iteration_time_s), tuple(levels))
    # The last step is the end of the iteration.
    return PowerWave((*times_s[:-1], planned.iteration_time_s), tuple(levels[:-1]))
