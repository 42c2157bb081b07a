"""Policy `cost` against Zeus's just-in-time sweep of power limits, on published sweeps of real GPUs.

    python benchmarks/runs/cost_policy.py [--seeds 3] [--short] [--json]

Every workload of the public sweeps in shared/data/gpu: one table of times and energies by power limit or SM clock. Both
measure settings with the same noise, 0.3 % of time and 1 % of energy per setting, and full speed is measured by both.
Zeus's procedure as its paper describes it (You et al., NSDI 2023): every power limit from the highest to the lowest,
then the one of least `eta * energy + (1 - eta) * max_power * time`. Where a table has clocks only, Zeus stays at full
speed. The regret is the cost of the chosen setting by the table over that of the table's best one, less one.

The setting that policy `cost` chose is measured on and on while its plan runs; where another one then has clearly less
cost, that one follows, up to four plans. The sweep ends with its choice.

`fine` are simulated GPUs with 5 W steps and all clocks, where no sweep is short: Zeus measures 25 W steps there.
Needs the checkout and the tables.
"""

import argparse
import csv
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_other_policies.cost import FloatArray, Objective
from gpuenergyd_policies.setting_curves import LoopAtFullSpeed, MeasuredPoint, StandardErrors, possible_curves
from gpuenergyd_policies.setting_search import MAX_PROBES, SettingSearch
from gpuenergyd_policies.uniform_settings import Setting
from gpuenergyd_sim.driver.device_model import InstructionWork, capped_sm_clock_mhz, instruction_time_s, working_power_w
from gpuenergyd_sim.driver.device_parameters import DeviceParameters, device_parameters
from tests.support.measured_tables import path_of

OBJECTIVES: Mapping[str, Callable[[float], Objective]] = {
    "eta 0.25": lambda power_w: Objective(0.25, max_power_w=power_w),
    "eta 0.5": lambda power_w: Objective(0.5, max_power_w=power_w),
    "eta 0.75": lambda power_w: Objective(0.75, max_power_w=power_w),
    "eta 1": lambda power_w: Objective(1.0, max_power_w=power_w),
    "energy-delay": lambda _: Objective(delay_exponent=1.0),
    "energy-delay-squared": lambda _: Objective(delay_exponent=2.0),
}
ERRORS = StandardErrors(time=0.003, energy=0.01)
"""Of a measured setting, relative to its values."""
REGRET_TARGET_RATIO = 0.01
NUM_FINE = 40
_PLANS, _MEASUREMENTS_OF_PLAN = 4, 7
"""Plans that follow each other at most, and what the iterations of one are worth, in measurements of a setting."""
_FINE_MODELS = ("a100-sxm", "a40", "v100-sxm2", "h100-sxm")
_ZEUS_STEP_W = 25


