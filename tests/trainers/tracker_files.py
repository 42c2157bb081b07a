"""Scalars that a tracker has stored on this machine, read by the tracker's own package."""

import importlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


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
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.rglob("run-*.wandb")
    found: dict[str, float] = {}
    for data in _leveldb_records(path.read_bytes()):
        for item in messages.Record.FromString(data).history.item:
            value = json.loads(item.value_json)
            if isinstance(value, int | float):
                found[item.key or ".".join(item.nested_key)] = value
    return found


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: its header, then LevelDB's log format, which its package writes but cannot read.

    Each block has chunks of checksum (4 bytes), length (2) and kind (1: full, 2: first, 3: middle, 4: last).
    """
    header_bytes, chunk_header_bytes, block_bytes = 7, 7, 32768
    position, record = header_bytes, b""
    while position + chunk_header_bytes <= len(data):
        left = block_bytes - position % block_bytes
        if left < chunk_header_bytes:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += chunk_header_bytes + length
        record += data[position - length : position]
        if kind in {1, 4}:
            yield record
            record = b""


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
