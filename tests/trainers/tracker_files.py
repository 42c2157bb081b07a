"""Scalars that a tracker has stored on this machine, read by the tracker's own package."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WITHOUT_NETWORK = {
    "TENSORBOARD_LOGGING_DIR": "{folder}/board",
    "MLFLOW_TRACKING_URI": "sqlite:///{folder}/mlflow.db",
    "WANDB_MODE": "offline",
    "WANDB_DIR": "{folder}",
    "WANDB_CONSOLE": "off",
    "TRACKIO_DIR": "{folder}/trackio",
}
"""Settings by which each tracker stores its records in a folder."""


def tensorboard_scalars(folder: Path) -> dict[str, float]:
    """Return the last value of each scalar in the event files under a folder."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, float] = {}
    for path in sorted(folder.rglob("events.out.*")):
        events = module.EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] = events.Scalars(name)[-1].value
    return found


def mlflow_scalars(_folder: Path) -> dict[str, float]:
    """Return the last value of each metric of the only run in the store that MLFLOW_TRACKING_URI names."""
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.flush_async_logging()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    return dict(run.data.metrics)


def wandb_scalars(folder: Path) -> dict[str, float]:
    """Return the last value of each scalar in the only offline run under a folder."""
    wandb: Any = importlib.import_module("wandb")
    wandb.finish()
    wandb.teardown()
    (path,) = folder.rglob("run-*.wandb")
    program = Path(sys.executable).with_name("wandb")
    inspect: list[str | Path] = [program, "leet", "inspect", "--summary", "--json", path]
    summary = json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)["summary"]
    return {name: value for name, value in summary.items() if isinstance(value, int | float)}


def trackio_scalars(_folder: Path) -> dict[str, float]:
    """Return the last value of each metric of the only run in the folder that TRACKIO_DIR names."""
    (run,) = importlib.import_module("trackio").Api().runs("huggingface")
    rows = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("huggingface", run.name)
    return {name: value for row in rows for name, value in row.items() if isinstance(value, int | float)}


SCALARS: Mapping[str, Callable[[Path], dict[str, float]]] = {
    "tensorboard": tensorboard_scalars,
    "mlflow": mlflow_scalars,
    "wandb": wandb_scalars,
    "trackio": trackio_scalars,
}
"""Reader of each tracker, by its name in the Trainer's `report_to`."""
