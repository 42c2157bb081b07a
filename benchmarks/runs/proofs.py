"""Benchmark of `gpuenergyd prove`: coverage of its intervals, false claims, tampering, and meters with known errors.

Usage: python benchmarks/runs/proofs.py [--runs 100] [--seed 0] [--json]

Whole proofs (calibration, pilot, power calculation, registration, blocks, signatures, check) of a made-up training in
virtual time with known true savings: shared errors of blocks, drift, disturbed iterations, random spreads. `--runs`
proofs of a policy that saves 0.5 to 20 %, as many of one that saves nothing and is 0 to 0.5 % slower, each checked
again; every kind of tampering on ten proofs; and meters with lags of 0 to 20 s. Exits with 1 if fewer than 95 % of the
verdicts cover the true saving, a policy without saving `saves`, tampering is not caught, or a meter's lag or gain is
outside its stated error.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.folder import check_folder
from gpuenergyd_prove.proof.registration import LEAST_ROUNDS
from gpuenergyd_prove.proof.verdict import Conclusion, Verdict
from tests.plugins.prove.tampering import TAMPERING, is_caught, proved
from tests.plugins.prove.virtual_training import VirtualMeter, VirtualTraining

LEAST_COVERAGE = 0.95
TAMPERED_PROOFS = 10
METERS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuenergyd-proofs-") as folder:
        figures: dict[str, Any] = {
            "runs": options.runs,
            "seed": options.seed,
            "saving": series(Path(folder), options.runs, options.seed, saves=True),
            "null": series(Path(folder), options.runs, options.seed + 10_000, saves=False),
            "tampering": tampering(Path(folder), options.seed),
            "meters": meters(Path(folder), options.seed),
        }
    print(json.dumps(figures, indent=None if options.json else 1))
    saving, null = figures["saving"], figures["null"]
    is_met = (
        saving["covered"] >= LEAST_COVERAGE * saving["verdicts"]
        and saving["verdicts"] >= LEAST_COVERAGE * options.runs
        and null["conclusions"].get(Conclusion.SAVES, 0) + null["conclusions"].get(Conclusion.SAVES_BUT_SLOWER, 0) == 0
        and all(kind["caught"] == kind["tried"] for kind in figures["tampering"].values())
        and figures["meters"]["within_error"] == figures["meters"]["tried"]
    )
    return 0 if is_met else 1


def series(folder: Path, runs: int, seed: int, *, saves: bool) -> dict[str, Any]:
    """Run proofs of trainings with a known saving; return how many verdicts cover it."""
    found: list[tuple[float, float, Verdict]] = []
    refused = rerun_differs = 0
    for number in range(runs):
        draw = random.Random(seed + number)
        training = VirtualTraining(
            seed=seed + number,
            saving_ratio=draw.uniform(0.005, 0.2) if saves else 0.0,
            slowdown_ratio=draw.uniform(0.0, 0.005),
            block_sigma_ratio=draw.uniform(0.001, 0.006),
            iteration_sigma_ratio=draw.uniform(0.002, 0.02),
            drift_ratio=draw.uniform(-5e-5, 5e-5),
            disturbed_ratio=draw.uniform(0.0, 0.05),
        )
        path = folder / f"{seed}-{number}"
        try:
            verdict = proved(path, training, order_seed=number)
        except ProofError:
            refused += 1
            continue
        rerun_differs += not check_folder(path).holds
        found.append((training.saving_ratio, training.slowdown_ratio, verdict))
    concluded = [v for _, _, v in found if v.has_verdict]
    savings = [(true, v.arms[0].saving) for true, _, v in found if v.has_verdict]
    slowdowns = [(true, v.arms[0].slowdown) for _, true, v in found if v.has_verdict]
    return {
        "refused_for_lack_of_power": refused,
        "no_verdict": len(found) - len(concluded),
        "verdicts": len(concluded),
        "covered": sum(own is not None and own.low <= true <= own.high for true, own in savings),
        "slowdown_covered": sum(own is not None and own.low <= true <= own.high for true, own in slowdowns),
        "conclusions": dict(Counter(str(v.conclusion) for v in concluded)),
        "half_width_median_ratio": median((own.high - own.low) / 2 for _, own in savings if own is not None),
        "rounds_median": median(v.num_rounds for v in concluded),
        "rounds_max": max(v.num_rounds for v in concluded),
        "rounds_least": LEAST_ROUNDS,
        "checks_that_differ": rerun_differs,
    }


def tampering(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Tamper with ten proofs in every known way; return how often the verdict was lost, and a reason."""
    counts: dict[str, dict[str, Any]] = {name: {"tried": 0, "caught": 0, "reason": None} for name in TAMPERING}
    number = tried = 0
    while tried < TAMPERED_PROOFS:
        number += 1
        path = folder / f"tampered-{number}"
        verdict = proved(path, VirtualTraining(seed=seed + 500 + number), order_seed=number)
        if verdict.conclusion is Conclusion.NO_VERDICT or verdict.num_rounds <= LEAST_ROUNDS:
            continue  # one round less could not be registered at all
        tried += 1
        for name, change in TAMPERING.items():
            reason = is_caught(path, change, folder / f"copy-{number}-{name.replace(' ', '-')}")
            counts[name]["tried"] += 1
            counts[name]["caught"] += reason is not None
            counts[name]["reason"] = counts[name]["reason"] or reason
    return counts


def meters(folder: Path, seed: int) -> dict[str, Any]:
    """Align meters with known lags and gains; return how many are within their stated errors."""
    lag_errors_s: list[float] = []
    gain_errors: list[float] = []
    within = aligned = 0
    for number in range(METERS):
        draw = random.Random(seed + number)
        meter = VirtualMeter(
            lag_s=draw.uniform(0.0, 20.0),
            gain=draw.uniform(1.0, 1.12),
            offset_w=draw.uniform(100.0, 600.0),
            noise_w=draw.uniform(1.0, 40.0),
            period_s=draw.choice((0.5, 1.0, 2.0)),
        )
        training = VirtualTraining(seed=seed + 900 + number, meter=meter)
        verdict = proved(folder / f"meter-{number}", training, block_iterations=50, order_seed=number)
        found = verdict.alignment
        if found is None:
            continue
        aligned += found.is_aligned
        lag_errors_s.append(abs(found.lag_s - meter.lag_s))
        gain_errors.append(abs(found.gain / meter.gain - 1))
        within += lag_errors_s[-1] <= found.lag_error_s and abs(found.gain - meter.gain) <= found.gain_error
    return {
        "tried": METERS,
        "aligned": aligned,
        "within_error": within,
        "lag_error_max_s": max(lag_errors_s),
        "gain_error_max_ratio": max(gain_errors),
    }


if __name__ == "__main__":
    sys.exit(main())