@dataclass(frozen=True, slots=True)
class Probe:
    """Time and energy of an iteration at one setting, as means of so many measurements."""

    time_s: float
    energy_j: float
    num_measurements: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Time and energy per unit of work, per GPU, by setting; the first level of each lever is full speed."""

    source: str
    name: str
    table: Mapping[Setting, Probe]
    max_power_w: float
    zeus_step_w: int = 0
    """Distance of the power limits that Zeus measures; 0: all."""
    combined: tuple[Probe, ...] = ()
    """A clock and a power limit at once: never chosen, but the best setting may be one of them."""

    @property
    def levels(self) -> dict[Lever, list[int]]:
        """The levels of each lever, descending; levers with a single one are left out."""
        found = {lever: sorted((s.value for s in self.table if s.lever is lever), reverse=True) for lever in Lever}
        return {lever: levels for lever, levels in found.items() if len(levels) > 1}

    @property
    def full_speed(self) -> Setting:
        """The highest level of the first lever."""
        lever, levels = next(iter(self.levels.items()))
        return Setting(lever, levels[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="every fortieth workload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1")
    workloads = public_workloads()
    fine = fine_workloads(NUM_FINE, seed=1)
    if options.short:
        workloads, fine = workloads[::40], fine[::20]
    figures: dict[str, Any] = {
        "num_workloads": len(workloads),
        "num_seeds": options.seeds,
        "public": compared(workloads, options.seeds),
        "fine": compared(fine, options.seeds),
    }
    if options.json:
        print(json.dumps(figures))
    else:
        for name in ("public", "fine"):
            print(f"{name} ({len(workloads) if name == 'public' else len(fine)} workloads, {options.seeds} seeds)")
            for row in figures[name]["by_objective"]:
                print("   ", row)
            print("   ", figures[name]["all"])
    public = figures["public"]["all"]
    is_met = public["regret_mean_ratio"] <= REGRET_TARGET_RATIO and public["probes_max"] <= MAX_PROBES
    return 0 if is_met or options.short else 1


def compared(workloads: Sequence[Workload], num_seeds: int) -> dict[str, object]:
    """Return regret and number of probes of both procedures, by objective, by source and over all."""
    rows: list[dict[str, object]] = []
    everything: list[tuple[str, Outcome, Outcome]] = []
    for name, make in OBJECTIVES.items():
        own: list[tuple[str, Outcome, Outcome]] = []
        for workload in workloads:
            for seed in range(num_seeds):
                objective = make(workload.max_power_w)
                ours = run_cost(workload, objective, random.Random(f"{workload.name} {name} {seed}"))
                zeus = run_zeus(workload, objective, random.Random(f"{workload.name} {name} {seed}"))
                own.append((workload.source, ours, zeus))
        rows.append({"objective": name, **summary(own)})
        everything += own
    sources = sorted({source for source, _, _ in everything})
    return {
        "all": summary(everything),
        "by_objective": rows,
        "by_source": [{"source": s, **summary([one for one in everything if one[0] == s])} for s in sources],
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Cost of the chosen setting over the best one's, less one, and the settings measured besides full speed."""

    regret_ratio: float
    num_probes: int
    excess: float
    """Sum over the measured settings of their cost over the best one's, less one: the price of measuring."""


def summary(outcomes: Sequence[tuple[str, Outcome, Outcome]]) -> dict[str, float]:
    """Return the means of both procedures."""
    ours, zeus = [one for _, one, _ in outcomes], [one for _, _, one in outcomes]
    ordered = sorted(one.regret_ratio for one in ours)
    return {
        "regret_mean_ratio": round(fmean(ordered), 5),
        "regret_p95_ratio": round(ordered[int(0.95 * (len(ordered) - 1))], 5),
        "regret_max_ratio": round(ordered[-1], 5),
        "probes_mean": round(fmean(one.num_probes for one in ours), 2),
        "probes_max": max(one.num_probes for one in ours),
        "excess_mean": round(fmean(one.excess for one in ours), 3),
        "zeus_regret_mean_ratio": round(fmean(one.regret_ratio for one in zeus), 5),
        "zeus_probes_mean": round(fmean(one.num_probes for one in zeus), 2),
        "zeus_excess_mean": round(fmean(one.excess for one in zeus), 3),
    }


def run_cost(workload: Workload, objective: Objective, rng: random.Random) -> Outcome:
    """Search as policy `cost` does; what it chose is then measured on and on, as its plan runs."""
    full_speed = noisy(workload.table[workload.full_speed], rng)
    probes: dict[Setting, Probe] = {}
    while (setting := search(workload, objective, full_speed, probes).next_setting(probes)) is not None:
        probes[setting] = noisy(workload.table[setting], rng)
    chosen, tried = search(workload, objective, full_speed, probes).best(), tuple(probes)
    for _ in range(_PLANS):
        if chosen is None:
            break
        before, chosen = chosen, None
        more = [noisy(workload.table[before], rng) for _ in range(_MEASUREMENTS_OF_PLAN)]
        all_of_it = [*([probes[before]] if before in probes else []), *more]
        probes[before] = Probe(
            fmean(own.time_s for own in all_of_it), fmean(own.energy_j for own in all_of_it), len(all_of_it)
        )
        chosen = search(workload, objective, full_speed, probes).best(current=before)
        if chosen == before:
            break
    return outcome(workload, objective, chosen or workload.full_speed, tried)


