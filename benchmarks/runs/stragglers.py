"""Stragglers among two replicas in virtual time: how soon they are followed and left, and how often there was none.

    python benchmarks/runs/stragglers.py [--seeds 5] [--ratio 1.2] [--json]

Pipelines across hosts run the real code of members, leaders and daemons (tests/support/straggling_pipelines.py);
replicas whole on a host run the job's state machine and the exchange between hosts. In each training one replica
becomes slower by `--ratio` four times, on all its stages or on those of one host; in others none does, and any
following is a false alarm. Noise is the standard deviation of the time of single instructions.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.straggler_episodes import Ran, Trial, run_trial

FOLLOWED_WITHIN, LEFT_WITHIN = 6, 4
"""Iterations, the targets."""
LEAST_RATIO_WITHIN = 0.9
"""Share of the stragglers that must be followed and left within them."""
MAX_FALSE_PER_1000 = 1.0
"""False alarms in a thousand iterations of one replica."""
LAYOUTS = {"pipelines over both hosts": False, "replicas whole on a host": True}
NOISE_RATIOS = (0.005, 0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind")
    parser.add_argument("--ratio", type=float, default=1.2, help="slowdown factor of the straggler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layouts = {
        layout: {f"{noise:g}": measure(is_whole, options.ratio, noise, range(options.seeds)) for noise in NOISE_RATIOS}
        for layout, is_whole in LAYOUTS.items()
    }
    all_figures = [figures for of_noise in layouts.values() for figures in of_noise.values()]
    found = {
        "straggler_ratio": options.ratio,
        "layouts": layouts,
        "num_targets": 2 * len(all_figures),
        "num_met": sum(is_followed(figures) + is_quiet(figures) for figures in all_figures),
    }
    print(json.dumps(found) if options.json else text(layouts))
    return 0 if found["num_met"] == found["num_targets"] else 1


def measure(is_whole: bool, ratio: float, noise_ratio: float, seeds: Sequence[int]) -> dict[str, Any]:  # noqa: FBT001  one of two layouts
    """Return the figures of trainings with stragglers, and of as many without."""
    followed: list[int | None] = []
    left: list[int | None] = []
    for seed in seeds:
        trial = Trial(is_whole, ratio, noise_ratio, seed, is_whole_replica_slow=seed % 2 == 0)
        ran = run_trial(trial)
        responses = [ran.response(*episode) for episode in trial.episodes()]
        followed += [response[0] for response in responses]
        left += [response[1] for response in responses]
        print(f"seed {seed}, noise {noise_ratio:g}: {responses}", file=sys.stderr, flush=True)
    quiet: list[Ran] = [run_trial(Trial(is_whole, 1.0, noise_ratio, seed)) for seed in seeds]
    num_quiet = sum(len(ran.own_s) for ran in quiet)
    num_false = sum(ran.num_false_alarms for ran in quiet)
    return {
        "num_stragglers": len(followed),
        "num_followed_in_time": sum(n is not None and n <= FOLLOWED_WITHIN for n in followed),
        "num_left_in_time": sum(n is not None and n <= LEFT_WITHIN for n in left),
        "iterations_until_followed": _counts(followed),
        "iterations_until_left": _counts(left),
        "num_false_alarms": num_false,
        "num_quiet_iterations": num_quiet,
        "false_alarms_per_1000_iterations": 1000 * num_false / num_quiet,
    }


def is_followed(figures: dict[str, Any]) -> bool:
    """Return whether enough stragglers were followed and left in time."""
    least = LEAST_RATIO_WITHIN * figures["num_stragglers"]
    return bool(min(figures["num_followed_in_time"], figures["num_left_in_time"]) >= least)


def is_quiet(figures: dict[str, Any]) -> bool:
    """Return whether false alarms are rare."""
    return bool(figures["false_alarms_per_1000_iterations"] <= MAX_FALSE_PER_1000)


def text(layouts: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = []
    for layout, of_noise in layouts.items():
        for noise, seen in of_noise.items():
            lines.append(
                f"{layout}, noise {noise}: {seen['num_followed_in_time']} of {seen['num_stragglers']} followed within"
                f" {FOLLOWED_WITHIN} iterations ({seen['iterations_until_followed']}), {seen['num_left_in_time']} left"
                f" within {LEFT_WITHIN} ({seen['iterations_until_left']}); {seen['num_false_alarms']} false alarms in"
                f" {seen['num_quiet_iterations']} iterations"
            )
    return "\n".join(lines)


def _counts(values: list[int | None]) -> dict[str, int]:
    """Return how often each number of iterations occurred."""
    counts = Counter(values)
    return {"never" if n is None else str(n): counts[n] for n in sorted(counts, key=lambda n: (n is None, n))}


if __name__ == "__main__":
    sys.exit(main())
