"""Computes the verdict of a proof from only its registration and raw data, so that everybody gets the same one.

Each round gives one log ratio per arm: its mean divided by that of the round's full-speed block. The mean of these
ratios over rounds has a Student interval. The unit is the block, not the iteration, since errors within a run are
correlated. All intervals have the confidence `CONFIDENCE`. There is no verdict if there are too few sound rounds, the
interval is wider than registered, or the data have any problem.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from gpuenergyd.core.job.measurements.savings import Interval
from gpuenergyd.count_text import count_text
from gpuenergyd_prove.proof.checks import counted, problems, why_void
from gpuenergyd_prove.proof.measurements import Block, energy_j
from gpuenergyd_prove.proof.outside_meter import Alignment, MeasurementLevel, alignment, measurement_level
from gpuenergyd_prove.proof.power_calculation import margin_factor
from gpuenergyd_prove.proof.registration import BASELINE_ARM, CONFIDENCE, LEAST_ROUNDS, ExclusionRules, Registration

_DIGITS = 6
"""Significant digits of a verdict; few, because mathematical libraries differ in the sixteenth."""


class Conclusion(StrEnum):
    """What a proof shows."""

    SAVES = "saves"
    """The arm uses less GPU energy and is not slower than registered."""
    SAVES_BUT_SLOWER = "saves, but may be slower than registered"
    NOT_SHOWN = "no saving shown"
    COSTS = "uses more energy"
    LOSSES_DIFFER = "losses differ"
    """The training did not compute the same results, so its energies cannot be compared."""
    NO_VERDICT = "no verdict"


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm compared with full speed, as ratios; None if not measured."""

    arm: str
    num_rounds: int
    saving: Interval | None
    slowdown: Interval | None
    host_saving: Interval | None
    losses: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion with its reasons, and the figures of every arm."""

    conclusion: Conclusion
    reasons: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    num_rounds: int
    num_void_rounds: int
    num_iterations: int
    level: MeasurementLevel
    alignment: Alignment | None
    is_simulated: bool

    @property
    def has_verdict(self) -> bool:
        return self.conclusion is not Conclusion.NO_VERDICT

    @property
    def sentence(self) -> str:
        prefix = "SIMULATED: " if self.is_simulated else ""
        claimed = next(iter(self.arms), None)
        if self.conclusion is Conclusion.NO_VERDICT or claimed is None or claimed.saving is None:
            return f"{prefix}no verdict: {'; '.join(self.reasons)}"
        text = f"{prefix}arm {claimed.arm!r}: {self.conclusion}; GPU energy per iteration"
        text += f" {_change(claimed.saving, -1.0)}"
        if claimed.slowdown is not None:
            text += f", time {_change(claimed.slowdown)}"
        host = f", host energy {_change(claimed.host_saving, -1.0)}" if claimed.host_saving is not None else ""
        return (
            f"{text}{host} ({100 * CONFIDENCE:.1f} % intervals, {count_text(self.num_rounds, 'round')}); losses"
            f" {claimed.losses}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, rounded to six digits."""
        return {
            "conclusion": str(self.conclusion),
            "sentence": self.sentence,
            "simulated": self.is_simulated,
            "reasons": list(self.reasons),
            "confidence": CONFIDENCE,
            "rounds": self.num_rounds,
            "void_rounds": self.num_void_rounds,
            "iterations": self.num_iterations,
            "arms": [
                {
                    "arm": result.arm,
                    "rounds": result.num_rounds,
                    "saving": _interval_dict(result.saving),
                    "slowdown": _interval_dict(result.slowdown),
                    "host_saving": _interval_dict(result.host_saving),
                    "losses": result.losses,
                }
                for result in self.arms
            ],
            "measurement_level": {"level": self.level.level, "missing": self.level.missing},
            "meter_alignment": None if self.alignment is None else {
                "lag_s": _rounded(self.alignment.lag_s),
                "lag_error_s": _rounded(self.alignment.lag_error_s),
                "gain": _rounded(self.alignment.gain),
                "gain_error": _rounded(self.alignment.gain_error),
                "offset_w": _rounded(self.alignment.offset_w),
                "correlation": _rounded(self.alignment.correlation),
                "readings": self.alignment.num_samples,
                "is_aligned": self.alignment.is_aligned,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _BlockMeans:
    """Means over the evaluated iterations of one block."""

    time_s: float
    gpu_energy_j: float
    host_energy_j: float | None
    num_iterations: int


def log_ratios(rounds: Sequence[Mapping[str, float]], arm: str) -> list[float]:
    """Return the log ratio of an arm to full speed for each round that has both."""
    return [
        math.log(values[arm] / values[BASELINE_ARM]) for values in rounds if arm in values and BASELINE_ARM in values
    ]


def gpu_energies_j(
    blocks: Sequence[Block], num_arms: int, rules: ExclusionRules, block_iterations: int = 1
) -> list[dict[str, float]]:
    """Return, for each round, the mean GPU energy per iteration of each arm; void blocks are left out."""
    means = [_means(block, rules, block_iterations, None) for block in blocks]
    return [
        {block.arm: mean.gpu_energy_j for block, mean in zip(blocks[k : k + num_arms], found, strict=True) if mean}
        for k in range(0, len(blocks), num_arms)
        if (found := means[k : k + num_arms])
    ]


def verdict(registration: Registration, blocks: Sequence[Block]) -> Verdict:
    reasons = list(problems(registration, blocks))
    rules, names = registration.rules, [arm.name for arm in registration.arms]
    aligned = alignment([(block.gpu_power, block.meter_power) for block in blocks])
    lag_s = aligned.lag_s if aligned is not None and aligned.is_aligned else None
    means = [_means(block, rules, registration.design.block_iterations, lag_s) for block in blocks]
    rounds = [dict(zip((block.arm for block in blocks[k : k + len(names)]), means[k : k + len(names)], strict=True))
              for k in range(0, len(blocks), len(names))]  # fmt: skip
    sound = [{arm: mean for arm, mean in values.items() if mean is not None} for values in rounds
             if len(values) == len(names) and all(mean is not None for mean in values.values())]  # fmt: skip
    num_void = len(rounds) - len(sound)
    if num_void > rules.max_void_ratio * registration.design.num_rounds:
        causes = {why for block in blocks if (why := why_void(block, rules, registration.design.block_iterations))}
        are_void = f"of {count_text(len(rounds), 'round')} {'is' if num_void == 1 else 'are'} void"
        reasons.append(f"{num_void} {are_void}: {' or '.join(sorted(causes))}")
    if len(sound) < LEAST_ROUNDS:
        reasons.append(f"{count_text(len(sound), 'sound round')}; at least {LEAST_ROUNDS} are needed")
    arms = tuple(_arm_result(name, sound, blocks) for name in names[1:])
    base = Verdict(
        conclusion=Conclusion.NO_VERDICT,
        reasons=tuple(reasons),
        arms=arms,
        num_rounds=len(sound),
        num_void_rounds=num_void,
        num_iterations=sum(mean.num_iterations for mean in means if mean is not None),
        level=_level(registration, blocks),
        alignment=aligned,
        is_simulated=registration.is_simulated,
    )
    return base if reasons else _concluded(base, registration)


def _concluded(found: Verdict, registration: Registration) -> Verdict:
    claimed = found.arms[0]
    if claimed.saving is None or claimed.slowdown is None:
        return replace(found, reasons=("the claimed arm has no energies",))
    half_width = (claimed.saving.high - claimed.saving.low) / 2
    wanted = registration.design.smallest_saving_ratio
    if half_width > wanted:
        return replace(found, reasons=(
            f"underpowered: the saving is known within ±{half_width:.2%}, and ±{wanted:.2%} was registered",
        ))  # fmt: skip
    if claimed.losses.startswith("differ"):
        conclusion = Conclusion.LOSSES_DIFFER
    elif claimed.saving.high < 0:
        conclusion = Conclusion.COSTS
    elif claimed.saving.low <= 0:
        conclusion = Conclusion.NOT_SHOWN
    elif claimed.slowdown.high > registration.max_slowdown_ratio:
        conclusion = Conclusion.SAVES_BUT_SLOWER
    else:
        conclusion = Conclusion.SAVES
    return replace(found, conclusion=conclusion)


def _means(block: Block, rules: ExclusionRules, block_iterations: int, lag_s: float | None) -> _BlockMeans | None:
    if why_void(block, rules, block_iterations) is not None:
        return None
    kept = counted(block, rules)
    host_j = None
    if lag_s is not None:
        parts = [
            energy_j(block.meter_power, sample.begun_at_s + lag_s, sample.begun_at_s + sample.time_s + lag_s)
            for sample in kept
        ]
        host_j = math.fsum(part for part in parts if part is not None) / len(parts) if None not in parts else None
    return _BlockMeans(
        time_s=fmean(sample.time_s for sample in kept),
        gpu_energy_j=fmean(sample.gpu_energy_j for sample in kept if sample.gpu_energy_j is not None),
        host_energy_j=host_j,
        num_iterations=len(kept),
    )


def _arm_result(arm: str, rounds: Sequence[Mapping[str, _BlockMeans]], blocks: Sequence[Block]) -> ArmResult:
    def of(values: Mapping[str, _BlockMeans], name: str) -> dict[str, float]:
        found = {key: getattr(mean, name) for key, mean in values.items()}
        return {key: value for key, value in found.items() if value is not None}

    energies = log_ratios([of(values, "gpu_energy_j") for values in rounds], arm)
    times = log_ratios([of(values, "time_s") for values in rounds], arm)
    hosts = log_ratios([of(values, "host_energy_j") for values in rounds], arm)
    return ArmResult(
        arm=arm,
        num_rounds=len(energies),
        saving=_saving(_mean_interval(energies)),
        slowdown=_mean_interval(times),
        host_saving=_saving(_mean_interval(hosts)) if len(hosts) == len(energies) else None,
        losses=_losses(arm, blocks),
    )


def _mean_interval(logs: Sequence[float]) -> Interval | None:
    if len(logs) < LEAST_ROUNDS:
        return None
    middle, margin = fmean(logs), margin_factor(len(logs)) * stdev(logs)
    return Interval(*(math.expm1(value) for value in (middle, middle - margin, middle + margin)))


def _saving(change: Interval | None) -> Interval | None:
    return None if change is None else Interval(-change.estimate, -change.high, -change.low)


def _losses(arm: str, blocks: Sequence[Block]) -> str:
    """Return how the losses of an arm compare with those of full-speed runs, iteration by iteration."""
    full_speed = [block.losses for block in blocks if block.arm == BASELINE_ARM]
    own = [block.losses for block in blocks if block.arm == arm]
    reference = next((losses for losses in full_speed if losses), None)
    if reference is None or not any(own):
        return "not compared: none were reported"
    if not all(own) or not all(full_speed):
        return "not compared: some blocks have none"
    if all(_largest_difference(losses, reference) == 0.0 for losses in (*own, *full_speed)):
        return "identical"
    spread = max(_largest_difference(losses, reference) for losses in full_speed)
    largest = max(min(_largest_difference(losses, other) for other in full_speed) for losses in own)
    if largest <= spread:
        return f"within the spread of full-speed runs ({largest:.1e} of {spread:.1e})"
    return f"differ by {largest:.1e}; full-speed runs by {spread:.1e}"


def _largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference at common iterations, relative to the largest loss; infinite if none is common."""
    pairs = list(zip(a, b, strict=False))
    scale = max((abs(y) for _, y in pairs), default=0.0) or 1.0
    return max((abs(x - y) / scale for x, y in pairs), default=math.inf)


def _level(registration: Registration, blocks: Sequence[Block]) -> MeasurementLevel:
    gaps = [b.at_s - a.at_s for block in blocks for a, b in pairwise(block.meter_power)]
    covered_s = math.fsum(
        block.meter_power[-1].at_s - block.meter_power[0].at_s for block in blocks if block.meter_power
    )
    run_s = math.fsum(block.ended_at_s - block.begun_at_s for block in blocks)
    return measurement_level(
        registration.meters, period_s=median(gaps) if gaps else None, covered_s=covered_s, run_s=run_s
    )


def _change(interval: Interval, sign: float = 1.0) -> str:
    """Return a relative change in words; savings are changes with the opposite sign."""
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"{100 * sign * interval.estimate:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})"


def _interval_dict(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {name: _rounded(getattr(interval, name)) for name in ("estimate", "low", "high")}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
