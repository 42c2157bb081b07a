"""A host in virtual time whose one job works and pauses, for limits of ramps: four A100s that follow a fitted law."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd_power.rules.backstop import GpuPower
from gpuenergyd_power.rules.ramp import RampJob, RampLimiter, RampStage

CLOCKS_MHZ = tuple(range(1410, 209, -15))
SAMPLE_S = 0.1
NUM_GPUS = 4
ITERATION_S = 1.6
IDLE_W = 52.0


def working_w(sm_clock_mhz: float) -> float:
    """Return the power of an A100-SXM that computes, by the law fitted to published tables."""
    voltage = 1 + 0.213 * max(0.0, sm_clock_mhz - 1104) / (1410 - 1104)
    return 34.6 + 0.26 * sm_clock_mhz * voltage**2


def waiting_w(sm_clock_mhz: float) -> float:
    """Return its power while it waits for a peer."""
    return 34.6 + 49.0 * (working_w(sm_clock_mhz) - 34.6) / (working_w(1410) - 34.6)


@dataclass
class RampedHost:
    """Four GPUs with one job, whose work begins and ends at given instants."""

    limiter: RampLimiter | None
    load: Callable[[float], float]
    """Share of the GPUs that work, by time; the others wait."""
    is_reported: bool = True
    """Whether iterations are reported."""
    total: int | None = None
    now_s: float = 0.0
    done: float = 0.0
    trace: list[tuple[float, float]] = field(default_factory=list)
    clocks_mhz: list[int] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)
    """Iterations done, by instant of the trace."""

    def run(self, seconds: float) -> None:
        """Let time pass; a ceiling takes effect one sample later."""
        clock = 1410 if self.limiter is None else self._ceiling()
        for _ in range(round(seconds / SAMPLE_S)):
            self.now_s += SAMPLE_S
            share = self.load(self.now_s) if self.total is None or self.done < self.total else 0.0
            each_w = (
                share * working_w(clock) + (1 - share) * waiting_w(clock) if share else min(IDLE_W, waiting_w(clock))
            )
            speed = 1 / (0.3 + 0.7 * 1410 / clock)
            self.done += (SAMPLE_S * speed / ITERATION_S) if share else 0.0
            self.trace.append((self.now_s, NUM_GPUS * each_w))
            self.clocks_mhz.append(clock)
            self.done_at.append(self.done)
            if self.limiter is not None:
                self._observe(each_w, clock, speed)
                clock = self._ceiling()

    def _observe(self, each_w: float, clock: int, speed: float) -> None:
        assert self.limiter is not None
        reading = GpuPower(each_w, clock, CLOCKS_MHZ, None)
        num = math.floor(self.done) if self.is_reported else 0
        left_s = None if self.total is None else max(0.0, (self.total - self.done) * ITERATION_S / speed)
        job = RampJob("job", tuple(f"GPU-{k}" for k in range(NUM_GPUS)), num, ITERATION_S if num else None, left_s)
        self.limiter.observe(self.now_s, {f"GPU-{k}": reading for k in range(NUM_GPUS)}, [job])

    def _ceiling(self) -> int:
        assert self.limiter is not None
        return self.limiter.ceilings.get("GPU-0", Ceiling(210 if not self.trace else None)).sm_clock_mhz or 1410

    def steepest_w(self, since_s: float = 0.0, until_s: float = math.inf, *, is_rise: bool = True) -> float:
        """Return the largest rise, or fall, of the mean power from one second to the next."""
        powers_w = [w for at_s, w in self.trace if since_s <= at_s <= until_s]
        n = round(1 / SAMPLE_S)
        means_w = [sum(powers_w[k : k + n]) / n for k in range(len(powers_w) - n + 1)]
        changes_w = [b - a for a, b in zip(means_w, means_w[n:], strict=False)]
        return max(changes_w, default=0.0) if is_rise else max((-change for change in changes_w), default=0.0)

    @property
    def stage(self) -> RampStage:
        assert self.limiter is not None
        return self.limiter.jobs["job"].stage


def steady_after(begin_s: float) -> Callable[[float], float]:
    """Return the load of a job that begins at an instant and has small bubbles."""
    return lambda now_s: 0.9 if now_s >= begin_s else 0.0
