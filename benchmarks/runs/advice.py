"""Advice to plain loops: what it says a permitted slowdown would save, against what the job then saves.

    python benchmarks/runs/advice.py [--jobs 20] [--policy uniform] [--json]

Seeded jobs in virtual time, each one instruction per iteration on a GPU whose curves vary as published ones do
(voltage, knee, static power), with 0.2 % noise of time and 0.5 % of energy. The share of time that depends on the clock
is 0.7 to 1, which the prediction assumes too, or 0.4 to 0.7, which it does not. Each job runs first without a permitted
slowdown, which gives the predicted advice; then with 1, 2 and 5 %, which gives the saving of each; then again without,
knowing the run at 5 %, which gives the measured advice. Needs the checkout; policy bubble-aware
takes twenty times as long as uniform.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.core.job.messages import PreviousRunFound, StoreRun
from gpuenergyd.core.pipeline.plan import SavingAdvice
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.advice import ADVISED_SLOWDOWNS
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.uniform import Uniform
from tests.support.plain_jobs import LoopWork, loop_training, random_loop_work
from tests.support.virtual_training import VirtualTraining

TARGET_POINTS = 2.0
SHARES = {"0.7 to 1": (0.7, 1.0), "0.4 to 0.7": (0.4, 0.7)}
POLICIES: dict[str, type[ClockPolicy]] = {"uniform": Uniform, "bubble-aware": BubbleAware}
_ADVISED_AFTER, _TRAINED = 24, 130
"""Iterations of a run without a permitted slowdown, and with one."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One advice to one job, in percentage points."""

    max_slowdown_ratio: float
    is_measured: bool
    error_points: float
    """The advised saving minus the one of the job when the option was given."""
    is_covered: bool
    """Whether that is within the advised interval."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--policy", choices=POLICIES, default="uniform")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    table, policy = [], POLICIES[options.policy]
    for name, shares in SHARES.items():
        found = [one for seed in range(options.jobs) for one in compared(policy, random_loop_work(seed, shares), seed)]
        table += [{"compute_share": name, **row} for row in rows(found)]
    if options.json:
        print(
            json.dumps(
                {"policy": options.policy, "num_jobs": options.jobs, "target_points": TARGET_POINTS, "rows": table}
            )
        )
    else:
        for row in table:
            print(row)
    return 0 if all(row["within_target"] == row["num_jobs"] for row in table if row["basis"] == "measured") else 1


def compared(policy: type[ClockPolicy], work: LoopWork, seed: int) -> list[Comparison]:
    """Return the predicted and the measured advice to one job, each against what it then saves."""
    saved: dict[float, float] = {}
    before: VirtualTraining | None = None
    for ratio in ADVISED_SLOWDOWNS:
        run = loop_training(policy(), work, max_slowdown_ratio=ratio, seed=100 + seed)
        run.run(_TRAINED)
        estimate = run.job.estimate()
        saving = estimate.saving.saving_ratio if estimate is not None and estimate.saving is not None else None
        saved[ratio] = 0.0 if saving is None else saving.estimate
        before = run
    assert before is not None
    found = []
    for advice in (*_advice(policy, work, seed), *_advice(policy, work, seed, before)):
        ours = saved[advice.max_slowdown_ratio]
        error_points = 100 * (advice.saving_ratio - ours)
        is_covered = advice.low_ratio <= ours <= advice.high_ratio
        found.append(Comparison(advice.max_slowdown_ratio, advice.is_measured, error_points, is_covered))
    return found


def _advice(
    policy: type[ClockPolicy], work: LoopWork, seed: int, before: VirtualTraining | None = None
) -> tuple[SavingAdvice, ...]:
    """Return the advice to a run without a permitted slowdown; the run before it is known to the job."""
    run = loop_training(policy(), work, max_slowdown_ratio=0.0, seed=seed)
    stored = [command.run for command in before.commands if isinstance(command, StoreRun)] if before else []
    if stored and stored[-1] is not None:
        run.feed(PreviousRunFound(stored[-1]))
    run.run(_ADVISED_AFTER)
    assert not run.slices, "a run without a permitted slowdown was slowed down"
    return run.job.advice


def rows(found: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return one row per basis and slowdown."""
    keys = sorted({(one.is_measured, one.max_slowdown_ratio) for one in found})
    named: list[dict[str, object]] = []
    for is_measured, ratio in keys:
        own = [one for one in found if (one.is_measured, one.max_slowdown_ratio) == (is_measured, ratio)]
        errors = [abs(one.error_points) for one in own]
        named.append(
            {
                "basis": "measured" if is_measured else "predicted",
                "max_slowdown_ratio": ratio,
                "num_jobs": len(own),
                "error_mean_points": round(fmean(errors), 2),
                "error_max_points": round(max(errors), 2),
                "within_target": sum(error <= TARGET_POINTS for error in errors),
                "within_interval": sum(one.is_covered for one in own),
            }
        )
    return named


if __name__ == "__main__":
    sys.exit(main())
