"""Benchmark of our model against published trainings on real GPUs: predicted and measured time, energy and saving.

Usage: python benchmarks/runs/replay_insitu.py --data DIR [--artifact DIR] [--json]

DIR holds pairs `<run>__time_by_freq.csv` (time and energy per stage, instruction and clock) and `<run>__iterations.csv`
(time and energy per rank, measured under each plan) of 1F1B trainings on A100 and A40. The clocks of the plans are in
the artifact of the Perseus paper (SOSP'24; github.com/ml-energy/zeus, branch kronos, folder `sosp24_data`): below
`--artifact` (a folder or a clone), the environment variable PERSEUS_ARTIFACT, or DIR. Without them, our own plan that
uses the measured time takes their place, also where no such time is needed for the least energy: Perseus plans up to
the slowest. Then times are predicted at full speed only, and savings as far as Perseus plans as we do.

Each iteration is predicted from the curves and the clocks alone. What the timeline leaves out (communication, loading,
optimizer step) is learned from the *other* runs, those of `--others` included. A saving is that of a plan against the
last iterations at full speed, both predicted or both measured; the GPUs of the first ones were cooler and needed up to
2 % less. A run whose files are incomplete or cannot be read is named on stderr and left out. Exits with 1 if the
savings are off by more than 1.5 points on average, and with 2 if no run can be replayed.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from insitu_model import (
    BLOCKING_POWER_W,
    POWER_LIMIT_W,
    KnownOverhead,
    Overhead,
    PlannedIteration,
    PredictedIteration,
    graph_of,
    learned_overhead,
    planned_iteration,
)
from insitu_plans import PlannedClocks, parts_of

from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass
from gpuenergyd.core.pipeline.profile import KIND_OF_WORD, ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.errors import GpuEnergyError, TargetError
from gpuenergyd_policies.planning.frontier import Effort, solve

DATA = Path(__file__).parents[3] / "shared" / "data" / "profiles" / "insitu"
MAX_SAVING_ERROR_POINTS = 1.5
_FILE_ENDS = ("__iterations.csv", "__time_by_freq.csv")
FULL_SPEED_PLANS = (0, 1)
"""Plans of both sources that leave all GPUs at full speed."""
VARIANTS = ("timeline", "overhead", "power_limit", "own_full_speed", "measured_time")
"""What a prediction contains: the timeline alone; with the overhead; with the overhead and the boards' limit; the same
with the overhead of the run's own full speed, as a daemon knows it; the same in the measured time, for its energy."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured iteration."""

    source: str
    plan: int
    time_s: float
    rank_energies_j: tuple[float, ...]

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs."""
        return sum(self.rank_energies_j)

    @property
    def is_full_speed(self) -> bool:
        """Whether its plan leaves the clocks alone."""
        return self.plan in FULL_SPEED_PLANS


@dataclass(frozen=True, slots=True)
class Training:
    """One published training: its curves, and its measured iterations with the clocks that they ran at."""

    name: str
    gpu: str
    num_stages: int
    num_microbatches: int
    profile: PipelineProfile
    iterations: tuple[tuple[Measured, PlannedIteration], ...]
    has_clocks: bool

    @property
    def overhead(self) -> KnownOverhead | None:
        """The time that the timeline leaves out; None where no clock is known, not even that of full speed."""
        return self._overhead_of([pair for pair in self.iterations if self.has_time(pair[0])])

    @property
    def full_speed_overhead(self) -> KnownOverhead | None:
        """The time that the timeline leaves out at full speed; None if no such iteration was measured."""
        return self._overhead_of([pair for pair in self.iterations if pair[0].is_full_speed])

    def _overhead_of(self, pairs: Sequence[tuple[Measured, PlannedIteration]]) -> KnownOverhead | None:
        if not pairs:
            return None
        rest_s = [measured.time_s - own.planned.iteration_time_s for measured, own in pairs]
        return KnownOverhead(self.num_microbatches, median(rest_s), median(m.time_s for m, _ in pairs))

    def has_time(self, measured: Measured) -> bool:
        """Whether the clocks of an iteration are known, so that its time can be predicted."""
        return self.has_clocks or measured.is_full_speed

    def predicted(
        self, measured: Measured, own: PlannedIteration, overhead: Overhead, variant: str
    ) -> PredictedIteration:
        """Return the prediction of one iteration."""
        overhead_s = overhead.of(self.num_microbatches)
        if variant == "timeline":
            overhead_s = 0.0
        elif variant == "own_full_speed" and (known := self.full_speed_overhead) is not None:
            overhead_s = known.overhead_s
        elif variant == "measured_time":
            overhead_s = measured.time_s - own.planned.iteration_time_s
        return own.predicted(
            overhead_s=overhead_s,
            num_microbatches=self.num_microbatches,
            blocking_power_w=self.profile.blocking_power_w,
            power_limit_w=None if variant in {"timeline", "overhead"} else POWER_LIMIT_W.get(self.gpu),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of curves and measured iterations")
    parser.add_argument("--artifact", type=Path, default=os.environ.get("PERSEUS_ARTIFACT"),
                        help="folder or git clone of the plans' clocks, searched for <plan>.sched.json")  # fmt: skip
    parser.add_argument("--others", type=Path, default=DATA, help="further runs to learn the overhead from")
    parser.add_argument("--short", action="store_true", help="every eighth plan only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.artifact is not None and not options.artifact.is_dir():
        print(f"no folder {options.artifact}; the clocks of plans are not known", file=sys.stderr)
    clocks = PlannedClocks([folder for folder in (options.artifact, options.data) if folder and folder.is_dir()])
    trainings = trainings_in(options.data, clocks, step=8 if options.short else 1, without=())
    if not trainings:
        print(f"{options.data}: no run of *__iterations.csv and *__time_by_freq.csv to replay", file=sys.stderr)
        return 2
    if unknown := [own.name for own in trainings if not own.has_clocks]:
        print(f"{len(unknown)} of {len(trainings)} runs without the clocks of their plans, which --artifact gives:"
              " our own plans stand in", file=sys.stderr)  # fmt: skip
    more = trainings_in(options.others, clocks, step=8, without=[own.name for own in trainings])
    by_run = {own.name: figures_of(own, [t for t in (*trainings, *more) if t is not own]) for own in trainings}
    rows = [row for run in by_run.values() for row in run.pop("rows")]
    figures: dict[str, Any] = {
        "iterations": len(rows),
        "time_error_mean_ratio": mean_of(
            abs(row["time_error_ratio"]) for row in rows if row["time_error_ratio"] is not None
        ),
        "energy_error_mean_ratio": mean_of(abs(row["energy_error_ratio"]) for row in rows),
        "saving_error_mean_points": mean_of(
            abs(row["saving_error_points"]) for row in rows if row["saving_error_points"] is not None
        ),
        "runs_with_planned_clocks": sum(own.has_clocks for own in trainings),
        "by_run": by_run,
    }
    if not options.json:
        for name, run in by_run.items():
            print(name, {key: value for key, value in run.items() if key not in {"plans", "full_speed"}})
    print(json.dumps(figures))
    return 0 if (figures["saving_error_mean_points"] or 0.0) <= MAX_SAVING_ERROR_POINTS else 1


def trainings_in(folder: Path, clocks: PlannedClocks, *, step: int, without: Sequence[str]) -> list[Training]:
    """Return the trainings of a folder; name those that cannot be replayed, each with its reason, on stderr."""
    found = []
    names = {file.name.removesuffix(end) for end in _FILE_ENDS for file in folder.glob(f"*{end}")}
    for name in sorted(names - set(without)):
        missing = next((f"{name}{end}" for end in _FILE_ENDS if not (folder / f"{name}{end}").is_file()), None)
        if missing is not None:
            print(f"left out {name}: no file {missing}", file=sys.stderr)
            continue
        try:
            found.append(training(folder, name, clocks, step=step))
        except (ValueError, OSError, GpuEnergyError) as error:
            print(f"left out {name}: {error}", file=sys.stderr)
    return found


def training(folder: Path, name: str, clocks: PlannedClocks, *, step: int) -> Training:
    """Return a training with its iterations at full speed and every `step`-th plan."""
    gpu, _, num_stages, num_microbatches = parts_of(name)
    if gpu not in BLOCKING_POWER_W:
        raise ValueError(f"the power of a waiting {gpu} is not known, only that of {', '.join(BLOCKING_POWER_W)}")
    profile = PipelineProfile(read_curves(folder / f"{name}__time_by_freq.csv", num_stages), BLOCKING_POWER_W[gpu])
    graph = graph_of(num_stages, num_microbatches)
    measured = [own for own in read_iterations(folder / f"{name}__iterations.csv", num_stages)
                if own.is_full_speed or own.plan % step == 0]  # fmt: skip
    found = [(own, clocks.of(name, own.source, own.plan)) for own in measured]
    has_clocks = all(planned is not None for _, planned in found)
    iterations = []
    for own, planned in found:
        if has_clocks and planned is not None:
            iterations.append((own, planned_iteration(graph, profile, planned)))
        elif own.source == "perseus":
            stand_in = own_plan(graph, profile, own, measured)
            iterations.append((own, planned_iteration(graph, profile, stand_in)))
    return Training(name, gpu, num_stages, num_microbatches, profile, tuple(iterations), has_clocks)


def own_plan(
    graph: DependencyGraph, profile: PipelineProfile, measured: Measured, all_measured: Sequence[Measured]
) -> list[list[int]]:
    """Return the clocks of our own plan for GPUs that wait until full speed is exceeded by as much as was measured."""
    top = [profile[i.instruction_class].at_max_clock.sm_clock_mhz for i in graph.instructions]
    clocks = top
    if not measured.is_full_speed:
        full_speed_s = planned_iteration(graph, profile, _by_rank(graph, top)).planned.iteration_time_s
        base_s = fmean(own.time_s for own in all_measured if own.is_full_speed)
        try:
            deadline_s = full_speed_s + max(0.0, measured.time_s - base_s)
            solved = solve(graph, profile, deadline_s=deadline_s, forced=True, effort=Effort.QUICK)
            clocks = list(solved.sm_clocks_mhz)
        except TargetError:
            clocks = top
    return _by_rank(graph, clocks)


def _by_rank(graph: DependencyGraph, clocks_mhz: Sequence[int]) -> list[list[int]]:
    by_rank: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    for instruction, mhz in zip(graph.instructions, clocks_mhz, strict=True):
        by_rank[instruction.pp_rank].append(mhz)
    return by_rank


def read_curves(file: Path, num_stages: int) -> Mapping[InstructionClass, Any]:
    """Return the profile of each instruction class.

    Raises:
        ValueError: the file is not a table of curves for every stage.
    """
    options: dict[InstructionClass, list[ClockOption]] = {}
    for where, row in _rows(file):
        try:
            key = InstructionClass(int(row["stage"]), KIND_OF_WORD[row["instruction"]])
            option = ClockOption(int(row["frequency_mhz"]), float(row["time_mean_s"]), float(row["energy_fitted_j"]))
        except KeyError as error:
            raise ValueError(f"{where}: no column or instruction {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
        options.setdefault(key, []).append(option)
    for stage, word in product(range(num_stages), ("forward", "backward")):
        if InstructionClass(stage, KIND_OF_WORD[word]) not in options:
            raise ValueError(f"{file.name}: no {word} of stage {stage}")
    return {key: instruction_profile(own, where=file.name) for key, own in options.items()}


def read_iterations(file: Path, num_stages: int) -> list[Measured]:
    """Return the measured iterations.

    Raises:
        ValueError: the file is not a table of iterations with an energy of every rank.
    """
    found = []
    for where, row in _rows(file):
        try:
            energies_j = tuple(float(row[f"energy_rank{rank}"]) for rank in range(num_stages))
            own = Measured(row["source"], int(row["plan"]), float(row["iter_time_s"]), energies_j)
        except KeyError as error:
            raise ValueError(f"{where}: no column {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
        if not all(isfinite(value) and value > 0 for value in (own.time_s, *own.rank_energies_j)):
            raise ValueError(f"{where}: time and energies must be positive numbers")
        found.append(own)
    return found


def _rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a table, each with its place for messages."""
    with file.open(newline="", encoding="utf-8") as stream:
        for number, row in enumerate(csv.DictReader(stream), 2):
            yield f"{file.name}, line {number}", row


