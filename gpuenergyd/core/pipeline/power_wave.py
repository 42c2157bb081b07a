"""Power of all GPUs of a pipeline over an iteration: a step function, its peak, and its peak mean over a window."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
        return self.times_s[-1]

    @property
    def energy_j(self) -> float:
        return sum(self._step_energies_j())

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
        before_j = [0.0, *accumulate(self._step_energies_j())]
        # The mean is piecewise linear in the window's begin: it is largest where an end of the window meets a step.
        starts_s = self.times_s[:-1]
        begins_s = [*starts_s, *((time_s - rest_s) % self.iteration_time_s for time_s in starts_s)]
        in_rest_j = (self._until_j(at_s + rest_s, before_j) - self._until_j(at_s, before_j) for at_s in begins_s)
        return (whole * self.energy_j + max(in_rest_j)) / window_s

    def _step_energies_j(self) -> list[float]:
        return [w * (b - a) for w, (a, b) in zip(self.powers_w, pairwise(self.times_s), strict=True)]

    def _until_j(self, at_s: float, before_j: Sequence[float]) -> float:
        """Return the energy from the begin of an iteration until a time in it or in the next."""
        whole = at_s >= self.iteration_time_s
        at_s -= whole * self.iteration_time_s
        step = min(bisect_right(self.times_s, at_s), len(self.powers_w)) - 1
        return whole * before_j[-1] + before_j[step] + self.powers_w[step] * (at_s - self.times_s[step])


def power_wave(planned: Timeline, powers_w: Sequence[float], blocking_power_w: float) -> PowerWave:
    """Return the power wave of a timeline.

    Args:
        planned: the timeline; ranks wait whenever no instruction runs on them.
        powers_w: mean power of each node of the timeline's graph while it runs.
        blocking_power_w: power of a rank that waits.
    """
    changes = sorted(
        change
        for span, power_w in zip(planned.spans, powers_w, strict=True)
        for change in ((span.start_s, power_w - blocking_power_w), (span.end_s, blocking_power_w - power_w))
    )
    times_s, levels_w = [0.0], [planned.num_ranks * blocking_power_w]
    for at_s, change_w in changes:
        if at_s > times_s[-1] + _SAME_TIME_S:
            times_s.append(at_s)
            levels_w.append(levels_w[-1])
        levels_w[-1] += change_w
    if planned.iteration_time_s > times_s[-1] + _SAME_TIME_S:
        return PowerWave((*times_s, planned.iteration_time_s), tuple(levels_w))
    # The last step is the end of the iteration.
    return PowerWave((*times_s[:-1], planned.iteration_time_s), tuple(levels_w[:-1]))
