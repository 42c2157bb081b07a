"""Error of the simulated GPUs against measured tables: mean and maximum per table.

    python benchmarks/runs/device_model.py [--data FOLDER] [--json]

FOLDER contains `gpu/` and `profiles/` (default: ../shared/data beside the checkout). For the two GPT-3 tables the three
unknowns of each instruction (memory time, compute time, watts per MHz) are fitted; the GPU's own parameters are not.
Power, time and energy are compared from 0.55 of the maximum clock up.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from gpuenergyd_sim.driver.device_model import (
    InstructionWork,
    capped_sm_clock_mhz,
    instruction_time_s,
    voltage_ratio,
    working_power_w,
)
from gpuenergyd_sim.driver.device_parameters import A40, A100_PCIE, A100_SXM, V100_SXM2, DeviceParameters

LOWEST_PLANNED_SHARE = 0.55
"""Below this share of the maximum clock measured GPUs deviate from the 1/f law, and no plan uses such clocks."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity of one table compared with the model."""

    table: str
    quantity: str
    num_points: int
    mape_ratio: float
    max_ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with gpu/ and profiles/")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.data / "gpu").is_dir():
        print(f"no measured tables in {options.data}; name their folder with --data", file=sys.stderr)
        return 2
    rows = compare_all(options.data)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"{'table':<44}{'quantity':<26}{'points':>7}{'MAPE':>9}{'max':>9}")
        for row in rows:
            print(f"{row.table:<44}{row.quantity:<26}{row.num_points:>7}{row.mape_ratio:>9.2%}{row.max_ratio:>9.2%}")
    return 0


def compare_all(data: Path) -> list[Comparison]:
    return [
        *_v100(data / "gpu"),
        _v100_context(data / "gpu"),
        *_a100_pcie(data / "gpu"),
        *_training(data / "profiles" / "gpt3-175b_a100-sxm.csv", A100_SXM, "A100-SXM GPT-3"),
        *_training(data / "profiles" / "gpt3-175b_a40.csv", A40, "A40 GPT-3"),
    ]


def _comparison(table: str, quantity: str, pairs: Iterable[tuple[float, float]]) -> Comparison:
    errors = [abs(model / measured - 1.0) for model, measured in pairs]
    return Comparison(table, quantity, len(errors), float(np.mean(errors)), max(errors))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _v100(folder: Path) -> list[Comparison]:
    """Steady matrix products: power at a clock, and the clock that a power cap leads to."""
    rows = [r for r in _rows(folder / "gridpilot_v100sxm2_cap_x_clock.csv") if r["workload"] == "matmul_compute_bound"]
    work = InstructionWork(0.0, 1.0, V100_SXM2.typical_w_per_mhz)
    power, clock = [], []
    for row in rows:
        asked, applied, cap = (float(row[k]) for k in ("sm_target_mhz", "sm_mean_mhz", "pcap_w"))
        heating_w = V100_SXM2.leakage_w_per_k * (float(row["temp_mean_c"]) - V100_SXM2.warm_celsius)
        if applied >= LOWEST_PLANNED_SHARE * V100_SXM2.max_sm_clock_mhz:
            power.append((working_power_w(V100_SXM2, work, applied) + heating_w, float(row["power_mean_w"])))
        if applied < 0.99 * asked:
            clock.append((capped_sm_clock_mhz(V100_SXM2, work, asked, cap - heating_w), applied))
    table = "V100-SXM2 matrix product (gridpilot)"
    return [_comparison(table, "power at applied clock", power), _comparison(table, "clock under the cap", clock)]


def _v100_context(folder: Path) -> Comparison:
    pairs = []
    idle = InstructionWork(1.0, 0.0, 0.0)
    for row in _rows(folder / "gridpilot_v100sxm2_context_idle_power.csv"):
        heating_w = V100_SXM2.leakage_w_per_k * (float(row["temp_c"]) - V100_SXM2.warm_celsius)
        model_w = working_power_w(V100_SXM2, idle, float(row["sm_clock_mhz"])) + heating_w
        pairs.append((model_w, float(row["context_idle_power_w"])))
    return _comparison("V100-SXM2 context, no kernel (gridpilot)", "power", pairs)


