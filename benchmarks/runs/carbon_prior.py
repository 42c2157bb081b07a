"""Fits the pooled prior that ships with the policies: a ridge and three small networks on traces of many zones.

    python benchmarks/runs/carbon_prior.py TRACES_FOLDER --out FILE.npz [--leave-out ZONE] [--until 2024-01-01]

TRACES_FOLDER holds `ZONE_SOURCE_YEAR.csv` files, hourly, `timestamp_utc,carbon_intensity_g_per_kwh`. --leave-out
excludes a zone, to measure the skill of the prior for zones that it was not fitted on. A network takes half a minute or
more; --networks-from reuses those that the same command fitted before with the same traces.
"""

import argparse
import csv
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from gpuenergyd_policies.carbon.features import (
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    crossed_shape_features,
    shape_features,
    targets,
)
from gpuenergyd_policies.carbon.recent_dynamics import dynamics_features

HIDDEN = 192
EPOCHS = 6
BATCH = 512
NUM_NETWORKS = 3
RIDGE_WEIGHT = 0.35
SKIPPED_YEARS = {("KR", "2021")}
"""A year of nearly constant values, which would bias the fit towards persistence."""


class Network(torch.nn.Module):
    """Two hidden layers with a parallel linear path, which is initially the whole model."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.l = torch.nn.Linear(num_features, NUM_TARGET_HOURS)
        self.a = torch.nn.Linear(num_features, HIDDEN)
        self.b = torch.nn.Linear(HIDDEN, HIDDEN)
        self.c = torch.nn.Linear(HIDDEN, NUM_TARGET_HOURS)
        self.dropout = torch.nn.Dropout(0.1)
        torch.nn.init.zeros_(self.c.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return corrections of the naive forecast."""
        hidden = self.dropout(torch.nn.functional.gelu(self.a(x), approximate="tanh"))
        hidden = self.dropout(torch.nn.functional.gelu(self.b(hidden), approximate="tanh"))
        result: torch.Tensor = self.l(x) + self.c(hidden)
        return result


def read_histories(folder: Path, until: datetime, leave_out: str | None) -> list[FilledHistory]:
    """Return one history per zone and source, since sources differ in the quantity they report."""
    rows: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*_*_*.csv")):
        zone, source, year = path.stem.split("_")
        if zone == leave_out or (zone, year) in SKIPPED_YEARS:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                at = datetime.fromisoformat(row["timestamp_utc"])
                at = at if at.tzinfo else at.replace(tzinfo=UTC)
                if at < until:
                    rows[zone, source][at] = float(row["carbon_intensity_g_per_kwh"])
    histories = []
    for hours in rows.values():
        values = np.array([hours[at] for at in sorted(hours)])
        histories.append(FilledHistory(min(hours), values, np.zeros(len(values), dtype=bool)))
    return histories


def training_data(histories: list[FilledHistory]) -> tuple[Array, Array, Array, Array]:
    """Return shape features, dynamics features, corrections of the naive forecast, and each zone's weight per hour."""
    features, local, corrections, weights = [], [], [], []
    for history in histories:
        origins = np.arange(WEEK_HOURS, len(history.values) - NUM_TARGET_HOURS + 1)
        shapes = shape_features(history, origins)
        truth = (targets(history.values, origins) - shapes.level[:, None]) / shapes.spread[:, None]
        correction = truth - shapes.naive
        features.append(shapes.features.astype(np.float32))
        local.append(dynamics_features(history.values, origins, shapes).astype(np.float32))
        corrections.append(correction.astype(np.float32))
        weights.append(np.tile(1.0 / np.abs(correction).mean(axis=0), (len(origins), 1)).astype(np.float32))
    return np.concatenate(features), np.concatenate(local), np.concatenate(corrections), np.concatenate(weights)


def fit_ridge(features: Array, local: Array, corrections: Array) -> Array:
    """Return a weighted ridge on crossed and dynamics features; re-weighting approximates absolute errors."""
    size = np.abs(corrections[:, :24]).mean(axis=1)
    weights = 1.0 / (size + 0.5 * size.mean())
    gram: Array = np.zeros(())
    cross: Array = np.zeros(())
    for k in range(0, len(features), 4096):
        crossed = crossed_shape_features(features[k : k + 4096].astype(np.float64))
        x = np.concatenate([crossed, local[k : k + 4096].astype(np.float64)], axis=1)
        weighted = x * weights[k : k + 4096, None]
        gram = gram + weighted.T @ x
        cross = cross + np.asarray(weighted.T @ corrections[k : k + 4096], dtype=np.float64)
    penalised = gram + np.diag(3e-4 * np.diag(gram) + 1e-3)
    return np.asarray(np.linalg.solve(penalised, cross), dtype=np.float64)


def fit_network(features: Array, corrections: Array, weights: Array, seed: int) -> Network:
    """Return a network trained on absolute errors, with more weight on near hours, which plans depend on most."""
    torch.manual_seed(seed)
    importance = torch.ones(NUM_TARGET_HOURS)
    importance[24:] = 0.4
    importance[0] = 4.0
    importance[1:3] = 2.0
    x, y = torch.from_numpy(features), torch.from_numpy(corrections)
    w = torch.from_numpy(weights) * (importance / importance.mean())
    network = Network(x.shape[1])
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=2e-2)
    steps = EPOCHS * (len(x) // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    for epoch in range(EPOCHS):
        order, total = torch.randperm(len(x)), 0.0
        for k in range(len(x) // BATCH):
            batch = order[k * BATCH : (k + 1) * BATCH]
            loss = ((network(x[batch]) - y[batch]).abs() * w[batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(f"seed {seed}, epoch {epoch + 1} of {EPOCHS}: loss {total / (len(x) // BATCH):.4f}", flush=True)
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--leave-out")
    parser.add_argument("--until", default="2024-01-01")
    parser.add_argument("--num-networks", type=int, default=NUM_NETWORKS)
    parser.add_argument("--networks-from", type=Path, help="a prior file whose first networks are reused")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = datetime.fromisoformat(options.until).replace(tzinfo=UTC)
    features, local, corrections, weights = training_data(read_histories(options.traces, until, options.leave_out))
    print(f"{len(features)} origins, {features.shape[1]} features", flush=True)
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-2
    stored: dict[str, Array] = {
        "ridge": fit_ridge(features, local, corrections).astype(np.float32),
        "mean": mean,
        "deviation": deviation,
        "ridge_weight": np.array(RIDGE_WEIGHT),
        "num_networks": np.array(options.num_networks),
    }
    scaled = ((features - mean) / deviation).astype(np.float32)
    num_known = 0
    if options.networks_from is not None:
        with np.load(options.networks_from, allow_pickle=False) as known:
            num_known = min(int(known["num_networks"]), options.num_networks)
            stored |= {name: known[name] for name in known.files if name.split(".")[0] in map(str, range(num_known))}
    for number in range(num_known, options.num_networks):
        network = fit_network(scaled, corrections, weights, seed=number)
        for name, tensor in network.state_dict().items():
            stored[f"{number}.{name}"] = tensor.numpy().astype(np.float16)
    np.savez_compressed(options.out, **stored)  # type: ignore[arg-type]  # numpy takes any names
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