def figures_of(own: Training, others: Sequence[Training]) -> dict[str, Any]:
    """Return the errors of a training's predictions, with an overhead learned from the other trainings.

    `plans` are the slowest, the middle and the fastest one; `rows` are all.
    """
    overhead = learned_overhead([known for other in others if (known := other.overhead) is not None])
    rows = list(rows_of(own, overhead, "power_limit"))
    planned = [row for row in rows if not row["is_full_speed"]]
    known = own.overhead
    return {
        "iterations": len(rows),
        "clocks": "of the published plans" if own.has_clocks else "of our own plans for the measured times",
        "num_interpolated": sum(iteration.num_interpolated for _, iteration in own.iterations),
        "time_error_mean_ratio": mean_of(abs(r["time_error_ratio"]) for r in rows if r["time_error_ratio"] is not None),
        "energy_error_mean_ratio": mean_of(abs(row["energy_error_ratio"]) for row in rows),
        **saving_errors(rows),
        **by_model(own, overhead),
        "overhead_predicted_s": overhead.of(own.num_microbatches),
        "overhead_measured_s": None if known is None else known.overhead_s,
        "overhead_learned_from": sum(other.overhead is not None for other in others),
        "full_speed": next((row for row in reversed(rows) if row["is_full_speed"]), None),
        "plans": [planned[k] for k in sorted({0, len(planned) // 2, len(planned) - 1})] if planned else [],
        "rows": rows,
    }


def by_model(own: Training, overhead: Overhead) -> dict[str, dict[str, float | None]]:
    """Return the mean errors of each variant of the model."""
    rows = {variant: list(rows_of(own, overhead, variant)) for variant in VARIANTS}
    return {
        f"{name}_by_model": {
            variant: mean_of(abs(row[figure]) for row in found if row[figure] is not None)
            for variant, found in rows.items()
        }
        for name, figure in (
            ("time_error_mean_ratio", "time_error_ratio"),
            ("energy_error_mean_ratio", "energy_error_ratio"),
            ("saving_error_mean_points", "saving_error_points"),
        )
    }


def rows_of(own: Training, overhead: Overhead, variant: str) -> list[dict[str, Any]]:
    """Return measured and predicted figures of each iteration of a training."""
    predicted = [own.predicted(measured, iteration, overhead, variant) for measured, iteration in own.iterations]
    pairs = list(zip((measured for measured, _ in own.iterations), predicted, strict=True))
    bases = {}
    for source in {measured.source for measured, _ in pairs}:
        at_full = [(m, p) for m, p in pairs if m.is_full_speed and m.source == source]
        if at_full:
            last, last_predicted = max(at_full, key=lambda pair: pair[0].plan)
            bases[source] = (last.energy_j, last_predicted.energy_j)
    rows: list[dict[str, Any]] = []
    for measured, found in pairs:
        saving = predicted_saving = None
        if not measured.is_full_speed and (base := bases.get(measured.source)) is not None:
            saving, predicted_saving = 1 - measured.energy_j / base[0], 1 - found.energy_j / base[1]
        rows.append({
            "source": measured.source,
            "plan": measured.plan,
            "is_full_speed": measured.is_full_speed,
            "time_s": measured.time_s,
            "time_predicted_s": found.time_s if own.has_time(measured) else None,
            "time_error_ratio": found.time_s / measured.time_s - 1 if own.has_time(measured) else None,
            "energy_j": measured.energy_j,
            "energy_predicted_j": found.energy_j,
            "energy_error_ratio": found.energy_j / measured.energy_j - 1,
            "rank_energy_error_max_ratio": max(
                abs(p / m - 1) for p, m in zip(found.rank_energies_j, measured.rank_energies_j, strict=True)
            ),
            "saving_ratio": saving,
            "saving_predicted_ratio": predicted_saving,
            "saving_error_points": None if saving is None or predicted_saving is None
            else 100 * (predicted_saving - saving),
        })  # fmt: skip
    return rows


def saving_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean, signed mean and largest error of the savings, in percentage points."""
    errors = [row["saving_error_points"] for row in rows if row["saving_error_points"] is not None]
    return {
        "saving_error_mean_points": mean_of(map(abs, errors)),
        "saving_error_signed_points": mean_of(errors),
        "saving_error_max_points": max(map(abs, errors), default=None),
    }


def mean_of(values: Any) -> float | None:
    """Return the mean; None without values."""
    found = list(values)
    return fmean(found) if found else None


if __name__ == "__main__":
    sys.exit(main())