def _a100_pcie(folder: Path) -> list[Comparison]:
    rows = _rows(folder / "kerneltuner_a100pcie_fp32_clock_sweep.csv")
    work = InstructionWork(0.0, 1.0, A100_PCIE.typical_w_per_mhz)
    scale = float(
        np.mean([float(r["time_ms"]) / instruction_time_s(A100_PCIE, work, float(r["sm_clock_mhz"])) for r in rows])
    )
    table = "A100-PCIe FP32 multiply-add (kernel_tuner)"
    return [
        _comparison(
            table,
            "power",
            [(working_power_w(A100_PCIE, work, float(r["sm_clock_mhz"])), float(r["power_w"])) for r in rows],
        ),
        _comparison(
            table,
            "time (one scale fitted)",
            [
                (scale * instruction_time_s(A100_PCIE, work, float(r["sm_clock_mhz"])), float(r["time_ms"]))
                for r in rows
            ],
        ),
    ]


def _training(path: Path, model: DeviceParameters, name: str) -> list[Comparison]:
    """GPT-3 training: time and energy of every instruction measured separately."""
    rows = [r for r in _rows(path) if float(r["frequency"]) >= LOWEST_PLANNED_SHARE * model.max_sm_clock_mhz]
    keys = sorted({(r["stage"], r["instruction"]) for r in rows if r["stage"] in {"0", "7"}})
    time_pairs: list[tuple[float, float]] = []
    energy_pairs: list[tuple[float, float]] = []
    for stage, instruction in keys:
        mine = [r for r in rows if (r["stage"], r["instruction"]) == (stage, instruction)]
        clocks = [float(r["frequency"]) for r in mine]
        times = np.array([float(r["time"]) for r in mine])
        energies = np.array([float(r["energy"]) for r in mine])
        work = _fit(model, clocks, times, energies)
        for clock, time_s, energy_j in zip(clocks, times, energies, strict=True):
            applied = capped_sm_clock_mhz(model, work, clock, model.default_power_limit_w)
            model_s = instruction_time_s(model, work, applied)
            time_pairs.append((model_s, time_s))
            energy_pairs.append((working_power_w(model, work, applied) * model_s, energy_j))
    return [
        _comparison(f"{name} (Perseus)", "time (fitted)", time_pairs),
        _comparison(f"{name} (Perseus)", "energy (fitted)", energy_pairs),
    ]


def _fit(
    model: DeviceParameters, clocks: Sequence[float], times: "np.ndarray", energies: "np.ndarray"
) -> InstructionWork:
    """Fit memory time, compute time and watts per MHz of one instruction."""
    longest = float(times[np.argmax(clocks)])
    top = max(clocks)
    watts = float(energies[np.argmax(clocks)]) / longest
    guess_c1 = (watts - model.static_power_w) / (top * voltage_ratio(model, top) ** 2)

    def residuals(x: "np.ndarray") -> "np.ndarray":
        work = InstructionWork(abs(x[0]) * longest, abs(x[1]) * longest, abs(x[2]) * guess_c1)
        out = []
        for clock, time_s, energy_j in zip(clocks, times, energies, strict=True):
            applied = capped_sm_clock_mhz(model, work, clock, model.default_power_limit_w)
            model_s = instruction_time_s(model, work, applied)
            out += [model_s / time_s - 1.0, working_power_w(model, work, applied) * model_s / energy_j - 1.0]
        return np.array(out)

    x = least_squares(residuals, [0.2, 0.8, 1.0], diff_step=1e-4).x
    return InstructionWork(abs(x[0]) * longest, abs(x[1]) * longest, abs(x[2]) * guess_c1)


if __name__ == "__main__":
    sys.exit(main())