def search(
    workload: Workload, objective: Objective, full_speed: Probe, probes: Mapping[Setting, Probe]
) -> SettingSearch:
    """Return the search after what was measured."""
    points = {
        setting: MeasuredPoint(
            own.time_s / full_speed.time_s,
            own.energy_j / full_speed.energy_j,
            StandardErrors(*(error / math.sqrt(own.num_measurements) for error in ERRORS)),
        )
        for setting, own in probes.items()
    }
    settings = tuple(Setting(lever, level) for lever, levels in workload.levels.items() for level in levels)
    loop = LoopAtFullSpeed(full_speed.energy_j / full_speed.time_s, workload.max_power_w, 1.0, 1.0)
    known = possible_curves(settings, loop).given(points, full_speed=ERRORS)

    def cost(times: FloatArray, energies: FloatArray) -> FloatArray:
        return objective.costs(times * full_speed.time_s, energies * full_speed.energy_j)

    lowest = {lever: min(own.value for own in points if own.lever is lever) for lever in {own.lever for own in points}}
    return SettingSearch(known, cost, tuple(own for own in settings if own.value >= lowest.get(own.lever, math.inf)))


def run_zeus(workload: Workload, objective: Objective, rng: random.Random) -> Outcome:
    """Measure every power limit from the highest to the lowest, and choose the one of least cost."""
    levels = workload.levels.get(Lever.POWER_LIMITS, [])
    if workload.zeus_step_w:
        levels = [levels[0], *(watts for watts in levels[1:] if watts % workload.zeus_step_w == 0)]
    settings = [Setting(Lever.POWER_LIMITS, watts) for watts in levels]
    probes = {setting: noisy(workload.table[setting], rng) for setting in settings}
    costs = {setting: objective.cost(own.time_s, own.energy_j) for setting, own in probes.items()}
    chosen = min(costs, key=lambda setting: costs[setting]) if costs else workload.full_speed
    return outcome(workload, objective, chosen, [setting for setting in settings if setting != settings[0]])


def outcome(
    workload: Workload, objective: Objective, chosen: Setting, probes: Sequence[Setting] | Mapping[Setting, Probe]
) -> Outcome:
    """Return the outcome by the workload's table."""
    costs = {setting: objective.cost(own.time_s, own.energy_j) for setting, own in workload.table.items()}
    best = min([*costs.values(), *(objective.cost(own.time_s, own.energy_j) for own in workload.combined)])
    return Outcome(costs[chosen] / best - 1, len(probes), sum(costs[setting] / best - 1 for setting in probes))


def noisy(probe: Probe, rng: random.Random) -> Probe:
    """Return a measurement."""
    return Probe(probe.time_s * (1 + rng.gauss(0, ERRORS.time)), probe.energy_j * (1 + rng.gauss(0, ERRORS.energy)))


def public_workloads() -> list[Workload]:
    """Return every workload of the public sweeps; several rows of one setting are averaged."""
    points: dict[tuple[str, str], dict[Setting, list[Probe]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows("zeus_nsdi23_power_limit_sweeps.csv"):
        name = f"{row['gpu']} {row['workload']} {row['batch']} {row['optimizer']}"
        probe = Probe(float(row["time_per_epoch_s"]), float(row["energy_per_epoch_j"]))
        points["zeus-nsdi23", name][_limit(row["power_limit_w"])].append(probe)
    for row in _rows("zeus_profile_data_power_limit_sweeps.csv"):
        name = f"{row['gpu']} {row['workload']} on {row['n_gpus']}"
        probe = Probe(float(row["time_s"]), float(row["energy_j_total"]) / int(row["n_gpus"]))
        points["zeus-profiles", name][_limit(row["power_limit_w"])].append(probe)
    for row in _rows("kerneltuner_a100pcie_fp32_clock_sweep.csv"):
        setting = Setting(Lever.CLOCKS, round(float(row["sm_clock_mhz"])))
        points["kernel-tuner", row["kernel"]][setting].append(
            Probe(float(row["time_ms"]) / 1000, float(row["energy_j"]))
        )
    combined: dict[str, list[Probe]] = defaultdict(list)
    grid = list(_rows("gridpilot_v100sxm2_cap_x_clock.csv"))
    top_mhz = max(int(row["sm_target_mhz"]) for row in grid)
    top_w = max(int(row["pcap_w"]) for row in grid)
    for row in grid:
        own = points["gridpilot", row["workload"]]
        probe = Probe(1 / float(row["iters_per_s"]), float(row["energy_per_iter_j"]))
        if int(row["pcap_w"]) == top_w:
            own[Setting(Lever.CLOCKS, int(row["sm_target_mhz"]))].append(probe)
        if int(row["sm_target_mhz"]) == top_mhz:
            own[_limit(row["pcap_w"])].append(probe)
        elif int(row["pcap_w"]) != top_w:
            combined[row["workload"]].append(probe)
    return [_workload(source, name, table, combined[name]) for (source, name), table in points.items()]


def fine_workloads(num: int, *, seed: int) -> list[Workload]:
    """Return workloads of simulated GPUs with random shares of memory time and random power, on fine grids."""
    rng, found = random.Random(seed), []
    for k in range(num):
        model = device_parameters(_FINE_MODELS[k % len(_FINE_MODELS)])
        memory_ratio = rng.uniform(0.0, 0.6)
        idle = InstructionWork(memory_ratio, 1 - memory_ratio, 0.0)
        unit = InstructionWork(memory_ratio, 1 - memory_ratio, 1.0)
        base_w = working_power_w(model, idle, model.max_sm_clock_mhz)
        wanted_w = rng.uniform(0.5, 1.15) * model.default_power_limit_w
        per_unit_w = working_power_w(model, unit, model.max_sm_clock_mhz) - base_w
        work = InstructionWork(memory_ratio, 1 - memory_ratio, max(0.02, (wanted_w - base_w) / per_unit_w))

        top_w = round(model.default_power_limit_w)
        limits = range(top_w, round(model.min_power_limit_w) - 1, -5)
        table = {
            Setting(Lever.POWER_LIMITS, watts): _simulated(model, work, model.max_sm_clock_mhz, watts)
            for watts in limits
        }
        clocks = [mhz for mhz in model.supported_sm_clocks_mhz if mhz >= 0.4 * model.max_sm_clock_mhz]
        if k % 2:
            table |= {Setting(Lever.CLOCKS, mhz): _simulated(model, work, mhz, top_w) for mhz in clocks}
        found.append(Workload("limits and clocks" if k % 2 else "limits", f"fine {k}", table, top_w, _ZEUS_STEP_W))
    return found


def _simulated(model: DeviceParameters, work: InstructionWork, clock_mhz: float, limit_w: float) -> Probe:
    """Return time and energy of an instruction on a simulated GPU with a clock lock and a power limit."""
    mhz = capped_sm_clock_mhz(model, work, clock_mhz, limit_w)
    time_s = instruction_time_s(model, work, mhz)
    return Probe(time_s, time_s * working_power_w(model, work, mhz))


def _rows(name: str) -> list[dict[str, str]]:
    with path_of(f"gpu/{name}").open() as file:
        return list(csv.DictReader(file))


def _limit(watts: str) -> Setting:
    return Setting(Lever.POWER_LIMITS, round(float(watts)))


def _workload(source: str, name: str, points: Mapping[Setting, Sequence[Probe]], combined: Sequence[Probe]) -> Workload:
    table = {
        setting: Probe(fmean(p.time_s for p in own), fmean(p.energy_j for p in own)) for setting, own in points.items()
    }
    limits_w = [setting.value for setting in table if setting.lever is Lever.POWER_LIMITS]
    # The A100-PCIe of the clock sweep: 250 W.
    return Workload(source, name, table, max(limits_w) if limits_w else 250.0, combined=tuple(combined))


if __name__ == "__main__":
    sys.exit(main())
